package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"nodeproxy/e2e/measure"
)

// ratioGoals are the goals for nodeproxy's part of what kube-proxy takes: one in so many.
const (
	coldStartGoal = 20
	changeGoal    = 20
	additionGoal  = 40
	cpuGoal       = 10
	memoryGoal    = 2
)

// paceGoal is the goal for the median latency at a steady rate of changes.
const paceGoal = 100 * time.Millisecond

func rows(o options) []measure.Row[result] {
	latency := func(of func(result) []time.Duration, p float64) func(result) float64 {
		return func(r result) float64 { return measure.Percentile(of(r), p).Seconds() }
	}
	changed := func(r result) []time.Duration { return r.Changed }
	added := func(r result) []time.Duration { return r.added }
	paced := func(r result) []time.Duration { return r.paced }
	thousand := func(of func(result) time.Duration) func(result) float64 {
		return func(r result) float64 { return of(r).Seconds() * 1000 }
	}
	changedCPU := thousand(func(r result) time.Duration { return r.ChangedCPU })
	addedCPU := thousand(func(r result) time.Duration { return r.addedCPU })
	pacedCPU := thousand(func(r result) time.Duration { return r.pacedCPU })
	cold := func(r result) float64 { return r.ColdStart.Seconds() }
	memory := func(r result) float64 { return float64(r.Resident) }
	show, mebibytes := measure.Seconds, measure.Mebibytes
	cpuSeconds := func(s float64) string { return measure.Short(s) + " s" }
	pace := fmt.Sprintf("%d changes/s for %s", o.rate, o.rateDuration)
	return []measure.Row[result]{
		{What: "cold start to packets", Value: cold, Show: show, Part: coldStartGoal},
		{What: "  CPU time of it", Value: func(r result) float64 { return r.ColdCPU.Seconds() }, Show: show},
		{What: "PATCH of an endpoint to packets, p50", Value: latency(changed, 0.5), Show: show, Part: changeGoal},
		{What: "  p99", Value: latency(changed, 0.99), Show: show},
		{What: "  CPU seconds per 1,000", Value: changedCPU, Show: cpuSeconds, Part: cpuGoal},
		{What: "POST of a Service and its slice to packets, p50", Value: latency(added, 0.5), Show: show, Part: additionGoal},
		{What: "  p99", Value: latency(added, 0.99), Show: show},
		{What: "  CPU seconds per 1,000", Value: addedCPU, Show: cpuSeconds},
		{What: pace + ", PATCH to packets, p50", Value: latency(paced, 0.5), Show: show, Most: paceGoal.Seconds()},
		{What: "  p99", Value: latency(paced, 0.99), Show: show},
		{What: "  CPU seconds per 1,000", Value: pacedCPU, Show: cpuSeconds},
		{What: "resident memory after all that", Value: memory, Show: mebibytes, Part: memoryGoal},
		{What: "  at its highest", Value: func(r result) float64 { return float64(r.Peak) }, Show: mebibytes},
	}
}

// printTable compares nodeproxy with kube-proxy, and returns how many goals are missed.
func printTable(w io.Writer, o options, np, kp result) (missed int) {
	t := measure.NewTable(w)
	measure.Compare(t, fmt.Sprintf("%d Services x %d endpoints, mode %s", o.services, o.endpoints, o.modeName()), rows(o),
		np, kp)
	_ = t.Flush()
	fmt.Fprintf(w, "p99 is of %d changes, %d new Services and %d changes at a rate: of fewer than 100, it is the worst.\n",
		o.changes, o.additions, len(np.paced))
	return t.Missed
}

// printAlone prints what was measured of one proxy.
func printAlone(w io.Writer, o options, r result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows(o) {
		fmt.Fprintf(t, "%s\t%s\n", row.What, row.Show(row.Value(r)))
	}
	_ = t.Flush()
}
