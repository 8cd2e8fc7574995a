package measure

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is a line of a table: one value of a result R.
type Row[R any] struct {
	What  string
	Value func(R) float64
	Show  func(float64) string
	// Part is the goal, as 1/Part of kube-proxy's value; 0 is no such goal. Most and Least are goals for the value itself.
	Part, Most, Least float64
}

// Table compares nodeproxy with kube-proxy and with others by goals, and counts those that are missed.
type Table struct {
	*tabwriter.Writer
	Missed  int
	columns []string
}

// NewTable begins a table of nodeproxy, kube-proxy and what else there are columns for. It is written by Flush.
func NewTable(w io.Writer, more ...string) *Table {
	return &Table{Writer: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), columns: append([]string{NodeProxy, KubeProxy}, more...)}
}

// Verdict is what the table says of a goal.
func (t *Table) Verdict(met bool) string {
	if met {
		return "met"
	}
	t.Missed++
	return "MISSED"
}

// Compare adds a title and rows with a result for each column. A value that is not a number was not measured.
func Compare[R any](t *Table, title string, rows []Row[R], results ...R) {
	fmt.Fprintf(t, "%s\t%s\tratio\tgoal\t\n", title, strings.Join(t.columns, "\t"))
	for _, r := range rows {
		var cells []string
		for _, result := range results {
			if v := r.Value(result); math.IsNaN(v) {
				cells = append(cells, "")
			} else {
				cells = append(cells, r.Show(v))
			}
		}
		a, b := r.Value(results[0]), r.Value(results[1])
		goal, verdict := "", ""
		switch {
		case r.Part > 0:
			goal, verdict = fmt.Sprintf("<= 1/%.0f", r.Part), t.Verdict(a*r.Part <= b)
		case r.Most > 0:
			goal, verdict = "<= "+r.Show(r.Most), t.Verdict(a <= r.Most)
		case r.Least > 0:
			goal, verdict = ">= "+r.Show(r.Least), t.Verdict(a >= r.Least)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", r.What, strings.Join(cells, "\t"), Inverse(a, b), goal, verdict)
	}
}

// Percentile is the value that a share p of all is not above; p is between 0 and 1.
func Percentile[T time.Duration | float64](values []T, p float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// Inverse is the ratio of a to b, as one in so many where a is the smaller.
func Inverse(a, b float64) string {
	switch {
	case !(a > 0 && b > 0) || math.IsInf(max(a, b), 0):
		return "-"
	case a <= b:
		return "1/" + Short(b/a)
	}
	return Short(a / b)
}

// Seconds shows a number of seconds.
func Seconds(s float64) string {
	switch {
	case s >= 1:
		return Short(s) + " s"
	case s >= 1e-3 || s == 0:
		return Short(s*1e3) + " ms"
	}
	return Short(s*1e6) + " us"
}

// Duration shows a duration.
func Duration(d time.Duration) string { return Seconds(d.Seconds()) }

// Short shows a number with three significant digits at least.
func Short(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// Mebibytes shows a number of bytes.
func Mebibytes(bytes float64) string { return fmt.Sprintf("%.1f MiB", bytes/(1<<20)) }
