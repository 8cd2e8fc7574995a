package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"nodeproxy/config"
)

// flagReaders says which subcommands read a flag, besides run, which reads all. A flag that is not here is read by config too, which
// prints what it sets.
var flagReaders = []struct{ commands, flags string }{
	{"config render cleanup diff trace", "iptables-masquerade-bit"},
	{"config render diff trace", "nftables-masquerade-bit"},
	{"explain trace history status diff", "socket"},
	{"config render explain trace diff", "node-name hostname-override manifests kubeconfig master kube-api-content-type kube-api-qps kube-api-burst " +
		"service-cidr service-node-port-range mode proxy-mode cluster-cidr detect-local-mode pod-bridge-interface " +
		"pod-interface-name-prefix nodeport-addresses masquerade-all iptables-localhost-nodeports feature-gates reset-tcp service-metrics " +
		"ipvs-scheduler ipvs-vips log-level v logging-format"},
	{"config render cleanup explain trace status diff", "config"},
	// By the addresses, cleanup finds a proxy that runs.
	{"config cleanup diff", "iptables-backend ipvs-exclude-cidrs"},
	{"config diff", "ipvs-strict-arp"},
	{"config cleanup", "metrics-bind-address metrics-port"},
	// Where there is no answer by the socket, status asks there.
	{"config cleanup status", "healthz-bind-address healthz-port"},
	{"", "cleanup init-only"},
}

// oneOf returns the mistake of a flag whose value is none of those that there are.
func oneOf(flag, value string, all []string) error {
	if slices.Contains(all, value) {
		return nil
	}
	return &usageError{fmt.Errorf("--%s: %q is not one of %s", flag, value, strings.Join(all, ", "))}
}

// reads reports whether a subcommand reads a flag of run's.
func reads(command, flag string) bool {
	for _, r := range flagReaders {
		if slices.Contains(strings.Fields(r.flags), flag) {
			return slices.Contains(strings.Fields(r.commands), command)
		}
	}
	return command == "config"
}

// refuseOthers makes the flags of run's that a subcommand does not read a mistake on its command line, and leaves them out of its help.
func refuseOthers(cmd *cobra.Command) *cobra.Command { return refuseOthersAs(cmd, cmd.Name()) }

// refuseOthersAs does that for a subcommand that reads the same flags as another one.
func refuseOthersAs(cmd *cobra.Command, name string) *cobra.Command {
	var others []string
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(config.Flags).Add(all)
	all.VisitAll(func(f *pflag.Flag) {
		if !reads(name, f.Name) {
			others = append(others, f.Name)
			cmd.Flags().Lookup(f.Name).Hidden = true
		}
	})
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		for _, name := range others {
			if cmd.Flags().Changed(name) {
				return &usageError{fmt.Errorf("--%s: it means nothing to %s", name, cmd.CommandPath())}
			}
		}
		if f := cmd.Flags().Lookup("socket"); f.Changed && f.Value.String() == "" && name != "config" {
			return &usageError{fmt.Errorf("--socket: it is empty; it has to be the path at which the running nodeproxy answers, such as %s", f.DefValue)}
		}
		return nil
	}
	return cmd
}
