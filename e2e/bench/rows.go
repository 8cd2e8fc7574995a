package main

import (
	"fmt"
	"slices"
	"strings"
)

// print adds a part for each number of Services, with what the scenario has of notes.
func (c comparison) print(t *table, o *options, results [][]figures) {
	t.limit, t.markdown = o.limit, o.markdown
	columns := []string{nodeProxy, kubeProxy}
	if t.ungraded = o.against != ""; t.ungraded {
		columns[1] = another
	}
	if c.without {
		columns = append(columns, "mode iptables", noProxy, noRules)
	}
	for i, r := range results {
		heading := fmt.Sprintf("%d Services x %d endpoints, mode %s", o.services[i], o.endpoints, o.modeName())
		t.head(slices.Concat([]string{heading}, columns, []string{"ratio", "goal", ""})...)
		t.compare(c.rows(o, i == len(results)-1), r...)
		if i < len(results)-1 || len(results) > 1 && !t.markdown { // In Markdown, the last row needs the head of the table before.
			t.end(6)
		}
	}
	if last := len(results) - 1; last > 0 {
		var growth [2]figures
		for i := range growth {
			growth[i] = figures{"growth": results[last][i].of("changed p50") / results[0][i].of("changed p50")}
		}
		// It says that the one does not depend on the other, but leaves room for the rest of the system, which shares the processor.
		t.compare([]row{{what: fmt.Sprintf("one change at %d Services, as times that at %d", o.services[last], o.services[0]), key: "growth",
			show: func(v float64) string { return fmt.Sprintf("%.2f", v) }, most: 1.5, alone: true}}, growth[0], growth[1])
	}
	_ = t.Flush()
	fmt.Println(strings.TrimSpace("p99 of fewer than 100 is the worst. " + c.legend))
}

const apiNote = `# Both proxies run with the same flags and otherwise with their defaults. One of kube-proxy's is minSyncPeriod 1s: it
# waits a second from one sync to the next. One at a time, changes come -settle after the last one took effect, so it has
# waited already; not so when they come faster, or when a Service and its EndpointSlice come as two.
`

// worstGoals are for the worst moments in each mode, at 10,000 Services of 2 endpoints: for p99 of changes at a pace, and for the last of
// 100 Services that change at once.
var worstGoals = map[string]struct{ p99, together float64 }{
	"iptables (nft)": {0.1, 0.25}, "iptables (legacy)": {0.25, 0.25}, "nftables": {0.015, 0.03}, "ipvs": {0.04, 0.25},
}

// peakGoals are for resident memory at its highest, by the numbers of Services and of endpoints of each.
var peakGoals = map[[2]int]float64{{10000, 2}: 64 << 20, {45000, 1}: 220 << 20}

// worstRows are of what is judged by its worst moment, and of what it costs.
func worstRows(o *options) []row {
	goal := worstGoals[o.modeName()]
	changed := fmt.Sprintf("%d Services changed at once, until the last is in force, ", o.together)
	rows := []row{
		{what: changed + "p50", key: "together p50", show: seconds},
		{what: "  the worst", key: "together max", show: seconds, most: goal.together},
		{what: "  until a client that only watches has all, p50", key: "together" + watchedSuffix + " p50", show: seconds},
		{what: "    the worst", key: "together" + watchedSuffix + " max", show: seconds},
	}
	paced := func(what, series string) []row {
		return []row{
			{what: what + ", p50", key: series + " p50", show: seconds},
			{what: "  p99", key: series + " p99", show: seconds, most: goal.p99},
			{what: "  the worst", key: series + " max", show: seconds},
			{what: "    by p99", key: series + " spread", show: times, most: 3, alone: true},
			{what: "  until a client that only watches has it, p99", key: series + watchedSuffix + " p99", show: seconds},
			{what: "    from then on, p99", key: series + afterSuffix + " p99", show: seconds},
			{what: "      the worst", key: series + afterSuffix + " max", show: seconds},
		}
	}
	rows = append(rows, paced(fmt.Sprintf("%d changes/s for %s, PATCH to packets", o.rate, o.rateDuration), "paced")...)
	rows = append(rows, row{what: "  CPU seconds per 1,000", key: "paced cpu", show: perThousand})
	for _, d := range disturbances {
		if o.disturbs(d.name) {
			rows = append(rows, paced("the same while "+d.what, d.series())...)
		}
	}
	return append(rows,
		row{what: "CPU at rest, share of one processor", key: "idle", show: percent, most: 0.002},
		row{what: "  wake-ups of its threads", key: "wake-ups", show: rate},
		row{what: "  comparisons meanwhile", key: "compared", show: count, alone: true},
		row{what: "CPU time of a verification of objects, plan and kernel", key: "verified cpu", show: seconds},
		row{what: "  how long it takes", key: "verified", show: seconds},
		row{what: "resident memory, at its highest until the cold start is over", key: "cold peak", show: mebibytes},
		row{what: fmt.Sprintf("  after these %s of %d changes/s", o.rateDuration, o.rate), key: "churned", show: mebibytes},
		row{what: "  at its highest in all", key: "peak", show: mebibytes, most: peakGoals[[2]int{slices.Max(o.services), o.endpoints}]},
		row{what: "  in the end", key: "resident", show: mebibytes, part: 2},
		row{what: "    by the highest of the cold start", key: "grown", show: times, most: 1, alone: true},
	)
}

