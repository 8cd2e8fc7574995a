package measure

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// Row is a line of a table: one value of a result R.
type Row[R any] struct {
	What  string
	Value func(R) float64
	Show  func(float64) string
	// Part is the goal, as 1/Part of kube-proxy's value; 0 is no such goal. Most is a goal for the value itself.
	Part, Most float64
}

// Table compares nodeproxy with kube-proxy by goals, and counts those that are missed.
type Table struct {
	*tabwriter.Writer
	Missed int
}

// NewTable begins a table. It is written by Flush.
func NewTable(w io.Writer) *Table { return &Table{Writer: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

// Verdict is what the table says of a goal.
func (t *Table) Verdict(met bool) string {
	if met {
		return "met"
	}
	t.Missed++
	return "MISSED"
}

// Compare adds a title and rows.
func Compare[R any](t *Table, title string, rows []Row[R], np, kp R) {
	fmt.Fprintf(t, "%s\tnodeproxy\tkube-proxy\tratio\tgoal\t\n", title)
	for _, r := range rows {
		a, b := r.Value(np), r.Value(kp)
		goal, verdict := "", ""
		switch {
		case r.Part > 0:
			goal, verdict = fmt.Sprintf("<= 1/%.0f", r.Part), t.Verdict(a*r.Part <= b)
		case r.Most > 0:
			goal, verdict = "<= "+r.Show(r.Most), t.Verdict(a <= r.Most)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", r.What, r.Show(a), r.Show(b), Inverse(a, b), goal, verdict)
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
	case a <= 0 || b <= 0:
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
