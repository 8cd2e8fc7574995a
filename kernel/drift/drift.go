// Package drift holds the differences between what this program has written to the kernel and what is there now, as data.
package drift

import (
	"fmt"
	"strings"
	"time"
)

// Kind is a kind of thing in the kernel. The names are values of a label of metrics.
type Kind string

// The kinds of things that backends write.
const (
	Table         Kind = "table"
	Chain         Kind = "chain"
	Rule          Kind = "rule"
	SetElement    Kind = "set_element" // of an ipset, or of a set or map of nftables
	Object        Kind = "object"      // a flowtable or a stateful object of nftables
	VirtualServer Kind = "virtual_server"
	RealServer    Kind = "real_server"
	Address       Kind = "address"
	Route         Kind = "route"
	Sysctl        Kind = "sysctl"
)

// Kinds lists all of them.
var Kinds = [...]Kind{Table, Chain, Rule, SetElement, Object, VirtualServer, RealServer, Address, Route, Sysctl}

// State is in which way a thing is not as it was written.
type State string

// The states of a thing.
const (
	Missing    State = "missing"    // it was written, and is gone
	Changed    State = "changed"    // it is there, with other content
	Unexpected State = "unexpected" // it was not written, and is where only this program writes
)

// Difference is one thing that is not as it was written.
type Difference struct {
	Kind  Kind
	State State
	// Object is the name of the thing, and where it is: "KUBE-SERVICES of table nat (IPv4)". A rule has no name: its Object is
	// its chain.
	Object string
	// Aspect is in what respect a thing has Changed: "weight". It is empty where there is but one, or where they are not told
	// apart.
	Aspect string
	// Want is what was written and Have what is there: the text of a rule, the value of the aspect or of the whole thing. Both
	// are empty where the name says everything, or where the kernel's state cannot be expressed; Want is empty for what is
	// Unexpected, and Have for what is Missing.
	Want, Have string
}

// String names the thing and its state, such as "chain KUBE-SERVICES of table nat (IPv4): missing". It has the values of an
// aspect, but not those of a whole thing.
func (d Difference) String() string {
	what := d.Object
	switch {
	case d.Kind == Rule:
		what = fmt.Sprintf("%q in %s", d.Want+d.Have, d.Object)
	case d.Kind == Sysctl:
		what += fmt.Sprintf(" is %q in place of %s", d.Have, d.Want)
	case d.Aspect != "" && d.Want != d.Have:
		what += fmt.Sprintf(": %s %s in place of %s", d.Aspect, d.Have, d.Want)
	case d.Aspect != "":
		what += ": " + d.Aspect
	}
	return fmt.Sprintf("%s %s: %s", strings.ReplaceAll(string(d.Kind), "_", " "), what, d.State)
}

// Found is what a comparison has found. It is no longer than the list of what was written and the list of what is there together,
// both of which a comparison has in memory anyway; whoever keeps it for longer keeps its Summary.
type Found []Difference

// Counts returns how many differences there are of each kind that has any.
func (f Found) Counts() map[Kind]int {
	out := map[Kind]int{}
	for _, d := range f {
		out[d.Kind]++
	}
	return out
}

// Words describes the first few differences and says how many more there are: "rule … : missing; chain … : changed; and 7 more".
func (f Found) Words(few int) string { return f.Summary(few).String() }

// Summary returns what is printed of f where no more than few differences are to be.
func (f Found) Summary(few int) Summary {
	return Summary{Counts: f.Counts(), First: append(Found(nil), f[:min(few, len(f))]...)}
}

// Summary is what is printed of differences: the number of each kind, and the first few of them. The zero value has none.
type Summary struct {
	Counts map[Kind]int
	First  Found
}

// Merge adds the differences of another summary behind those of s. It keeps at most few of them one by one.
func (s *Summary) Merge(o Summary, few int) {
	if s.Counts == nil {
		s.Counts = map[Kind]int{}
	}
	for k, n := range o.Counts {
		s.Counts[k] += n
	}
	s.First = append(s.First, o.First[:max(0, min(len(o.First), few-len(s.First)))]...)
}

// Total returns the number of differences of all kinds.
func (s Summary) Total() int {
	n := 0
	for _, c := range s.Counts {
		n += c
	}
	return n
}

// String is as Found.Words.
func (s Summary) String() string {
	var out []string
	for _, d := range s.First {
		out = append(out, d.String())
	}
	if more := s.Total() - len(s.First); more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, "; ")
}

// Report is the outcome of one comparison of everything with the kernel.
type Report struct {
	Found Found
	// Took is how long it took to compare, and to repair what was found.
	Took time.Duration
	// Err is why what was found may not have been repaired; nil if it has been. It is told of elsewhere, too.
	Err error
}
