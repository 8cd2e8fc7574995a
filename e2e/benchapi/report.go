package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"
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

// row is a line of the table.
type row struct {
	what  string
	value func(result) float64
	show  func(float64) string
	// part is the goal, as 1/part of kube-proxy's value; 0 is no such goal. most is a goal for the value itself.
	part, most float64
}

func rows(o options) []row {
	latency := func(of func(result) []time.Duration, p float64) func(result) float64 {
		return func(r result) float64 { return percentile(of(r), p).Seconds() }
	}
	changed := func(r result) []time.Duration { return r.changed }
	added := func(r result) []time.Duration { return r.added }
	paced := func(r result) []time.Duration { return r.paced }
	thousand := func(of func(result) time.Duration) func(result) float64 {
		return func(r result) float64 { return of(r).Seconds() * 1000 }
	}
	changedCPU := thousand(func(r result) time.Duration { return r.changedCPU })
	addedCPU := thousand(func(r result) time.Duration { return r.addedCPU })
	pacedCPU := thousand(func(r result) time.Duration { return r.pacedCPU })
	cold := func(r result) float64 { return r.coldStart.Seconds() }
	memory := func(r result) float64 { return float64(r.memory) }
	show := func(s float64) string { return seconds(time.Duration(s * float64(time.Second))) }
	cpuSeconds := func(s float64) string { return short(s) + " s" }
	pace := fmt.Sprintf("%d changes/s for %s", o.rate, o.rateDuration)
	return []row{
		{what: "cold start to packets", value: cold, show: show, part: coldStartGoal},
		{what: "  CPU time of it", value: func(r result) float64 { return r.coldCPU.Seconds() }, show: show},
		{what: "PATCH of an endpoint to packets, p50", value: latency(changed, 0.5), show: show, part: changeGoal},
		{what: "  p99", value: latency(changed, 0.99), show: show},
		{what: "  CPU seconds per 1,000", value: changedCPU, show: cpuSeconds, part: cpuGoal},
		{what: "POST of a Service and its slice to packets, p50", value: latency(added, 0.5), show: show, part: additionGoal},
		{what: "  p99", value: latency(added, 0.99), show: show},
		{what: "  CPU seconds per 1,000", value: addedCPU, show: cpuSeconds},
		{what: pace + ", PATCH to packets, p50", value: latency(paced, 0.5), show: show, most: paceGoal.Seconds()},
		{what: "  p99", value: latency(paced, 0.99), show: show},
		{what: "  CPU seconds per 1,000", value: pacedCPU, show: cpuSeconds},
		{what: "resident memory after all that", value: memory, show: mebibytes, part: memoryGoal},
		{what: "  at its highest", value: func(r result) float64 { return float64(r.peak) }, show: mebibytes},
	}
}

// printTable compares nodeproxy with kube-proxy, and returns how many goals are missed.
func printTable(w io.Writer, o options, np, kp result) (missed int) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%d Services x %d endpoints, iptables-%s\tnodeproxy\tkube-proxy\tratio\tgoal\t\n",
		o.services, o.endpoints, o.variant)
	for _, r := range rows(o) {
		a, b := r.value(np), r.value(kp)
		goal, verdict := "", ""
		ok := true
		switch {
		case r.part > 0:
			goal, ok = fmt.Sprintf("<= 1/%.0f", r.part), a*r.part <= b
		case r.most > 0:
			goal, ok = "<= "+r.show(r.most), a <= r.most
		}
		if goal != "" {
			verdict = "met"
		}
		if !ok {
			verdict = "MISSED"
			missed++
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", r.what, r.show(a), r.show(b), inverse(a, b), goal, verdict)
	}
	_ = t.Flush()
	fmt.Fprintf(w, "p99 is of %d changes, %d new Services and %d changes at a rate: of fewer than 100, it is the worst.\n",
		o.changes, o.additions, len(np.paced))
	return missed
}

// printAlone prints what was measured of one proxy.
func printAlone(w io.Writer, o options, r result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows(o) {
		fmt.Fprintf(t, "%s\t%s\n", row.what, row.show(row.value(r)))
	}
	_ = t.Flush()
}

// inverse is the ratio of a to b, as one in so many where a is the smaller.
func inverse(a, b float64) string {
	switch {
	case a <= 0 || b <= 0:
		return "-"
	case a <= b:
		return "1/" + short(b/a)
	}
	return short(a / b)
}

// seconds prints a duration.
func seconds(d time.Duration) string {
	if d >= time.Second {
		return short(d.Seconds()) + " s"
	}
	return short(d.Seconds()*1e3) + " ms"
}

// short prints a number with three significant digits at least.
func short(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

func mebibytes(bytes float64) string { return fmt.Sprintf("%.1f MiB", bytes/(1<<20)) }
