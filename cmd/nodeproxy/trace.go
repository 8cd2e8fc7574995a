package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

func traceCommand() *cobra.Command {
	i, protocol, live := &inspector{}, "", liveTrace{}
	cmd := &cobra.Command{
		Use:   "trace FROM TO[:PORT]",
		Short: "Follow a packet through the rules, to its possible endpoints",
		Long: "trace says what happens to the first packet of a connection on this node: which rules, virtual server or map elements it\n" +
			"passes, which endpoints it may reach, how likely each is, and whether it is masqueraded; or why it is rejected, dropped\n" +
			"or left alone. It sends no packet.\n\n" +
			"With --live, it waits for real packets that begin such connections, follows them through all rules of the kernel, including those\n" +
			"of other programs, and shows prediction and fact side by side. It needs root on the node, and sends nothing either. The kernel\n" +
			"does not report rules of iptables-legacy, but it still shows what becomes of the packets. The exit code is 1 if no packet came, if\n" +
			"one took another way than predicted, or if one was dropped.\n\n" +
			"FROM is node, outside, an address, or the [NAMESPACE/]NAME of a Pod. TO is an address; a Service, as [NAMESPACE/]NAME or as DNS has\n" +
			"it (NAME.NAMESPACE.svc), which stands for its cluster IPs; or node, which stands for an address of this node. An IPv6 address with a\n" +
			"port is in brackets. The port can be left out if there is only one.\n" + fmt.Sprintf(inspectHelp, "trace outside web"),
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return &usageError{fmt.Errorf("FROM and TO are required: %s", cmd.UseLine())}
			}
			return atMost(2, "FROM and TO")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			q := inspect.TraceQuery{From: args[0], To: args[1], Protocol: plan.Protocol(strings.ToUpper(protocol)), Namespace: i.namespace}
			switch q.Protocol {
			case "", plan.TCP, plan.UDP, plan.SCTP:
			default:
				return &usageError{fmt.Errorf("--protocol: %q is not one of tcp, udp, sctp", protocol)}
			}
			if err := live.check(cmd.Flags().Changed); err != nil {
				return err
			}
			from, err := i.answers(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			t, err := from.Trace(cmd.Context(), q)
			var cant *inspect.TraceError
			var refused *inspect.AnswerError
			switch {
			case errors.As(err, &cant), errors.As(err, &refused) && refused.BadRequest():
				return &usageError{err}
			case err != nil:
				return err
			}
			if live.on {
				l, err := live.follow(cmd.Context(), t, from)
				if err != nil {
					return err
				}
				return i.show(cmd.OutOrStdout(), l, l.Problem(), func(string) error { return inspect.WriteLive(cmd.OutOrStdout(), l) })
			}
			return i.show(cmd.OutOrStdout(), t, t.Problem(), func(string) error {
				err := inspect.WriteTrace(cmd.OutOrStdout(), t)
				if _, running := from.(*inspect.Client); running && err == nil {
					_, err = fmt.Fprint(cmd.OutOrStdout(), "\nRules of other programs are not looked at here: --live follows real packets through them, and\n"+
						"\"nodeproxy explain\" names those that drop.\n")
				}
				return err
			})
		},
	}
	i.addAs(cmd, "trace", "table, json or yaml")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return []string{"node", "outside"}, cobra.ShellCompDirectiveNoFileComp
		}
		return i.completeService(cmd, args[1:], typed)
	}
	cmd.Flags().BoolVar(&live.on, "live", false, "follow real packets of the flow, and compare")
	cmd.Flags().DurationVar(&live.duration, "for", 5*time.Second, "with --live: how long to wait for packets")
	cmd.Flags().IntVar(&live.most, "max-packets", 5, "with --live: how many connections to follow before it ends")
	cmd.Flags().StringVarP(&protocol, "protocol", "p", "", "tcp, udp or sctp; by default that of the Service's port, or tcp")
	return cmd
}

// machineOf returns what makes the rules of a configuration's mode for a packet.
func machineOf(cfg *config.Config) func(whole, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error) {
	return func(whole, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error) {
		return modeNamed(cfg.Mode).machine(cfg, whole, near, f, local)
	}
}

// localAddresses returns what tells the addresses of this node from others, without those that mode ipvs adds for Services.
func localAddresses() (func(netip.Addr) bool, error) {
	list, err := host.Filter{Except: []string{names.Device}, LinkLocal: true}.Addresses(plan.Families[:]...)
	if err != nil {
		return nil, err
	}
	own := map[netip.Addr]bool{}
	for _, a := range list {
		own[a.Addr] = true
	}
	return func(a netip.Addr) bool { return a.IsLoopback() || own[a] }, nil
}
