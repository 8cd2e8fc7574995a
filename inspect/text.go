package inspect

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/duration"

	"nodeproxy/plan"
)

// none stands for an empty cell, as in kubectl.
const none = "<none>"

// Printable returns s with whatever is not printable as in Go strings, so that nobody who may name an object can move the cursor,
// hide text or add a line that looks like nodeproxy's own.
func Printable(s string) string {
	if !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return s
	}
	quoted := strings.ReplaceAll(strconv.Quote(s), `\"`, `"`)
	return quoted[1 : len(quoted)-1]
}

// Table writes rows below a header, in kubectl's form.
func Table(w io.Writer, header string, rows [][]string) error {
	for _, r := range rows {
		for i := range r {
			r[i] = cmp.Or(r[i], none)
		}
	}
	return aligned(w, strings.Join(strings.Fields(header), "\t"), rows)
}

// aligned writes rows below a header whose cells end with tabs.
func aligned(w io.Writer, header string, rows [][]string) error {
	out := bufio.NewWriter(w) // A tabwriter writes each cell on its own.
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	line := append([]byte(header), '\n')
	for _, r := range rows {
		if _, err := t.Write(line); err != nil {
			return err
		}
		line = line[:0]
		for i, cell := range r {
			if i > 0 {
				line = append(line, '\t')
			}
			line = append(line, Printable(cell)...)
		}
		line = append(line, '\n')
	}
	_, err := t.Write(line)
	return cmp.Or(err, t.Flush(), out.Flush())
}

// WriteServicePorts writes a row for each ServicePort; wide adds policies and affinity. Ages are as of now.
func WriteServicePorts(w io.Writer, list []ServicePort, wide bool, now time.Time) error {
	header := "NAMESPACE NAME PORT CLUSTER-IP EXTERNAL-IP NODE-PORT ENDPOINTS STATE SINCE" +
		when(wide, " INTERNAL EXTERNAL AFFINITY FAMILY CONNECTIONS BYTES-IN BYTES-OUT")
	rows := make([][]string, 0, len(list))
	for _, sp := range list {
		row := []string{
			sp.Namespace, sp.Name, sp.portText(), sp.ClusterIP, strings.Join(append(sp.LoadBalancerIPs[:len(sp.LoadBalancerIPs):len(sp.LoadBalancerIPs)], sp.ExternalIPs...), ","),
			number(sp.NodePort), fmt.Sprintf("%d/%d", sp.Usable, sp.Total), sp.State, since(sp.Since, now),
		}
		if wide {
			affinity := when(sp.Affinity > 0, duration.HumanDuration(time.Duration(sp.Affinity)*time.Second))
			row = append(row, sp.InternalPolicy, sp.ExternalPolicy, affinity, sp.Family)
			c := sp.Counters
			if c == nil {
				c = &Counters{plan.NotCounted, plan.NotCounted, plan.NotCounted, plan.NotCounted, plan.NotCounted}
			}
			row = append(row, counter(c.Connections), counter(c.BytesIn), counter(c.BytesOut))
		}
		rows = append(rows, row)
	}
	return Table(w, header, rows)
}

// portText is a port as in "80/TCP (http)".
func (sp ServicePort) portText() string {
	return fmt.Sprintf("%d/%s", sp.Number, sp.Protocol) + when(sp.Port != "", "("+sp.Port+")")
}

// words returns the texts of a list.
func words[T any](list []T, text func(T) string) []string {
	out := make([]string, 0, len(list))
	for _, v := range list {
		out = append(out, text(v))
	}
	return out
}

// only returns those of a list that are such ones.
func only[T any](list []T, is func(T) bool) (out []T) {
	for _, v := range list {
		if is(v) {
			out = append(out, v)
		}
	}
	return out
}

