package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// changeGoal is the goal for the median of one change: one in so many of kube-proxy's.
const changeGoal = 50

// growthGoal is the goal for the median of one change with the most Services: so many times that with the fewest. It says
// that the one does not depend on the other, but leaves room for the rest of the system, which shares the processor.
const growthGoal = 1.5

// row is a line of the table.
type row struct {
	what  string
	value func(result) float64
	show  func(float64) string
	part  float64 // the goal, as 1/part of kube-proxy's value; 0 for none
}

var rows = []row{
	{what: "cold start to packets", value: func(r result) float64 { return r.coldStart.Seconds() }, show: showSeconds},
	{what: "  CPU time until the proxy is at rest", value: func(r result) float64 { return r.coldCPU.Seconds() }, show: showSeconds},
	{what: "PATCH of an endpoint to packets, p50", value: median, show: showSeconds, part: changeGoal},
	{what: "  p99, or the worst of less than 100",
		value: func(r result) float64 { return percentile(r.changed, 0.99).Seconds() }, show: showSeconds},
	{what: "  of that, until the API server has answered, p50",
		value: func(r result) float64 { return percentile(r.patched, 0.5).Seconds() }, show: showSeconds},
	{what: "  CPU time of one", value: func(r result) float64 { return r.changedCPU.Seconds() }, show: showSeconds},
	{what: "CPU at rest, share of one processor", value: func(r result) float64 { return r.idle }, show: percent},
	{what: "resident memory", value: func(r result) float64 { return float64(r.memory) },
		show: func(b float64) string { return mebibytes(int64(b)) }},
	{what: "  at its highest", value: func(r result) float64 { return float64(r.peak) },
		show: func(b float64) string { return mebibytes(int64(b)) }},
}

func median(r result) float64 { return percentile(r.changed, 0.5).Seconds() }

// printProxies compares nodeproxy with kube-proxy for each number of Services, and returns how many goals are missed.
func printProxies(w io.Writer, o options, results [][2]result) (missed int) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	verdict := func(met bool) string {
		if met {
			return "met"
		}
		missed++
		return "MISSED"
	}
	for i, both := range results {
		np, kp := both[0], both[1]
		fmt.Fprintf(t, "%d Services x %d endpoints, ipvs\tnodeproxy\tkube-proxy\tratio\tgoal\t\n", np.services, o.endpoints)
		for _, r := range rows {
			a, b := r.value(np), r.value(kp)
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t", r.what, r.show(a), r.show(b), inverse(a, b))
			if r.part > 0 && i == len(results)-1 {
				fmt.Fprintf(t, "<= 1/%.0f\t%s", r.part, verdict(a*r.part <= b))
			} else {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprintln(t)
		}
		fmt.Fprintf(t, "changes made\t%d\t%d\t\t\t\n\t\t\t\t\t\n", len(np.changed), len(kp.changed))
	}
	if first, last := results[0], results[len(results)-1]; len(results) > 1 {
		growth := func(i int) float64 { return median(last[i]) / median(first[i]) }
		fmt.Fprintf(t, "one change at %d Services, as times that at %d\t%.2f\t%.2f\t\t<= %.1f\t%s\n", last[0].services,
			first[0].services, growth(0), growth(1), growthGoal, verdict(growth(0) <= growthGoal))
	}
	_ = t.Flush()
	return missed
}

// inverse is the ratio of a to b, as one in so many where a is the smaller.
func inverse(a, b float64) string {
	switch {
	case a <= 0 || b <= 0:
		return "-"
	case a <= b:
		return fmt.Sprintf("1/%.3g", b/a)
	}
	return fmt.Sprintf("%.3g", a/b)
}

// seconds prints a duration with three significant digits.
func seconds(d time.Duration) string {
	if d >= time.Second {
		return fmt.Sprintf("%.3g s", d.Seconds())
	}
	return fmt.Sprintf("%.3g ms", d.Seconds()*1e3)
}

func showSeconds(s float64) string { return seconds(time.Duration(s * float64(time.Second))) }

func percent(share float64) string { return fmt.Sprintf("%.2g %%", share*100) }

func mebibytes(bytes int64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }
