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

// conntrackTable is a collector of the state of the kernel's table of tracked flows, read when it is asked for. A node whose
// table is full drops new connections, and one whose insertions fail loses single packets, mostly of DNS. Without the table,
// as before the kernel's module is loaded, it collects nothing.
type conntrackTable struct {
	proc                          string
	entries, limit, failed, drops *prometheus.Desc
}

func newConntrackTable(proc string) *conntrackTable {
	return &conntrackTable{
		proc:    proc,
		entries: prometheus.NewDesc("nodeproxy_conntrack_entries", "Flows that the kernel tracks.", nil, nil),
		limit:   prometheus.NewDesc("nodeproxy_conntrack_entries_limit", "Flows that the kernel tracks at most.", nil, nil),
		failed: prometheus.NewDesc("nodeproxy_conntrack_insert_failures_total",
			"Flows that could not be tracked, so that their packet was dropped, as where two packets of one flow race.", nil, nil),
		drops: prometheus.NewDesc("nodeproxy_conntrack_drops_total",
			"Packets dropped because the connection tracking table was full or memory was short.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *conntrackTable) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.entries, c.limit, c.failed, c.drops} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *conntrackTable) Collect(ch chan<- prometheus.Metric) {
	if flows, most, err := conntrack.Tracked(filepath.Join(c.proc, "sys")); err == nil {
		ch <- prometheus.MustNewConstMetric(c.entries, prometheus.GaugeValue, float64(flows))
		ch <- prometheus.MustNewConstMetric(c.limit, prometheus.GaugeValue, float64(most))
	}
	text, err := os.ReadFile(filepath.Join(c.proc, "net/stat/nf_conntrack"))
	if err != nil {
		return
	}
	sums := columnSums(string(text))
	for column, desc := range map[string]*prometheus.Desc{"insert_failed": c.failed, "drop": c.drops} {
		if n, ok := sums[column]; ok {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n))
		}
	}
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
