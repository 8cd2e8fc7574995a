package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// figures are what was measured, by name: times in seconds, sizes in bytes. What is not there was not measured; +Inf is what took longer
// than the limit.
type figures map[string]float64

func (f figures) of(key string) float64 {
	if v, ok := f[key]; ok {
		return v
	}
	return math.NaN()
}

// row is a line of a table that compares proxies by one figure.
type row struct {
	what, key string
	show      func(float64) string
	// part is the goal, as 1/part of kube-proxy's figure; most and least are goals for the figure itself. 0 is none.
	part, most, least float64
	alone             bool // No ratio is shown.
}

// table is a table that counts the goals that are missed. It is written by Flush.
type table struct {
	*tabwriter.Writer
	missed   int
	limit    time.Duration // what an infinite figure is above
	ungraded bool          // Goals are left out.
	markdown bool
}

func newTable(w io.Writer) *table { return &table{Writer: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

// line adds one.
func (t *table) line(cells ...string) {
	if t.markdown {
		fmt.Fprintln(t, "| "+strings.Join(cells, " | ")+" |")
		return
	}
	fmt.Fprintln(t, strings.Join(cells, "\t"))
}

// end adds an empty line behind a table that another one follows.
func (t *table) end(columns int) {
	if t.markdown {
		fmt.Fprintln(t)
		return
	}
	t.line(make([]string, columns)...)
}

// head adds the first line.
func (t *table) head(cells ...string) {
	if t.line(cells...); t.markdown {
		fmt.Fprintln(t, strings.Repeat("|---", len(cells))+"|")
	}
}

// verdict is what the table says of a goal.
func (t *table) verdict(met bool) string {
	if met {
		return "met"
	}
	t.missed++
	return "MISSED"
}

// compare adds rows with a result for each column, of which the first is nodeproxy's and the second kube-proxy's. If there is nothing of
// one of them, the goals that concern it are not judged.
func (t *table) compare(rows []row, results ...figures) {
	for _, r := range rows {
		cells := []string{r.what}
		for _, result := range results {
			switch v := result.of(r.key); {
			case math.IsNaN(v):
				cells = append(cells, "")
			case math.IsInf(v, 1):
				cells = append(cells, "> "+t.limit.String())
			default:
				cells = append(cells, r.show(v))
			}
		}
		a, b := results[0].of(r.key), results[1].of(r.key)
		by, goal, met := ratio(a, b), "", false
		if t.ungraded {
			r.part, r.most, r.least = 0, 0, 0
		}
		switch {
		case r.part > 0:
			goal, met = fmt.Sprintf("<= 1/%.0f", r.part), a*r.part <= b
		case r.most > 0:
			goal, met = "<= "+r.show(r.most), a <= r.most
		case r.least > 0:
			goal, met = ">= "+r.show(r.least), a >= r.least
		}
		if r.alone {
			by = ""
		}
		verdict := ""
		if goal != "" && len(results[0]) > 0 && (r.part == 0 || len(results[1]) > 0) {
			verdict = t.verdict(met)
		}
		t.line(append(cells, by, goal, verdict)...)
	}
}

// percentile is the value that a share p of all is not above; p is between 0 and 1.
func percentile[T time.Duration | float64](values []T, p float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// ratio is that of a to b, as one in so many where a is the smaller.
func ratio(a, b float64) string {
	switch {
	case !(a > 0 && b > 0) || math.IsInf(max(a, b), 0):
		return "-"
	case a <= b:
		return "1/" + short(b/a)
	}
	return short(a / b)
}

func seconds(s float64) string {
	switch {
	case s >= 1:
		return short(s) + " s"
	case s >= 1e-3 || s == 0:
		return short(s*1e3) + " ms"
	}
	return short(s*1e6) + " us"
}

func duration(d time.Duration) string { return seconds(d.Seconds()) }

func perThousand(s float64) string { return short(s*1000) + " s" }

// short shows a number with three significant digits at least.
func short(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

func mebibytes(bytes float64) string { return fmt.Sprintf("%.1f MiB", bytes/(1<<20)) }

func percent(share float64) string { return fmt.Sprintf("%.2g %%", share*100) }

func count(n float64) string { return fmt.Sprintf("%.0f", n) }

func perSecond(v float64) string { return fmt.Sprintf("%.0f/s", v) }

func rate(v float64) string { return short(v) + "/s" }

func times(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "-"
	}
	return fmt.Sprintf("%.2f x", v)
}
