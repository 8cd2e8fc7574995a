package xtables

import (
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

// input is the text by which iptables-restore --noflush makes steps one after the other. All that a step changes in a table
// changes at once.
func input(steps [][]Change) string {
	var out strings.Builder
	size := 0
	for _, step := range steps {
		for _, c := range step {
			size += c.size()
		}
	}
	out.Grow(size)
	for _, step := range steps {
		var done []names.Table
		for _, c := range step {
			if !slices.Contains(done, c.Table) {
				appendTable(&out, c.Table, step)
				done = append(done, c.Table)
			}
		}
	}
	return out.String()
}

// size is about the length of a change in the input of iptables-restore.
func (c Change) size() int {
	n := len("-X :\n - [0:0]\n") + 2*len(c.Chain)
	for _, r := range c.Rules {
		n += len("-A  1 \n") + len(c.Chain) + len(r)
	}
	return n
}

// appendTable writes those of the changes that are of one table. The line of a chain empties the chain if it exists and makes it if not;
// so chains to be removed have one too, since only an empty chain can be removed. All other chains stay as they are.
func appendTable(out *strings.Builder, t names.Table, changes []Change) {
	put := func(words ...string) {
		for _, w := range words {
			out.WriteString(w)
		}
	}
	each := func(do func(c Change)) {
		for _, c := range changes {
			if c.Table == t {
				do(c)
			}
		}
	}
	put("*", string(t), "\n")
	each(func(c Change) {
		if c.Op == Write || c.Op == Empty || c.Op == Remove || c.Op == Append && !c.Exists {
			put(":", c.Chain, " - [0:0]\n")
		}
	})
	each(func(c Change) {
		switch c.Op {
		case Write, Append:
			appendRules(out, "-A ", c)
		case Delete:
			appendRules(out, "-D ", c)
		case Insert:
			for _, r := range c.Rules {
				put("-I ", c.Chain, " 1 ", r, "\n")
			}
		}
	})
	each(func(c Change) {
		if c.Op == Remove {
			put("-X ", c.Chain, "\n")
		}
	})
	put("COMMIT\n")
}

func appendRules(out *strings.Builder, command string, c Change) {
	for _, r := range c.Rules {
		out.WriteString(command)
		out.WriteString(c.Chain)
		out.WriteByte(' ')
		out.WriteString(r)
		out.WriteByte('\n')
	}
}

// AppendTo writes the chain's rules as iptables-save prints them, each behind a prefix.
func (c Chain) AppendTo(out *strings.Builder, prefix string) {
	appendRules(out, prefix+"-A ", WriteChain(c))
}
