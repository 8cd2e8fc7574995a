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
	{"General", "config write-config-to node-name hostname-override bind-address feature-gates take-over hand-over-to init-only cleanup sysctl-dir oom-score-adj"},
	{"API server", "kubeconfig master kube-api-content-type kube-api-qps kube-api-burst config-sync-period"},
	{"Manifests, in place of an API server", "manifests service-cidr service-node-port-range"},
	{"Mode", "mode proxy-mode masquerade-all nodeport-addresses"},
	{"Local traffic", "detect-local-mode cluster-cidr pod-bridge-interface pod-interface-name-prefix"},
	{"iptables", "iptables-backend iptables-masquerade-bit iptables-localhost-nodeports iptables-sync-period iptables-min-sync-period " +
		"min-sync-period reset-tcp"},
	{"ipvs", "ipvs-scheduler ipvs-vips ipvs-strict-arp ipvs-exclude-cidrs ipvs-graceful-period ipvs-tcp-timeout ipvs-tcpfin-timeout " +
		"ipvs-udp-timeout ipvs-sync-period ipvs-min-sync-period"},
	{"nftables", "nftables-masquerade-bit nftables-sync-period nftables-min-sync-period"},
	{"Connection tracking", "conntrack-max-per-core conntrack-min conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait " +
		"conntrack-udp-timeout conntrack-udp-timeout-stream conntrack-tcp-be-liberal"},
	{"Health and metrics", "healthz-bind-address metrics-bind-address bind-address-hard-fail socket ui profiling service-metrics " +
		"show-hidden-metrics-for-version"},
	{"Logging", "log-level v logging-format"},
}

// exampleTexts are those of the help of commands, by their paths.
var exampleTexts = map[string]string{
	"nodeproxy run": `  nodeproxy run --kubeconfig=/etc/kubernetes/nodeproxy.conf
  nodeproxy run --config=/etc/nodeproxy.yaml --mode=nftables
  nodeproxy run --manifests=/etc/services --node-name=node1`,
	"nodeproxy render": `  nodeproxy render services.yaml --node-name=node1 --family=ipv4
  kubectl get services,endpointslices,nodes -A -o json | nodeproxy render - --mode=nftables --node-name=node1`,
	"nodeproxy config": `  nodeproxy config --mode=ipvs --ipvs-scheduler=lc
  nodeproxy config --config=/var/lib/kube-proxy/config.conf > nodeproxy.yaml`,
	"nodeproxy cleanup": `  nodeproxy cleanup --dry-run
  nodeproxy cleanup`,
	"nodeproxy get": `  nodeproxy get services -A
  nodeproxy get findings`,
	"nodeproxy get services": `  nodeproxy get services -A
  nodeproxy get services -n shop -o wide
  nodeproxy get services shop/web -o json`,
	"nodeproxy get endpoints": `  nodeproxy get endpoints shop/web
  nodeproxy get endpoints web -n shop -o wide`,
	"nodeproxy get findings": `  nodeproxy get findings
  nodeproxy get findings --kubeconfig=$HOME/.kube/config --node-name=node1`,
	"nodeproxy trace": `  nodeproxy trace outside 192.0.2.9:443
  nodeproxy trace shop/client-0 shop/web:http
  nodeproxy trace node kube-system/kube-dns:53 -p udp
  nodeproxy trace 203.0.113.7 node:30080
  nodeproxy trace outside 192.0.2.9:443 --live --for=30s
  nodeproxy trace outside web --manifests=services.yaml --node-name=node1 --mode=nftables`,
	"nodeproxy explain": `  nodeproxy explain shop/web
  kubectl -n kube-system exec ds/nodeproxy -- nodeproxy explain shop/web
  nodeproxy explain web --manifests=services.yaml --node-name=node1 -o json`,
	"nodeproxy status": `  nodeproxy status
  kubectl -n kube-system exec ds/nodeproxy -- nodeproxy status
  nodeproxy status -o json | jq .wrong`,
	"nodeproxy top": `  nodeproxy top
  nodeproxy top -n shop --interval=5s
  nodeproxy top --count=1 -o json`,
	"nodeproxy support": `  nodeproxy support
  nodeproxy support --hash-names
  kubectl -n kube-system exec ds/nodeproxy -- nodeproxy support -o - > report.tar.gz`,
	"nodeproxy history": `  nodeproxy history
  nodeproxy history shop/web -o wide`,
	"nodeproxy completion":            `  source <(nodeproxy completion bash)`,
	"nodeproxy completion bash":       `  nodeproxy completion bash > /etc/bash_completion.d/nodeproxy`,
	"nodeproxy completion zsh":        `  nodeproxy completion zsh > "${fpath[1]}/_nodeproxy"`,
	"nodeproxy completion fish":       `  nodeproxy completion fish > ~/.config/fish/completions/nodeproxy.fish`,
	"nodeproxy completion powershell": `  nodeproxy completion powershell | Out-String | Invoke-Expression`,
	"nodeproxy install": `  nodeproxy install --image=registry.example.org/nodeproxy:v1 > nodeproxy.yaml
  nodeproxy install -o values > values.yaml
  nodeproxy install --migrate -o kube-proxy-off > off.json
  kubectl get configmaps,daemonsets,pods,nodes,services -A -o json | nodeproxy install -f - --mode=nftables`,
	"nodeproxy diff": `  nodeproxy diff
  nodeproxy diff shop/web --manifests=new/
  nodeproxy diff --mode=nftables --stat`,
}

// requireCommand makes it a mistake to ask for the help of a command that does not exist.
func requireCommand(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, _ := root.Find([]string{"help"})
	help.Long = "help prints the help of a command, as its flag --help does."
	help.Args = func(_ *cobra.Command, args []string) error {
		about, rest, err := root.Find(args)
		if err == nil {
			err = noArgs(about, rest)
		}
		return err
	}
}

// requireShell makes it a mistake to ask for the completion of no shell, or of one that is not known.
func requireShell(root *cobra.Command) {
	completion, _, _ := root.Find([]string{"completion"})
	var shells []string
	for _, sub := range completion.Commands() {
		shells = append(shells, sub.Name())
		sub.Args = noArgs
	}
	list := strings.Join(shells, ", ")
	completion.Args = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return &usageError{fmt.Errorf("unknown shell %q: it is not one of %s", args[0], list)}
		}
		return &usageError{fmt.Errorf("completion for which shell? One of %s", list)}
	}
	completion.RunE = func(*cobra.Command, []string) error { return nil } // Its arguments are never right.
}

// addExamples gives a command and those below it their examples.
func addExamples(cmd *cobra.Command) {
	cmd.Example = exampleTexts[cmd.CommandPath()]
	for _, sub := range cmd.Commands() {
		addExamples(sub)
	}
}

// usage prints how to use a command: examples, its subcommands, the flags that it alone has, and the others in groups.
func usage(cmd *cobra.Command) error {
	w := cmd.OutOrStderr()
	fmt.Fprint(w, "Usage:\n")
	if cmd.Runnable() {
		fmt.Fprintf(w, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "  %s [command]\n", cmd.CommandPath())
	}
	if cmd.HasExample() {
		fmt.Fprintf(w, "\nExamples:\n%s\n", cmd.Example)
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprint(w, "\nCommands:\n")
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
