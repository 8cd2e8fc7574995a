package main

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"nodeproxy/config"
)

// TestFlagsOfSubcommands: each flag of run's is read by a subcommand, or a mistake there, and then nothing is done.
func TestFlagsOfSubcommands(t *testing.T) {
	t.Parallel()
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(config.Flags).Add(all)
	for _, r := range flagReaders {
		for _, name := range strings.Fields(r.flags) {
			if all.Lookup(name) == nil {
				t.Errorf("the table has --%s, which is no flag", name)
			}
		}
	}
	refused := map[string]int{}
	for _, subcommand := range []string{"render", "config", "cleanup", "explain"} {
		all.VisitAll(func(f *pflag.Flag) {
			cmd := root()
			sub, _, err := cmd.Find([]string{subcommand})
			require.NoError(t, err)
			ran := false
			sub.RunE = func(*cobra.Command, []string) error { ran = true; return nil }
			value := f.DefValue
			switch f.Value.Type() { // As the flag itself takes it, not as the help shows it.
			case "duration":
				value = "1s"
			case "mapStringBool":
				value = "X=true"
			case "pattern=N,...":
				value = "x=1"
			case "quantity":
				value = "1"
			case "stringSlice":
				value = "10.0.0.0/8"
			}
			sub.Args = nil // explain wants a Service, which has nothing to do with flags.
			cmd.SetArgs([]string{subcommand, "--" + f.Name + "=" + value})
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			err = cmd.Execute()
			if reads(subcommand, f.Name) {
				if err != nil || !ran {
					t.Errorf("%s --%s=%s: %v", subcommand, f.Name, value, err)
				}
				return
			}
			refused[subcommand]++
			var usage *usageError
			want := "--" + f.Name + ": it means nothing to nodeproxy " + subcommand
			if ran || !errors.As(err, &usage) || err.Error() != want {
				t.Errorf("%s --%s=%s: %v, want %s", subcommand, f.Name, value, err, want)
			}
			if !sub.Flags().Lookup(f.Name).Hidden {
				t.Errorf("the help of %s shows --%s", subcommand, f.Name)
			}
		})
	}
	t.Logf("refused: %v", refused)
	for _, args := range []string{
		"render --cleanup", "render --take-over", "render --healthz-bind-address=:1", "render --conntrack-min=1", "cleanup --kubeconfig=k",
		"cleanup --write-config-to=f", "cleanup --mode=ipvs", "config --init-only",
	} {
		command, flag, _ := strings.Cut(args, " --")
		flag, _, _ = strings.Cut(flag, "=")
		if reads(command, flag) {
			t.Errorf("%s: it is taken", args)
		}
	}
}

// TestJSONDurations have a unit.
func TestJSONDurations(t *testing.T) {
	stderr := os.Stderr
	r, w, err := os.Pipe()
	require.NoError(t, err)
	os.Stderr = w
	newLog(&config.Config{LogFormat: "json", LogLevel: "info"}).Info("x", slog.Group("g", "took", 1500*time.Millisecond))
	os.Stderr = stderr
	w.Close()
	var text bytes.Buffer
	if _, err := io.Copy(&text, r); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), `"took":"1.5s"`) {
		t.Errorf("got %s", &text)
	}
}
