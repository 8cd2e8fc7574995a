package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"nodeproxy/inspect"
	"nodeproxy/plan"
)

func getCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get",
		Short: "List Services, endpoints, or what is wrong with them",
		Args:  noArgs,
		// So that what is missing or misspelt is named, not a flag that the subcommand has.
		FParseErrWhitelist: cobra.FParseErrWhitelist{UnknownFlags: true},
		RunE: func(*cobra.Command, []string) error {
			return &usageError{fmt.Errorf("get what? One of services, endpoints, findings")}
		},
	}
	cmd.AddCommand(getServicesCommand(), getEndpointsCommand(), getFindingsCommand())
	return cmd
}

func getServicesCommand() *cobra.Command {
	i, all := &inspector{}, false
	cmd := &cobra.Command{
		Use:     "services [[NAMESPACE/]NAME]",
		Aliases: []string{"service", "svc"},
		Short:   "List the ports of Services, a row for each address family",
		Long: "services lists the ports of Services as this node serves them. Usable endpoints are those that get traffic from this node. SINCE is\n" +
			"how long the kernel has had the present state of the Service. With -o wide, the running nodeproxy adds the number of connections to\n" +
			"each, if the mode counts them.\n" + fmt.Sprintf(inspectHelp, "get services -A"),
		Args: atMost(1, "one name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			of, err := i.service(args)
			if err != nil {
				return err
			}
			if len(args) == 0 && !all {
				of.Namespace = i.namespace
			}
			from, err := i.answers(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			ask := from.ServicePorts
			if i.output != "" && i.output != "table" {
				ask = from.CountedServicePorts
			}
			list, err := ask(cmd.Context(), of)
			if err != nil {
				return err
			}
			if len(list) == 0 {
				return noneFound(cmd.Context(), from, of)
			}
			return i.show(cmd.OutOrStdout(), list, false, func(form string) error {
				return inspect.WriteServicePorts(cmd.OutOrStdout(), list, form == "wide", time.Now())
			})
		},
	}
	i.add(cmd, "table, wide, json or yaml")
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "list the Services of all namespaces")
	return cmd
}

// noneFound is the error of a list without rows.
func noneFound(ctx context.Context, from answers, of plan.Service) error {
	switch {
	case of.Name != "":
		if _, err := from.Explain(ctx, of); err != nil { // It says what may have been meant.
			return err
		}
		return notProxied(of)
	case of.Namespace != "":
		list, err := from.ServicePorts(ctx, plan.Service{})
		if err != nil {
			return err
		}
		var names []string
		for _, sp := range list {
			names = append(names, sp.Namespace)
		}
		return fmt.Errorf("no Service of namespace %s is proxied here%s", of.Namespace,
			cmp.Or(inspect.DidYouMean(of.Namespace, names), "; --all-namespaces lists those of all namespaces"))
	}
	return fmt.Errorf("no Service is proxied here")
}

func notProxied(svc plan.Service) error {
	return fmt.Errorf("no Service %s is proxied here; \"nodeproxy explain %[1]s\" says why", svc)
}

func getEndpointsCommand() *cobra.Command {
	i := &inspector{}
	cmd := &cobra.Command{
		Use:     "endpoints [NAMESPACE/]SERVICE",
		Aliases: []string{"endpoint", "ep"},
		Short:   "List the endpoints of a Service, and why some are not used",
		Long:    "endpoints lists all endpoints of a Service, and says what this node uses each for, or why it does not use it.\n" + fmt.Sprintf(inspectHelp, "get endpoints web"),
		Args:    oneService,
		RunE: func(cmd *cobra.Command, args []string) error {
			e, err := i.explain(cmd, args)
			if err != nil {
				return err
			}
			for n := range e.Ports {
				e.Ports[n].Frontends = nil
			}
			return i.show(cmd.OutOrStdout(), e.Ports, false, func(form string) error {
				if len(e.Ports) == 0 {
					return notProxied(plan.Service{Namespace: e.Namespace, Name: e.Name})
				}
				return inspect.WriteEndpoints(cmd.OutOrStdout(), e.Ports, form == "wide")
			})
		},
	}
	i.add(cmd, "table, wide, json or yaml")
	return cmd
}

func getFindingsCommand() *cobra.Command {
	i := &inspector{}
	cmd := &cobra.Command{
		Use:     "findings",
		Aliases: []string{"finding"},
		Short:   "List what is wrong with objects now",
		Long:    "findings lists what is wrong now with objects and with the node, and what else their owners should know.\n" + fmt.Sprintf(inspectHelp, "get findings"),
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := i.answers(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			list, err := from.Findings(cmd.Context())
			if err != nil {
				return err
			}
			if len(list) == 0 && i.output == "" {
				fmt.Fprintln(cmd.OutOrStdout(), "Nothing is wrong.")
				return nil
			}
			problem := slices.ContainsFunc(list, func(f inspect.Finding) bool { return f.Severity == "problem" })
			return i.show(cmd.OutOrStdout(), list, problem, func(string) error { return inspect.WriteFindings(cmd.OutOrStdout(), list) })
		},
	}
	i.add(cmd, "table, json or yaml")
	return cmd
}

func explainCommand() *cobra.Command {
	i := &inspector{}
	cmd := &cobra.Command{
		Use:   "explain [NAMESPACE/]SERVICE",
		Short: "Explain what happens to the traffic of a Service on this node, and what is wrong",
		Long: "explain says for each address and port of a Service what happens to connections from a pod, from the node and from outside, which\n" +
			"endpoints are left out and why, what is wrong, and what to do about it.\n" + fmt.Sprintf(inspectHelp, "explain web"),
		Args: oneService,
		RunE: func(cmd *cobra.Command, args []string) error {
			e, err := i.explain(cmd, args)
			if err != nil {
				return err
			}
			return i.show(cmd.OutOrStdout(), e, e.Problem(), func(string) error {
				return inspect.WriteExplanation(cmd.OutOrStdout(), e, time.Now())
			})
		},
	}
	i.add(cmd, "text, json or yaml")
	return cmd
}

// explain returns the explanation of the Service that the arguments name.
func (i *inspector) explain(cmd *cobra.Command, args []string) (*inspect.Explanation, error) {
	svc, err := i.service(args)
	if err != nil {
		return nil, err
	}
	from, err := i.answers(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr())
	if err != nil {
		return nil, err
	}
	return from.Explain(cmd.Context(), svc)
}

// atMost refuses more arguments than n, which are called what.
func atMost(n int, what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return &usageError{fmt.Errorf("%q: only %s can be given", args[n], what)}
		}
		return nil
	}
}

func oneService(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return &usageError{fmt.Errorf("a Service is missing: %s", cmd.UseLine())}
	}
	return atMost(1, "one name")(cmd, args)
}
