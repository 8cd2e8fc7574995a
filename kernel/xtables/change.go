package xtables

import (
	"bytes"
	"io"
	"iter"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
)

// A Chain is a chain of a table with its rules in order. Rules are in the form in which iptables-save prints them, without
// the leading "-A CHAIN ": so what the kernel holds can be compared with what it should hold as text.
type Chain struct {
	Table names.Table
	Name  string
	Rules []string
}

// A Jump is a rule in a built-in chain that leads to another chain.
type Jump struct {
	Table      names.Table
	From, Rule string
}

// An Op is a way in which the kernel's tables change.
type Op int

// The ways, in the order in which Diff returns them.
const (
	Write  Op = iota // gives a chain other rules, and makes it if it does not exist
	Delete           // removes one rule from a built-in chain
	Insert           // puts one rule in front of a built-in chain
	Append           // adds one rule to a chain that belongs to another program too, and makes the chain if it does not exist
	Empty            // removes the rules of a stale chain that has to stay, since a rule of another program leads to it
	Leave            // changes nothing: such a chain, which is empty already
	Remove           // removes a stale chain
)

// A Change is one thing to do to a table.
type Change struct {
	Op    Op
	Table names.Table
	Chain string
	// Rules are those that the chain is to have, after a Write, or the one rule to insert, append or delete.
	Rules []string
	// Exists reports whether the chain exists before, and Have are the rules that it has then.
	Exists bool
	Have   []string
	// By is the chain with the rule of another program, of an Empty or Leave.
	By string
}

// WriteChain is the Change that writes a chain, whatever it had been before.
func WriteChain(c Chain) Change {
	return Change{Op: Write, Table: c.Table, Chain: c.Name, Rules: c.Rules}
}

// Grows is by how many rules a chain of ours grows.
func (c Change) Grows() int {
	switch c.Op {
	case Write, Empty, Remove:
		return len(c.Rules) - len(c.Have)
	}
	return 0
}

// apply makes the change to what is known of a table.
func (t Content) apply(c Change) {
	switch c.Op {
	case Write:
		t[c.Chain] = c.Rules
	case Insert:
		t[c.Chain] = slices.Concat(c.Rules, t[c.Chain])
	case Append:
		t[c.Chain] = slices.Concat(t[c.Chain], c.Rules)
	case Delete:
		if i := slices.Index(t[c.Chain], c.Rules[0]); i >= 0 {
			t[c.Chain] = slices.Delete(slices.Clone(t[c.Chain]), i, i+1)
		}
	case Empty:
		t[c.Chain] = nil
	case Remove:
		delete(t, c.Chain)
	}
}

// An Input is what iptables-restore --noflush is to read: its lines, with their ends. It can be read again; each line is valid until the next
// one. As a text, that of a whole table would take as much memory as the rules do.
type Input iter.Seq[[]byte]

// Text returns the Input with these lines.
func Text(lines string) Input {
	return func(yield func([]byte) bool) {
		for line := range strings.Lines(lines) {
			if !yield([]byte(line)) {
				return
			}
		}
	}
}

// String returns all lines.
func (i Input) String() string {
	var out strings.Builder
	_, _ = i.WriteTo(&out)
	return out.String()
}

// pieceSize is about how much of an Input is written at a time, in bytes: as much as a pipe takes.
const pieceSize = 64 << 10

// WriteTo implements io.WriterTo.
func (i Input) WriteTo(to io.Writer) (n int64, err error) {
	var piece []byte
	write := func() bool {
		var written int
		written, err = to.Write(piece)
		n, piece = n+int64(written), piece[:0]
		return err == nil
	}
	for line := range i {
		if piece = append(piece, line...); len(piece) >= pieceSize && !write() {
			return n, err
		}
	}
	write()
	return n, err
}

// contains reports whether a line begins with a prefix.
func (i Input) contains(prefix string) bool {
	for line := range i {
		if bytes.HasPrefix(line, []byte(prefix)) {
			return true
		}
	}
	return false
}

// lines returns how many there are.
func (i Input) lines() (n int) {
	for range i {
		n++
	}
	return n
}

// input makes steps one after the other. All that a step changes in a table changes at once.
func input(steps [][]Change) Input {
	return func(yield func([]byte) bool) {
		out := lineWriter{yield: yield}
		for _, step := range steps {
			var done []names.Table
			for _, c := range step {
				if !slices.Contains(done, c.Table) {
					out.table(c.Table, step)
					done = append(done, c.Table)
				}
			}
		}
	}
}

// lineWriter passes lines on, until one is not wanted any more.
type lineWriter struct {
	yield func([]byte) bool
	over  bool
	line  []byte
}

func (w *lineWriter) put(words ...string) {
	if w.over {
		return
	}
	w.line = w.line[:0]
	for _, word := range words {
		w.line = append(w.line, word...)
	}
	w.line = append(w.line, '\n')
	w.over = !w.yield(w.line)
}

// table writes those of the changes that are of one table. The line of a chain empties the chain if it exists and makes it if not; so chains
// to be removed have one too, since only an empty chain can be removed. All other chains stay as they are.
func (w *lineWriter) table(t names.Table, changes []Change) {
	each := func(do func(c Change)) {
		for _, c := range changes {
			if c.Table == t {
				do(c)
			}
		}
	}
	w.put("*", string(t))
	each(func(c Change) {
		if c.Op == Write || c.Op == Empty || c.Op == Remove || c.Op == Append && !c.Exists {
			w.put(":", c.Chain, " - [0:0]")
		}
	})
	each(func(c Change) {
		for _, r := range c.Rules {
			switch c.Op {
			case Write, Append:
				w.put("-A ", c.Chain, " ", r)
			case Delete:
				w.put("-D ", c.Chain, " ", r)
			case Insert:
				w.put("-I ", c.Chain, " 1 ", r)
			}
		}
	})
	each(func(c Change) {
		if c.Op == Remove {
			w.put("-X ", c.Chain)
		}
	})
	w.put("COMMIT")
}

// AppendTo writes the chain's rules as iptables-save prints them, each behind a prefix.
func (c Chain) AppendTo(out *strings.Builder, prefix string) {
	for _, r := range c.Rules {
		for _, s := range [...]string{prefix, "-A ", c.Name, " ", r, "\n"} {
			out.WriteString(s)
		}
	}
}
