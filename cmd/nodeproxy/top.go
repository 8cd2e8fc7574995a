package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"nodeproxy/cmd/nodeproxy/top"
	"nodeproxy/plan"
)

func topCommand() *cobra.Command {
	i, t := &inspector{}, &top.Top{}
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the traffic of Services as it goes, the latest changes, and what syncs cost",
		Long: "top shows the connections, packets and bytes per second of each port of a Service, the latest changes of Services, and what syncs\n" +
			"cost. On a terminal the table stays in place: q quits; c, p, b, t and n sort by connections, packets, bytes, all connections so far\n" +
			"and name; / filters as you type, Enter keeps the filter and Esc ends it. Elsewhere, it prints a table for each interval.\n\n" +
			"Which columns there are depends on the mode: packets and bytes are counted in mode ipvs, and in mode iptables with\n" +
			"--service-metrics; mode nftables counts connections.\n" + runningHelp,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if t.Every < 100*time.Millisecond {
				return &usageError{fmt.Errorf("--interval: %s is less than 100ms", t.Every)}
			}
			if t.Count < 0 {
				return &usageError{fmt.Errorf("--count: %d is below 0", t.Count)}
			}
			client := i.client("")
			t.Sample = func() top.Sample {
				traffic, err := client.Traffic(cmd.Context())
				if err != nil {
					return top.Sample{Err: err}
				}
				syncs, err := client.History(cmd.Context(), plan.Service{})
				return top.Sample{Traffic: traffic, Syncs: syncs, Err: err}
			}
			if i.given("namespace") {
				t.Namespace = i.namespace
			}
			out, isFile := cmd.OutOrStdout().(*os.File)
			if isFile && term.IsTerminal(int(out.Fd())) && term.IsTerminal(int(os.Stdin.Fd())) && t.Count == 0 && i.output == "" {
				return t.Live(cmd.Context(), out)
			}
			w := cmd.OutOrStdout()
			return t.Print(cmd.Context(), func(s top.Sample, table func(io.Writer) error) error {
				return i.show(w, s.Traffic, false, func(string) error { return table(w) })
			})
		},
	}
	i.addRunning(cmd, "table, json or yaml")
	namespace := cmd.Flags().Lookup("namespace")
	namespace.Usage, namespace.DefValue = "show the Services of this namespace only", ""
	cmd.Flags().DurationVar(&t.Every, "interval", 2*time.Second, "time between two readings")
	cmd.Flags().IntVar(&t.Count, "count", 0, "print so many tables, and exit; 0 for no end")
	return cmd
}
