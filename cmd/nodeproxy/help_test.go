package main

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"nodeproxy/config"
)

// TestFlagGroups: each flag that help shows is in exactly one group, and groups have no others.
func TestFlagGroups(t *testing.T) {
	t.Parallel()
	groups := map[string][]string{}
	for _, g := range flagGroups {
		for _, name := range strings.Fields(g.flags) {
			groups[name] = append(groups[name], g.title)
		}
	}
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(config.Flags).Add(all)
	all.VisitAll(func(f *pflag.Flag) {
		if in := groups[f.Name]; !f.Hidden && len(in) != 1 {
			t.Errorf("--%s is in the groups %q, want one", f.Name, in)
		}
	})
	for name, in := range groups {
		if f := all.Lookup(name); f == nil || f.Hidden {
			t.Errorf("%q has --%s, which help does not show", in, name)
		}
	}
}

var helpLine = regexp.MustCompile(`(?m)^  (?:-\w, |    )--([a-z-]+)`)

// TestHelp: the help of each command shows each flag that the command takes once, in the order of the groups, after the flags of its own.
func TestHelp(t *testing.T) {
	t.Parallel()
	for command, own := range map[string][]string{
		"": {"help", "version"}, "run": {"help"}, "render": {"family", "help", "lenient"}, "config": {"help"}, "cleanup": {"dry-run", "help", "nftables-only"},
		"version": {"help"}, "explain": {"help", "namespace", "output"}, "get services": {"all-namespaces", "help", "namespace", "output"},
		"get endpoints": {"help", "namespace", "output"}, "get findings": {"help", "namespace", "output"}, "get": {"help"},
	} {
		cmd, _, err := root().Find(strings.Fields(command))
		require.NoError(t, err)
		var help strings.Builder
		cmd.Root().SetOut(&help)
		cmd.Root().SetArgs([]string{"--help"})
		if command != "" {
			cmd.Root().SetArgs(append(strings.Fields(command), "--help"))
		}
		require.NoError(t, cmd.Root().Execute())
		want := own
		for _, g := range flagGroups {
			shown := 0
			for _, name := range strings.Fields(g.flags) {
				if f := cmd.Flags().Lookup(name); f != nil && !f.Hidden {
					want = append(want, name)
					shown++
				}
			}
			if strings.Contains(help.String(), "\n\n"+g.title+":\n") != (shown > 0) {
				t.Errorf("%q --help shows %d flags of group %q, and its title without them or not at all", command, shown, g.title)
			}
		}
		var got []string
		for _, m := range helpLine.FindAllStringSubmatch(help.String(), -1) {
			got = append(got, m[1])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q --help shows\n%q, want\n%q", command, got, want)
		}
	}
}
