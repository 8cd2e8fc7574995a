package main

import (
	"fmt"
	"strings"
)

// print adds a part for each number of Services, with what the scenario has of notes.
func (c comparison) print(t *table, o *options, results [][]figures) {
	t.limit = o.limit
	columns := []string{nodeProxy, kubeProxy}
	if t.ungraded = o.against != ""; t.ungraded {
		columns[1] = another
	}
	if c.without {
		columns = append(columns, "mode iptables", noProxy, noRules)
	}
	for i, r := range results {
		t.line(fmt.Sprintf("%d Services x %d endpoints, mode %s", o.services[i], o.endpoints, o.modeName()),
			strings.Join(columns, "\t"), "ratio", "goal", "")
		t.compare(c.rows(o, i == len(results)-1), r...)
		if len(results) > 1 {
			t.line("", "", "", "", "", "")
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

func apiRows(o *options, _ bool) []row {
	pace := fmt.Sprintf("%d changes/s for %s", o.rate, o.rateDuration)
	return []row{
		{what: "cold start to packets", key: "cold", show: seconds, part: 20},
		{what: "  CPU time of it", key: "cold cpu", show: seconds},
		{what: "PATCH of an endpoint to packets, p50", key: "changed p50", show: seconds, part: 20},
		{what: "  p99", key: "changed p99", show: seconds},
		{what: "  CPU seconds per 1,000", key: "changed cpu", show: perThousand, part: 10},
		{what: "POST of a Service and its slice to packets, p50", key: "added p50", show: seconds, part: 40},
		{what: "  p99", key: "added p99", show: seconds},
		{what: "  CPU seconds per 1,000", key: "added cpu", show: perThousand},
		{what: pace + ", PATCH to packets, p50", key: "paced p50", show: seconds, most: 0.1},
		{what: "  p99", key: "paced p99", show: seconds},
		{what: "  CPU seconds per 1,000", key: "paced cpu", show: perThousand},
		{what: "resident memory after all that", key: "resident", show: mebibytes, part: 2},
		{what: "  at its highest", key: "peak", show: mebibytes},
	}
}

// ipvsRows have a goal for the most Services.
func ipvsRows(_ *options, most bool) []row {
	rows := []row{
		{what: "cold start to packets", key: "cold", show: seconds},
		{what: "  CPU time until the proxy is at rest", key: "cold cpu", show: seconds},
		{what: "PATCH of an endpoint to packets, p50", key: "changed p50", show: seconds},
		{what: "  p99, or the worst of less than 100", key: "changed p99", show: seconds},
		{what: "  of that, until the API server has answered, p50", key: "patched p50", show: seconds},
		{what: "  CPU time of one", key: "changed cpu", show: seconds},
		{what: "CPU at rest, share of one processor", key: "idle", show: percent},
		{what: "resident memory", key: "resident", show: mebibytes},
		{what: "  at its highest", key: "peak", show: mebibytes},
		{what: "changes made", key: "changed count", show: count, alone: true},
	}
	if most {
		rows[2].part = 50
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
		{what: "  at its highest", key: "peak", show: mebibytes},
		{what: "connect to the first Service", key: "first", show: seconds},
		{what: "  by no proxy", key: "first times", show: times, most: 1.1},
		{what: "connect to the last Service", key: "last", show: seconds},
		{what: "  by no proxy", key: "last times", show: times, most: 1.1},
		{what: "new connections to the last Service", key: "rate", show: perSecond},
		{what: "  by no proxy", key: "rate times", show: times, least: 0.9},
	}
}
