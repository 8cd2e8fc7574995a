package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/plan"
)

// enumerated are the values of flags that take one of few, wherever they are defined.
var enumerated = map[string][]string{
	"mode": config.Modes(), "proxy-mode": config.Modes(), "iptables-backend": {"auto", "nft", "legacy"},
	"detect-local-mode": {"ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"},
	"ipvs-scheduler":    {"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh"}, "ipvs-vips": {"routes", "addresses"},
	"nodeport-addresses": {"primary", "localhost", "all"},
	"protocol":           {"tcp", "udp", "sctp"},
	"ui":                 {"node", "true", "false"},
	"log-level":          {"debug", "info", "warn", "error"}, "logging-format": {"text", "json"}, "family": {"ipv4", "ipv6", "all"},
	"against": {"kernel", "running"}, "color": {"auto", "always", "never"},
}

// formsIn are the words of a text such as "table, json or yaml".
func formsIn(text string) []string {
	return strings.Fields(strings.NewReplacer(",", "", " or ", " ").Replace(text))
}

// pathFlags are the flags whose value is a path, which a shell can complete by itself.
const pathFlags = "config write-config-to manifests kubeconfig filename socket sysctl-dir"

// completeAll has shells complete the values of the flags of a command and of those below it, and nothing where nobody knows what could
// come next.
func completeAll(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		values, ok := enumerated[f.Name]
		switch {
		case f.Name == "output": // Its usage lists the forms, which differ.
			if _, list, found := strings.Cut(f.Usage, ": "); found {
				values, ok = formsIn(list), true
			}
		case slices.Contains(strings.Fields(pathFlags), f.Name):
			return
		}
		if _, set := cmd.GetFlagCompletionFunc(f.Name); set { // Commands share flags.
			return
		}
		complete := cobra.NoFileCompletions
		if ok {
			complete = cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
		}
		_ = cmd.RegisterFlagCompletionFunc(f.Name, complete) // It fails only for a flag that does not exist, or that has one.
	})
	if cmd.ValidArgsFunction == nil && len(cmd.ValidArgs) == 0 {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range cmd.Commands() {
		completeAll(sub)
	}
}

// completionTime is how long a shell waits for names of Services.
const completionTime = 2 * time.Second

// known returns the ServicePorts that the flags given so far lead to; nil if they can't be read soon. It writes nothing: the user is in
// the middle of a line.
func (i *inspector) known(cmd *cobra.Command) []inspect.ServicePort {
	if f := cmd.Flags().Lookup("manifests"); f.Value.String() == "-" { // Standard input is the terminal as yet.
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	answer := make(chan []inspect.ServicePort, 1)
	go func() {
		var list []inspect.ServicePort
		if from, err := i.answers(ctx, strings.NewReader(""), io.Discard); err == nil {
			list, _ = from.ServicePorts(ctx, plan.Service{})
		}
		answer <- list
	}()
	select {
	case list := <-answer:
		return list
	case <-ctx.Done():
		return nil
	}
}

// completeService completes the argument of a command that takes one Service: those of the namespace by their names, all by NAMESPACE/NAME.
func (i *inspector) completeService(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names := map[string]bool{}
	for _, sp := range i.known(cmd) {
		for _, name := range []string{sp.Name, sp.Namespace + "/" + sp.Name} {
			if strings.HasPrefix(name, typed) && (name != sp.Name || sp.Namespace == i.namespace) {
				names[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names)), cobra.ShellCompDirectiveNoFileComp
}

// completeNamespace completes the namespace of Services.
func (i *inspector) completeNamespace(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	names := map[string]bool{}
	for _, sp := range i.known(cmd) {
		if strings.HasPrefix(sp.Namespace, typed) {
			names[sp.Namespace] = true
		}
	}
	return slices.Sorted(maps.Keys(names)), cobra.ShellCompDirectiveNoFileComp
}

// flagMistake turns what pflag says of a command line into a mistake that names what may have been meant.
func flagMistake(cmd *cobra.Command, err error) error {
	if args := cmd.Flags().Args(); len(args) > 0 && !cmd.HasParent() { // A misspelt command comes before its flags.
		return noArgs(cmd, args)
	}
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && len(unknown.GetSpecifiedName()) > 1 {
		if near := nearestFlags(cmd, unknown.GetSpecifiedName()); len(near) > 0 {
			err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(near, " or "))
		}
	}
	return &usageError{err}
}

// nearestFlags returns the flags of a command whose name is like a misspelt one.
func nearestFlags(cmd *cobra.Command, typed string) []string {
	// What suggests commands compares any names.
	names := &cobra.Command{SuggestionsMinimumDistance: 2}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
		}
	})
	var out []string
	for _, name := range names.SuggestionsFor(typed) {
		out = append(out, "--"+name)
	}
	return out
}
