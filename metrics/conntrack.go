package metrics

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"nodeproxy/kernel/conntrack"
)

// procDir is where the kernel shows its state.
const procDir = "/proc"

// conntrackTable returns a collector of the state of the kernel's table of tracked flows. A node whose table is full drops new
// connections, and one whose insertions fail loses single packets, mostly of DNS. Without the table, as before the kernel's module
// is loaded, it collects nothing.
func conntrackTable(proc string) collector {
	entries := newMetric(prometheus.GaugeValue, "nodeproxy_conntrack_entries", "Flows that the kernel tracks.")
	limit := newMetric(prometheus.GaugeValue, "nodeproxy_conntrack_entries_limit", "Flows that the kernel tracks at most.")
	failed := newMetric(prometheus.CounterValue, "nodeproxy_conntrack_insert_failures_total",
		"Flows that could not be tracked, so that their packet was dropped, as where two packets of one flow race.")
	drops := newMetric(prometheus.CounterValue, "nodeproxy_conntrack_drops_total",
		"Packets dropped because the connection tracking table was full or memory was short.")
	return collector{[]metric{entries, limit, failed, drops}, func(ch chan<- prometheus.Metric) {
		if flows, most, err := conntrack.Tracked(filepath.Join(proc, "sys")); err == nil {
			entries.send(ch, float64(flows))
			limit.send(ch, float64(most))
		}
		text, err := os.ReadFile(filepath.Join(proc, "net/stat/nf_conntrack"))
		if err != nil {
			return
		}
		sums := columnSums(string(text))
		for column, m := range map[string]metric{"insert_failed": failed, "drop": drops} {
			if n, ok := sums[column]; ok {
				m.send(ch, float64(n))
			}
		}
	}}
}

// columnSums reads a table with a heading, then a line of hexadecimal numbers for each CPU.
func columnSums(text string) map[string]uint64 {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	heads := strings.Fields(lines[0])
	out := map[string]uint64{}
	for _, line := range lines[1:] {
		for i, field := range strings.Fields(line) {
			if n, err := strconv.ParseUint(field, 16, 64); err == nil && i < len(heads) {
				out[heads[i]] += n
			}
		}
	}
	return out
}
