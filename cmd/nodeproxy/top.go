package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"nodeproxy/inspect"
	"nodeproxy/plan"
)

func topCommand() *cobra.Command {
	i, t := &inspector{}, &top{}
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
			if t.every < 100*time.Millisecond {
				return &usageError{fmt.Errorf("--interval: %s is less than 100ms", t.every)}
			}
			client := inspect.NewClient(i.socket())
			t.sample = func() topSample {
				traffic, err := client.Traffic(cmd.Context())
				if err != nil {
					return topSample{err: unanswered(err, i.socket(), "")}
				}
				syncs, err := client.History(cmd.Context(), plan.Service{})
				return topSample{traffic, syncs, err}
			}
			if i.given("namespace") {
				t.view.namespace = i.namespace
			}
			out, isFile := cmd.OutOrStdout().(*os.File)
			if isFile && term.IsTerminal(int(out.Fd())) && term.IsTerminal(int(os.Stdin.Fd())) && t.count == 0 && i.output == "" {
				return t.live(cmd.Context(), out)
			}
			return t.print(cmd.Context(), cmd.OutOrStdout(), i)
		},
	}
	i.addRunning(cmd, "table, json or yaml")
	namespace := cmd.Flags().Lookup("namespace")
	namespace.Usage, namespace.DefValue = "show the Services of this namespace only", ""
	cmd.Flags().DurationVar(&t.every, "interval", 2*time.Second, "time between two readings")
	cmd.Flags().IntVar(&t.count, "count", 0, "print so many tables, and exit; 0 for no end")
	return cmd
}

// top shows samples.
type top struct {
	every  time.Duration
	count  int
	view   topView
	sample func() topSample
}

// live shows them on a terminal until the user has had enough.
func (t *top) live(ctx context.Context, out *os.File) error {
	first := t.sample()
	if first.err != nil { // It stays readable, unlike what is shown on a screen of its own.
		return first.err
	}
	t.view.take(first)
	_, err := tea.NewProgram(topModel{topView: t.view, every: t.every, sample: t.sample}, tea.WithContext(ctx), tea.WithOutput(out)).Run()
	if errors.Is(err, tea.ErrInterrupted) {
		return nil
	}
	return err
}

// print prints a table for each interval.
func (t *top) print(ctx context.Context, w io.Writer, i *inspector) error {
	if t.count < 0 {
		return &usageError{fmt.Errorf("--count: %d is below 0", t.count)}
	}
	for n := 0; t.count == 0 || n < t.count; n++ {
		if n == 0 {
			first := t.sample()
			if first.err != nil {
				return first.err
			}
			t.view.take(first)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(t.every):
		}
		s := t.sample()
		if s.err != nil {
			return s.err
		}
		t.view.take(s)
		if err := i.print(w, s.traffic, func(string) error { return t.table(w) }); err != nil {
			return err
		}
	}
	return nil
}

// table prints what there is to see.
func (t *top) table(w io.Writer) error {
	text := t.view.traffic(t.view.rows())
	if !t.view.now.Counted {
		text = notCounted + "\n"
	}
	changes := t.view.changes(mostChanges)
	if changes != "" {
		changes += "\n"
	}
	_, err := fmt.Fprintf(w, "%s\n%s\n%s%s\n", t.view.now.At.Local().Format(time.DateTime), t.view.costs(), changes, text)
	return err
}
