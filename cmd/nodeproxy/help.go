package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// flagGroups lists the groups in which help shows the flags that commands share, and the flags of each group, in the order of the help.
// Each flag of package config that is not hidden is in exactly one group.
var flagGroups = []struct{ title, flags string }{
	{"General", "config write-config-to node-name hostname-override bind-address feature-gates take-over init-only cleanup sysctl-dir oom-score-adj"},
	{"API server", "kubeconfig master kube-api-content-type kube-api-qps kube-api-burst config-sync-period"},
	{"Manifests, in place of an API server", "manifests service-cidr service-node-port-range"},
	{"Mode", "mode proxy-mode masquerade-all nodeport-addresses"},
	{"Local traffic", "detect-local-mode cluster-cidr pod-bridge-interface pod-interface-name-prefix"},
	{"iptables", "iptables-backend iptables-masquerade-bit iptables-localhost-nodeports iptables-sync-period iptables-min-sync-period " +
		"min-sync-period reset-tcp"},
	{"ipvs", "ipvs-scheduler ipvs-vips ipvs-strict-arp ipvs-exclude-cidrs ipvs-graceful-period ipvs-tcp-timeout ipvs-tcpfin-timeout " +
		"ipvs-udp-timeout ipvs-sync-period ipvs-min-sync-period"},
	{"Connection tracking", "conntrack-max-per-core conntrack-min conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait " +
		"conntrack-udp-timeout conntrack-udp-timeout-stream conntrack-tcp-be-liberal"},
	{"Health and metrics", "healthz-bind-address metrics-bind-address bind-address-hard-fail profiling service-metrics " +
		"show-hidden-metrics-for-version"},
	{"Logging", "log-level v logging-format"},
}

// usage prints how to use a command: its subcommands, the flags that it alone has, and the others in groups.
func usage(cmd *cobra.Command) error {
	w := cmd.OutOrStderr()
	fmt.Fprint(w, "Usage:\n")
	if cmd.Runnable() {
		fmt.Fprintf(w, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "  %s [command]\n\nCommands:\n", cmd.CommandPath())
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				fmt.Fprintf(w, "  %-*s %s\n", sub.NamePadding(), sub.Name(), sub.Short)
			}
		}
	}
	flags, grouped := cmd.LocalFlags(), map[string]bool{}
	for _, g := range flagGroups {
		for _, name := range strings.Fields(g.flags) {
			grouped[name] = true
		}
	}
	var others []string
	flags.VisitAll(func(f *pflag.Flag) {
		if !grouped[f.Name] {
			others = append(others, f.Name)
		}
	})
	printFlags(w, "Flags", flags, others)
	for _, g := range flagGroups {
		printFlags(w, g.title, flags, strings.Fields(g.flags))
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "\n\"%s [command] --help\" tells more about a command.\n", cmd.CommandPath())
	}
	return nil
}

// printFlags prints the named flags in that order, except those that the command lacks or hides.
func printFlags(w io.Writer, title string, flags *pflag.FlagSet, names []string) {
	group := pflag.NewFlagSet(title, pflag.ContinueOnError)
	group.SortFlags = false
	for _, name := range names {
		if f := flags.Lookup(name); f != nil {
			group.AddFlag(f)
		}
	}
	if group.HasAvailableFlags() {
		fmt.Fprintf(w, "\n%s:\n%s", title, group.FlagUsages())
	}
}
