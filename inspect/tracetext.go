package inspect

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// WriteTrace writes a trace for people.
func WriteTrace(w io.Writer, t *Trace) error {
	for i, p := range t.Packets {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if err := p.write(w, t); err != nil {
			return err
		}
	}
	return nil
}

func (p PacketTrace) write(w io.Writer, t *Trace) error {
	fmt.Fprintf(w, "%s from %s (%s) to %s on node %s (mode %s)\n", p.Protocol, p.Source, Printable(p.From), p.Destination, t.Node, t.Mode)
	fmt.Fprintln(w, "  "+p.result())
	for _, r := range p.Reasons {
		fmt.Fprintln(w, "  - "+Printable(r))
	}
	if len(p.Steps) > 0 {
		fmt.Fprintln(w)
		if err := writeSteps(w, p.Steps); err != nil {
			return err
		}
	}
	if p.Action == plan.Forward.String() {
		fmt.Fprintln(w)
		if err := p.writeOutcomes(w); err != nil {
			return err
		}
	}
	writeList(w, "What to know", p.Notes)
	return nil
}

// result is what happens, in one line.
func (p PacketTrace) result() string {
	switch p.Action {
	case plan.Forward.String():
		n := len(only(p.Outcomes, func(o TraceOutcome) bool { return o.Endpoint != "" }))
		return fmt.Sprintf("is forwarded to %s of %s:", counted(n, "endpoint"), p.Service)
	case plan.Reject.String():
		return "is rejected:"
	case plan.Drop.String():
		return "is dropped:"
	}
	return "passes, and no rule changes it:"
}

func writeSteps(w io.Writer, list []TraceStep) error {
	var rows [][]string
	for _, s := range list {
		rows = append(rows, []string{"  " + s.Hook, s.Table, cmp.Or(s.Chain, "-"), s.Rule})
		for _, e := range s.Elements {
			rows = append(rows, []string{"  ", "", "", "  " + e})
		}
	}
	return aligned(w, "  HOOK\tTABLE\tCHAIN\tRULE", rows)
}

// end is in what outcomes differ that have different rules; of those that are alike in it, only the rules of the first are shown.
type end struct {
	action      string
	masqueraded bool
}

func (p PacketTrace) writeOutcomes(w io.Writer) error {
	var rows [][]string
	for _, o := range p.Outcomes {
		to, source := o.Endpoint, either(o.Masqueraded, "masqueraded", "kept")
		if to == "" {
			to, source = strings.ToUpper(o.Action), "-"
		}
		rows = append(rows, []string{"  " + to, percent(o.Probability), source, cmp.Or(o.Pod, "-"), cmp.Or(o.Node, "-")})
	}
	if err := aligned(w, "  ENDPOINT\tPROBABILITY\tSOURCE\tPOD\tNODE", rows); err != nil {
		return err
	}
	shown, alike := map[end]bool{}, false
	for _, o := range p.Outcomes {
		kind := end{o.Action, o.Masqueraded}
		if alike = alike || shown[kind]; shown[kind] || len(o.Steps) == 0 {
			continue
		}
		shown[kind] = true
		fmt.Fprintf(w, "\n  to %s:\n", cmp.Or(o.Endpoint, strings.ToUpper(o.Action)))
		if err := writeSteps(w, o.Steps); err != nil {
			return err
		}
	}
	if alike {
		fmt.Fprint(w, "\n  The ways to the others are alike; -o json has them.\n")
	}
	return nil
}

// percent is a probability with four digits.
func percent(p float64) string { return strconv.FormatFloat(100*p, 'g', 4, 64) + " %" }