func apiRows(o *options, _ bool) []row {
	return append([]row{
		{what: "cold start to packets", key: "cold", show: seconds, part: 20},
		{what: "  CPU time of it", key: "cold cpu", show: seconds},
		{what: "PATCH of an endpoint to packets, p50", key: "changed p50", show: seconds, part: 20},
		{what: "  p99", key: "changed p99", show: seconds},
		{what: "  the worst", key: "changed max", show: seconds},
		{what: "  CPU seconds per 1,000", key: "changed cpu", show: perThousand, part: 10},
		{what: "POST of a Service and its slice to packets, p50", key: "added p50", show: seconds, part: 40},
		{what: "  p99", key: "added p99", show: seconds},
		{what: "  CPU seconds per 1,000", key: "added cpu", show: perThousand},
	}, worstRows(o)...)
}

// ipvsRows have goals for the most Services.
func ipvsRows(o *options, most bool) []row {
	rows := append([]row{
		{what: "cold start to packets", key: "cold", show: seconds},
		{what: "  CPU time until the proxy is at rest", key: "cold cpu", show: seconds},
		{what: "PATCH of an endpoint to packets, p50", key: "changed p50", show: seconds, part: 50},
		{what: "  p99", key: "changed p99", show: seconds},
		{what: "  the worst", key: "changed max", show: seconds},
		{what: "  until the API server has answered, p50", key: "patched p50", show: seconds},
		{what: "  CPU time of one", key: "changed cpu", show: seconds},
		{what: "  changes made", key: "changed count", show: count, alone: true},
	}, worstRows(o)...)
	for i := range rows {
		if !most {
			rows[i].part, rows[i].most = 0, 0
		}
	}
	return rows
}

const nftablesLegend = `ratio is nodeproxy's value by kube-proxy's. "no proxy" connects to a pod, on a node that tracks connections for one
MASQUERADE rule; "no rules" on one that has none. What the proxies say of their syncs is for IPv4.`

func nftablesRows(o *options, _ bool) []row {
	// The goal for the time in which the kernel gets all.
	programming := map[[2]int]float64{{10000, 2}: 0.1, {45000, 1}: 0.5, {5000, 50}: 1}[[2]int{o.services[0], o.endpoints}]
	return []row{
		{what: "cold start to packets", key: "cold", show: seconds},
		{what: "  of it, syncs", key: "cold synced", show: seconds},
		{what: "    of these, programming", key: "written", show: seconds, most: programming},
		{what: "  CPU time of it", key: "cold cpu", show: seconds},
		{what: "PATCH of an endpoint to packets, p50", key: "changed p50", show: seconds},
		{what: "  p99", key: "changed p99", show: seconds},
		{what: "  until the API server has answered, p50", key: "patched p50", show: seconds},
		{what: "  sync, from the event to the kernel, p50", key: "synced p50", show: seconds, most: 1e-3},
		{what: "    p99", key: "synced p99", show: seconds},
		{what: "  CPU time", key: "changed cpu", show: seconds},
		{what: "resident memory", key: "resident", show: mebibytes},
		{what: "  at its highest until the cold start is over", key: "cold peak", show: mebibytes},
		{what: "  at its highest in all", key: "peak", show: mebibytes, most: peakGoals[[2]int{o.services[0], o.endpoints}]},
		{what: "connect to the first Service", key: "first", show: seconds},
		{what: "  by no proxy", key: "first times", show: times, most: 1.1},
		{what: "connect to the last Service", key: "last", show: seconds},
		{what: "  by no proxy", key: "last times", show: times, most: 1.1},
		{what: "new connections to the last Service", key: "rate", show: perSecond},
		{what: "  by no proxy", key: "rate times", show: times, least: 0.9},
	}
}
