// Package drift names what in the kernel is not as this program has written it last.
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
	Chain         Kind = "chain"
	Rule          Kind = "rule"
	SetElement    Kind = "set_element"
	VirtualServer Kind = "virtual_server"
	RealServer    Kind = "real_server"
	Address       Kind = "address"
	Route         Kind = "route"
	Sysctl        Kind = "sysctl"
)

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
	Kind   Kind
	State  State
	Object string // says which one, for people
}

// String is such as "chain KUBE-SERVICES of table nat (IPv4): missing".
func (d Difference) String() string {
	return fmt.Sprintf("%s %s: %s", strings.ReplaceAll(string(d.Kind), "_", " "), d.Object, d.State)
}

// Most is how many differences are kept one by one. All others are only counted.
const Most = 20

// Found gathers differences. The zero value has none. It is not safe for concurrent use.
type Found struct {
	Counts map[Kind]int
	First  []Difference // at most Most
}

// Add adds a difference. The arguments are those of fmt.Sprintf for Difference.Object.
func (f *Found) Add(k Kind, s State, format string, args ...any) {
	f.count(k, 1)
	if len(f.First) < Most {
		f.First = append(f.First, Difference{k, s, fmt.Sprintf(format, args...)})
	}
}

// Merge adds what another one has found.
func (f *Found) Merge(o Found) {
	for k, n := range o.Counts {
		f.count(k, n)
	}
	f.First = append(f.First, o.First[:min(len(o.First), Most-len(f.First))]...)
}

func (f *Found) count(k Kind, n int) {
	if f.Counts == nil {
		f.Counts = map[Kind]int{}
	}
	f.Counts[k] += n
}

// Total is how many differences there are of all kinds.
func (f *Found) Total() int {
	n := 0
	for _, c := range f.Counts {
		n += c
	}
	return n
}

// Words tells of the first few differences, and of how many more there are: "rule … : missing; chain … : changed; and 7 more".
func (f *Found) Words(few int) string {
	var out []string
	for _, d := range f.First[:min(few, len(f.First))] {
		out = append(out, d.String())
	}
	if more := f.Total() - len(out); more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, "; ")
}

// Report is the outcome of one comparison of everything with the kernel.
type Report struct {
	Found
	// Took is how long it took to compare, and to repair what was found.
	Took time.Duration
	// Err is why what was found may not have been repaired; nil if it has been. It is told of elsewhere, too.
	Err error
}