// some lists at most three of many.
func some(list []string) string {
	text := strings.Join(list[:min(3, len(list))], ", ")
	if more := len(list) - 3; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// counted is such as "1 packet" or "2 packets".
func counted[N int | int64 | uint32 | uint64](n N, noun string) string {
	return fmt.Sprintf("%d %s", n, plural(n, noun))
}

func plural[N int | int64 | uint32 | uint64](n N, noun string) string {
	switch {
	case n == 1:
		return noun
	case strings.HasSuffix(noun, "s"):
		return noun + "es"
	}
	return noun + "s"
}

// either returns the first text if a condition holds, and else the second.
func either(holds bool, first, second string) string {
	if holds {
		return first
	}
	return second
}

// when returns a text if a condition holds, and else none.
func when(holds bool, text string) string { return either(holds, text, "") }

func are(n int) string { return either(n == 1, "is", "are") }

// upper begins a sentence.
func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// counter is a counter as a cell, which is empty for what is not counted.
func counter(n int64) string { return when(n != plan.NotCounted, strconv.FormatInt(n, 10)) }

func number(port uint16) string { return when(port != 0, fmt.Sprint(port)) }

func since(t, now time.Time) string { return when(!t.IsZero(), duration.HumanDuration(now.Sub(t))) }

// WriteEndpoints writes a row for each endpoint of each port of a Service; wide adds hints.
func WriteEndpoints(w io.Writer, ports []PortExplanation, wide bool) error {
	header := "PORT ADDRESS POD NODE ZONE CONDITIONS USED" + when(wide, " HINTS")
	var rows [][]string
	for _, p := range ports {
		for _, ep := range p.Endpoints {
			row := []string{p.portText(), ep.Address, ep.Pod, ep.Node, ep.Zone, ep.condition(), ep.use()}
			if wide {
				row = append(row, strings.Join(ep.Hints, ","))
			}
			rows = append(rows, row)
		}
	}
	return Table(w, header, rows)
}

// condition sums up the conditions.
func (ep Endpoint) condition() string {
	is := func(c string) bool { return slices.Contains(ep.Conditions, c) }
	switch {
	case is("ready") && !is("serving"): // It is published (spec.publishNotReadyAddresses).
		return "ready, not serving"
	case is("terminating") && is("serving"):
		return "terminating, still serving"
	case is("terminating"):
		return "terminating"
	case is("ready"):
		return "ready"
	}
	return "not ready"
}

// use says for which traffic an endpoint is used, or why it is not.
func (ep Endpoint) use() string {
	if len(ep.Unused) == 0 {
		return "yes"
	}
	cluster, local := ep.Unused["Cluster"], ep.Unused["Local"]
	if len(ep.UsedFor) == 0 && (len(ep.Unused) == 1 || cluster == local) {
		return "no: " + cmp.Or(cluster, local)
	}
	return joined("; ", with("under policy ", strings.Join(ep.UsedFor, ", ")), with("not under Cluster: ", cluster), with("not under Local: ", local))
}

// WriteFindings writes what is wrong, a row each, with the file where any is about one.
func WriteFindings(w io.Writer, list []Finding) error {
	files := slices.ContainsFunc(list, func(f Finding) bool { return f.Where != "" })
	header := either(files, "SEVERITY FILE OBJECT FIELD DETAIL", "SEVERITY OBJECT FIELD DETAIL")
	var rows [][]string
	for _, f := range list {
		row := []string{f.Severity}
		if files {
			row = append(row, f.Where)
		}
		rows = append(rows, append(row, f.Object, f.Field, joined("; ", f.Detail, f.Effect)))
	}
	return Table(w, header, rows)
}

// outside reports whether clients outside of the cluster have an address to send to.
func (p PortExplanation) outside() bool {
	return p.MoreFrontends > 0 || slices.ContainsFunc(p.Frontends, func(f FrontendExplanation) bool { return !strings.HasPrefix(f.Frontend, plan.ClusterIP.String()) })
}

// filled returns what is not empty.
func filled(parts ...string) []string { return only(parts, func(p string) bool { return p != "" }) }

// joined joins what is not empty.
func joined(separator string, parts ...string) string {
	return strings.Join(filled(parts...), separator)
}

// WriteExplanation writes an explanation for people.
func WriteExplanation(w io.Writer, e *Explanation, now time.Time) error {
	fmt.Fprintf(w, "Service %s/%s on node %s (mode %s)\n", e.Namespace, e.Name, e.Node, e.Mode)
	kind := e.Type
	if kind == "ClusterIP" && len(e.Ports) > 0 && !slices.ContainsFunc(e.Ports, PortExplanation.outside) {
		kind += ", for clients in the cluster"
	}
	if about := joined(", ", kind, with("selector ", e.Selector), with("node's zone ", e.Zone)); about != "" {
		fmt.Fprintln(w, "  "+Printable(about))
	}
	for _, p := range e.Ports {
		if err := writePort(w, p, e.Selector != "", now); err != nil {
			return err
		}
	}
	if len(e.Checks) > 0 {
		var rows [][]string
		for _, c := range e.Checks {
			rows = append(rows, []string{c.Name, c.Result, c.Detail})
		}
		fmt.Fprintln(w)
		if err := aligned(w, "CHECKED\tRESULT\tDETAIL", rows); err != nil {
			return err
		}
	}
	if len(e.Diagnoses) == 0 {
		fmt.Fprint(w, "\nNothing is wrong with it on this node.\n")
	}
	for _, severity := range []string{problem, note} {
		for i, d := range only(e.Diagnoses, func(d Diagnosis) bool { return d.Severity == severity }) {
			if i == 0 {
				fmt.Fprintf(w, "\n%s:\n", either(severity == problem, "What is wrong", "What to know"))
			}
			fmt.Fprintf(w, "  - %s\n", Printable(d.What))
			if d.Do != "" {
				fmt.Fprintf(w, "    To do: %s\n", Printable(d.Do))
			}
		}
	}
	return nil
}

// writeList writes a list below a title, unless it is empty.
func writeList(w io.Writer, title string, list []string) {
	for i, text := range list {
		if i == 0 {
			fmt.Fprintf(w, "\n%s:\n", title)
		}
		fmt.Fprintf(w, "  - %s\n", Printable(text))
	}
}

// with puts something before a text, unless that is empty.
func with(prefix, s string) string { return when(s != "", prefix+s) }

func writePort(w io.Writer, p PortExplanation, ofPods bool, now time.Time) error {
	target := when(p.TargetPort != "" && ofPods, ", to port "+Printable(p.TargetPort)+" of the Pods")
	fmt.Fprintf(w, "\nPort %s, %s%s: %s%s\n", p.portText(), p.Family, target, p.State, with(" for ", since(p.Since, now)))
	fmt.Fprintln(w, "  internalTrafficPolicy "+p.InternalPolicy+with(", externalTrafficPolicy ", p.ExternalPolicy)+
		when(p.Affinity > 0, fmt.Sprintf(", ClientIP affinity of %s", time.Duration(p.Affinity)*time.Second)))
	var rows [][]string
	for _, f := range p.Frontends {
		name := f.Frontend
		for _, v := range f.Verdicts {
			rows = append(rows, []string{"  " + name, strings.Join(v.From, ", "), v.Summary()})
			name = ""
		}
	}
	if err := aligned(w, "  FRONTEND\tFROM\tVERDICT", rows); err != nil {
		return err
	}
	if p.MoreFrontends > 0 {
		fmt.Fprintf(w, "  and %d more frontends\n", p.MoreFrontends)
	}
	rows = nil
	for _, ep := range p.Endpoints {
		rows = append(rows, []string{"  " + ep.Address, cmp.Or(ep.Pod, "-"), cmp.Or(ep.Node, "-"), cmp.Or(ep.Zone, "-"),
			ep.condition(), ep.use()})
	}
	if len(rows) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	return aligned(w, "  ENDPOINT\tPOD\tNODE\tZONE\tCONDITIONS\tUSED", rows)
}
