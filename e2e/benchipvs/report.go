package main

import (
	"fmt"
	"io"

	"nodeproxy/e2e/measure"
)

// changeGoal is the goal for the median of one change: one in so many of kube-proxy's.
const changeGoal = 50

// growthGoal is the goal for the median of one change with the most Services: so many times that with the fewest. It says
// that the one does not depend on the other, but leaves room for the rest of the system, which shares the processor.
const growthGoal = 1.5

// rows compares the proxies, and the median of one change by a goal; 0 is none.
func rows(changeGoal float64) []measure.Row[result] {
	show, mebibytes := measure.Seconds, measure.Mebibytes
	return []measure.Row[result]{
		{What: "cold start to packets", Value: func(r result) float64 { return r.ColdStart.Seconds() }, Show: show},
		{What: "  CPU time until the proxy is at rest", Value: func(r result) float64 { return r.ColdCPU.Seconds() }, Show: show},
		{What: "PATCH of an endpoint to packets, p50", Value: median, Show: show, Part: changeGoal},
		{What: "  p99, or the worst of less than 100",
			Value: func(r result) float64 { return measure.Percentile(r.Changed, 0.99).Seconds() }, Show: show},
		{What: "  of that, until the API server has answered, p50",
			Value: func(r result) float64 { return measure.Percentile(r.Patched, 0.5).Seconds() }, Show: show},
		{What: "  CPU time of one", Value: func(r result) float64 { return r.ChangedCPU.Seconds() }, Show: show},
		{What: "CPU at rest, share of one processor", Value: func(r result) float64 { return r.idle }, Show: percent},
		{What: "resident memory", Value: func(r result) float64 { return float64(r.Resident) }, Show: mebibytes},
		{What: "  at its highest", Value: func(r result) float64 { return float64(r.Peak) }, Show: mebibytes},
	}
}

func median(r result) float64 { return measure.Percentile(r.Changed, 0.5).Seconds() }

// printProxies compares nodeproxy with kube-proxy for each number of Services, and returns how many goals are missed.
func printProxies(w io.Writer, o options, results [][2]result) (missed int) {
	t := measure.NewTable(w)
	for i, both := range results {
		np, kp := both[0], both[1]
		goal := 0.0
		if i == len(results)-1 {
			goal = changeGoal
		}
		measure.Compare(t, fmt.Sprintf("%d Services x %d endpoints, ipvs", np.services, o.endpoints), rows(goal), np, kp)
		fmt.Fprintf(t, "changes made\t%d\t%d\t\t\t\n\t\t\t\t\t\n", len(np.Changed), len(kp.Changed))
	}
	if first, last := results[0], results[len(results)-1]; len(results) > 1 {
		growth := func(i int) float64 { return median(last[i]) / median(first[i]) }
		fmt.Fprintf(t, "one change at %d Services, as times that at %d\t%.2f\t%.2f\t\t<= %.1f\t%s\n", last[0].services,
			first[0].services, growth(0), growth(1), growthGoal, t.Verdict(growth(0) <= growthGoal))
	}
	_ = t.Flush()
	return t.Missed
}

func percent(share float64) string { return fmt.Sprintf("%.2g %%", share*100) }
