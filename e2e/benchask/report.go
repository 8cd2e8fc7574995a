package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"nodeproxy/e2e/measure"
)

// printTables prints what was measured, and returns how many goals are missed.
func printTables(w io.Writer, o options, answers []answer, holds []hold, c [kinds]changes) (missed int) {
	verdict := func(most time.Duration, value time.Duration) string {
		switch {
		case most == 0:
			return "\t"
		case value <= most:
			return "<= " + measure.Duration(most) + "\tmet"
		}
		missed++
		return "<= " + measure.Duration(most) + "\tMISSED"
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\nquestion, %d Services, mode %s\tleast\tp50\tp90\tCPU of command\tCPU of daemon\tbytes\tgoal for p50\t\n", o.services, o.mode)
	for _, a := range answers {
		p50 := measure.Percentile(a.took, 0.5)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", a.name, measure.Duration(measure.Percentile(a.took, 0)), measure.Duration(p50),
			measure.Duration(measure.Percentile(a.took, 0.9)), measure.Duration(a.own), measure.Duration(a.daemons), a.bytes, verdict(a.goal, p50))
	}
	fmt.Fprint(t, "\nholds what a sync needs\tleast\tp50\tp90\t\t\t\tgoal for p50\t\n")
	for _, h := range holds {
		p50 := measure.Percentile(h.each, 0.5)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t\t\t\t%s\n", h.path, measure.Duration(measure.Percentile(h.each, 0)), measure.Duration(p50),
			measure.Duration(measure.Percentile(h.each, 0.9)), verdict(holdGoal, p50))
	}
	_ = t.Flush()

	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\n%d changes of each kind\tquiet\tasking\tbusy\tasking/quiet\tasking/busy\n", len(c[quiet].all))
	for _, stage := range []struct {
		name string
		of   func(changes) []time.Duration
	}{
		{"file in place to written", func(c changes) []time.Duration { return c.all }},
		{"  of it, from arrival to the sync", func(c changes) []time.Duration { return c.wait }},
		{"  planned, with the wait for readers", func(c changes) []time.Duration { return c.plan }},
		{"  written", func(c changes) []time.Duration { return c.write }},
	} {
		for _, p := range []struct {
			name  string
			share float64
		}{{"p50", 0.5}, {"p99", 0.99}} {
			var v [kinds]time.Duration
			for kind := range kinds {
				v[kind] = measure.Percentile(stage.of(c[kind]), p.share)
			}
			fmt.Fprintf(t, "%s, %s\t%s\t%s\t%s\t%s\t%s\n", stage.name, p.name, measure.Duration(v[quiet]), measure.Duration(v[asking]),
				measure.Duration(v[busy]), times(v[asking], v[quiet]), times(v[asking], v[busy]))
		}
	}
	_ = t.Flush()
	fmt.Fprintf(w, "While asking, %d questions were answered. Busy is beside an endless loop at nice 19. p99 of fewer than 100 is the worst.\n",
		c[asking].asked)
	fmt.Fprintf(w, "The whole run took %.0f s.\n", time.Since(o.Begun).Seconds())
	return missed
}

func times(a, b time.Duration) string {
	if b <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f x", float64(a)/float64(b))
}
