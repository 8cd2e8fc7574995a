package main

import (
	"fmt"
	"io"
	"math"
	"time"

	"nodeproxy/e2e/measure"
)

// programmingGoals are the goals for the time in which the kernel gets all of so many Services and endpoints of each, in seconds.
var programmingGoals = map[[2]int]float64{{10000, 2}: 0.1, {45000, 1}: 0.5, {5000, 50}: 1}

// The goals for the median of one sync, in seconds; for a connect and for the rate of connections, as times what they are without a proxy.
const (
	syncGoal    = 1e-3
	connectGoal = 1.1
	rateGoal    = 0.9
)

func rows(o options) []measure.Row[result] {
	// seconds is a time that is not there where the proxy was late, or was not measured.
	seconds := func(late func(result) bool, of func(result) (value float64, measured bool)) func(result) float64 {
		return func(r result) float64 {
			if late(r) {
				return math.Inf(1)
			}
			if v, ok := of(r); ok {
				return v
			}
			return math.NaN()
		}
	}
	lateStart := func(r result) bool { return r.lateStart }
	lateChange := func(r result) bool { return r.lateChange && len(r.Changed) == 0 }
	never := func(result) bool { return false }
	started := func(of func(result) time.Duration) func(result) (float64, bool) {
		return func(r result) (float64, bool) { return of(r).Seconds(), r.ColdStart > 0 }
	}
	changed := func(of func(result) []time.Duration, p float64) func(result) (float64, bool) {
		return func(r result) (float64, bool) {
			if len(r.Changed) == 0 {
				return 0, false
			}
			return measure.Percentile(of(r), p).Seconds(), true
		}
	}
	synced := func(p float64) func(result) float64 {
		return func(r result) float64 {
			if len(r.syncs) == 0 {
				return math.NaN()
			}
			return measure.Percentile(r.syncs, p)
		}
	}
	bytes := func(of func(result) int64) func(result) float64 {
		return seconds(never, func(r result) (float64, bool) { return float64(of(r)), of(r) > 0 })
	}
	show := func(s float64) string {
		if math.IsInf(s, 1) {
			return "> " + o.limit.String()
		}
		return measure.Seconds(s)
	}
	times := func(v float64) string { return fmt.Sprintf("%.2f x", v) }
	rate := func(v float64) string { return fmt.Sprintf("%.0f/s", v) }
	ofChanged := func(r result) []time.Duration { return r.Changed }
	ofPatched := func(r result) []time.Duration { return r.Patched }
	return []measure.Row[result]{
		{What: "cold start to packets", Show: show,
			Value: seconds(lateStart, started(func(r result) time.Duration { return r.ColdStart }))},
		{What: "  of it, syncs", Show: show, Value: func(r result) float64 { return r.synced }},
		{What: "    of these, programming", Show: show, Value: func(r result) float64 { return r.written },
			Most: programmingGoals[[2]int{o.services, o.endpoints}]},
		{What: "  CPU time of it", Show: show, Value: seconds(never, started(func(r result) time.Duration { return r.ColdCPU }))},
		{What: "PATCH of an endpoint to packets, p50", Show: show, Value: seconds(lateChange, changed(ofChanged, 0.5))},
		{What: "  p99", Show: show, Value: seconds(lateChange, changed(ofChanged, 0.99))},
		{What: "  until the API server has answered, p50", Show: show, Value: seconds(never, changed(ofPatched, 0.5))},
		{What: "  sync, from the event to the kernel, p50", Show: show, Value: synced(0.5), Most: syncGoal},
		{What: "    p99", Show: show, Value: synced(0.99)},
		{What: "  CPU time", Show: show,
			Value: seconds(never, func(r result) (float64, bool) { return r.ChangedCPU.Seconds(), len(r.Changed) > 0 })},
		{What: "resident memory", Show: measure.Mebibytes, Value: bytes(func(r result) int64 { return r.Resident })},
		{What: "  at its highest", Show: measure.Mebibytes, Value: bytes(func(r result) int64 { return r.Peak })},
		{What: "connect to the first Service", Show: show, Value: func(r result) float64 { return r.first }},
		{What: "  by no proxy", Show: times, Value: func(r result) float64 { return r.firstTimes }, Most: connectGoal},
		{What: "connect to the last Service", Show: show, Value: func(r result) float64 { return r.last }},
		{What: "  by no proxy", Show: times, Value: func(r result) float64 { return r.lastTimes }, Most: connectGoal},
		{What: "new connections to the last Service", Show: rate, Value: func(r result) float64 { return r.rate }},
		{What: "  by no proxy", Show: times, Value: func(r result) float64 { return r.rateTimes }, Least: rateGoal},
	}
}

// printTable compares the nodes, and returns how many goals are missed.
func printTable(w io.Writer, o options, results []result) (missed int) {
	t := measure.NewTable(w, "mode iptables", "no proxy", "no rules")
	measure.Compare(t, fmt.Sprintf("%d Services x %d endpoints", o.services, o.endpoints), rows(o), results...)
	_ = t.Flush()
	fmt.Fprint(w, `ratio is nodeproxy's value by kube-proxy's. "no proxy" connects to a pod, on a node that tracks connections for one MASQUERADE rule;
"no rules" on one that has none. What the proxies say of their syncs is for IPv4. p99 of fewer than 100 is the worst.
`)
	return t.Missed
}
