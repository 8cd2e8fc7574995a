package main

import (
	"testing"

	"github.com/spf13/pflag"

	"nodeproxy/config"
)

// TestEnumerated: the values that shells complete are taken.
func TestEnumerated(t *testing.T) {
	t.Parallel()
	for name, values := range enumerated {
		for _, value := range values {
			flags, fs := &config.Flags{}, pflag.NewFlagSet("", pflag.ContinueOnError)
			flags.Add(fs)
			if fs.Lookup(name) == nil {
				continue // A subcommand has it.
			}
			if err := fs.Parse([]string{"--manifests=m", "--pod-bridge-interface=b", "--pod-interface-name-prefix=p", "--" + name + "=" + value}); err != nil {
				t.Error(err)
			}
			if _, err := flags.Config(); err != nil {
				t.Errorf("--%s=%s: %v", name, value, err)
			}
		}
	}
}
