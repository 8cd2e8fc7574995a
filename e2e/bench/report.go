package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
)

// row is one line of the table.
type row struct {
	variant              harness.Variant
	what, goal, measured string
	verdict              string
}

// report gathers what was measured.
type report struct {
	rows    []row
	variant harness.Variant
	missed  int
}

// begin starts the part of one variant, and prints what else the machine is doing.
func (r *report) begin(v harness.Variant) {
	r.variant = v
	fmt.Printf("# iptables-%s; %s\n", v, machine.State())
}

// binds reports whether the goals bind the present variant.
func (r *report) binds() bool { return r.variant == harness.NFT }

// note adds a line without a goal.
func (r *report) note(what, measured string) {
	r.rows = append(r.rows, row{r.variant, what, "", measured, ""})
	fmt.Printf("#   %s: %s\n", what, measured)
}

// fail adds the line of something that could not be measured.
func (r *report) fail(what string) {
	r.rows = append(r.rows, row{r.variant, what, "", "not measured", "ERROR"})
}

// judge adds a line with a goal.
func (r *report) judge(what, goal, measured string, ok bool) {
	verdict := "ok"
	if !ok && r.binds() {
		verdict = "MISSED"
		r.missed++
	} else if !ok {
		verdict = "missed, does not bind"
	}
	r.rows = append(r.rows, row{r.variant, what, goal, measured, verdict})
	fmt.Printf("#   %s: %s (goal %s): %s\n", what, measured, goal, verdict)
}

// atMost judges a duration by an upper limit.
func (r *report) atMost(what string, limit, got time.Duration, detail string) {
	r.judge(what, "<= "+measure.Duration(limit), strings.TrimSpace(measure.Duration(got)+" "+detail), got <= limit)
}

// print writes the table and returns how many binding goals were missed.
func (r *report) print(w io.Writer) int {
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "iptables\twhat\tgoal\tmeasured\tok?")
	for _, x := range r.rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", x.variant, x.what, x.goal, x.measured, x.verdict)
	}
	_ = t.Flush()
	return r.missed
}
