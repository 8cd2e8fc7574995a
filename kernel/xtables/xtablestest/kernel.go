// Package xtablestest has tables for tests that behave as the kernel's do.
package xtablestest

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
)

// Kernel holds tables as the kernel does, and refuses what the kernel refuses: rules in or to chains that do not exist, and
// the removal of chains that have rules or that rules lead to. A table changes as a whole or not at all.
type Kernel struct {
	Tables map[names.Table]xtables.Content
	// Refuse, if set, makes restores of text that holds it fail.
	Refuse string
	// RefuseReached, if set, makes restores fail after which a rule that holds it can be reached from a built-in chain.
	RefuseReached string
	// Locked, if set, makes the next restore of text that holds it find the xtables lock held.
	Locked string
	// HasSet reports whether an ipset is there, without which a rule that asks it is refused; nil if all are.
	HasSet   func(name string) bool
	Restores []string
	Changed  func() // is called after each change of a table
}

// New returns a Kernel with empty built-in chains.
func New() *Kernel {
	return &Kernel{Tables: map[names.Table]xtables.Content{
		names.NAT:    {"PREROUTING": nil, "INPUT": nil, "OUTPUT": nil, "POSTROUTING": nil},
		names.Filter: {"INPUT": nil, "FORWARD": nil, "OUTPUT": nil},
		names.Mangle: {"PREROUTING": nil, "INPUT": nil, "FORWARD": nil, "OUTPUT": nil, "POSTROUTING": nil},
	}}
}

// Save is as that of xtables.Kernel.
func (k *Kernel) Save(_ context.Context, t names.Table, known ...xtables.Content) (xtables.Content, error) {
	out := xtables.Content{}
	for name, rules := range k.Tables[t] {
		out[name] = slices.Clone(rules)
		for _, c := range known {
			if slices.Equal(c[name], rules) {
				out[name] = c[name]
			}
		}
	}
	return out, nil
}

// Read is as that of xtables.Kernel.
func (k *Kernel) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	content, err := k.Save(ctx, t)
	reading := xtables.ReadingOf(content)
	reading.Digests = func(chains []string) ([]uint64, error) {
		var out []uint64
		for _, name := range chains {
			out = append(out, digest(k.Tables[t][name]))
		}
		return out, nil
	}
	return reading, err
}

var seed = maphash.MakeSeed()

func digest(rules []string) uint64 { return maphash.String(seed, strings.Join(rules, "\n")) }

func (k *Kernel) report() {
	if k.Changed != nil {
		k.Changed()
	}
}

// Exists is as that of xtables.Kernel: all tables exist.
func (*Kernel) Exists(names.Table) (bool, error) { return true, nil }

// Generation is as that of xtables.Kernel: it follows from what the tables hold.
func (k *Kernel) Generation() uint32 {
	sum := uint64(1)
	for t, content := range k.Tables {
		for name, rules := range content {
			sum += maphash.String(seed, string(t)+" "+name) ^ digest(rules)
		}
	}
	return uint32(sum) | 1
}

// Prepare is as that of xtables.Kernel. There is nothing to prepare.
func (*Kernel) Prepare() {}

// Restore is as that of xtables.Kernel.
func (k *Kernel) Restore(input xtables.Input) error {
	text := input.String()
	k.Restores = append(k.Restores, text)
	if k.Refuse != "" && strings.Contains(text, k.Refuse) {
		return &xtables.RestoreError{Program: "fake", Message: "refused", Err: errors.New("exit status 1")}
	}
	if k.Locked != "" && strings.Contains(text, k.Locked) {
		k.Locked = ""
		return &xtables.RestoreError{Program: "fake", Message: "Another app is currently holding the xtables lock",
			Err: errors.New("exit status 4")}
	}
	var tbl names.Table
	var work xtables.Content
	for n, line := range strings.Split(text, "\n") {
		fail := func(why string) error {
			return &xtables.RestoreError{Program: "fake", Message: fmt.Sprintf("line %d: %s: %s", n+1, why, line),
				Err: errors.New("exit status 1")}
		}
		switch {
		case line == "":
		case line[0] == '*':
			tbl = names.Table(line[1:])
			work, _ = k.Save(context.Background(), tbl)
		case line[0] == ':':
			name, _, _ := strings.Cut(line[1:], " ")
			work[name] = nil
		case strings.HasPrefix(line, "-A "):
			name, body, _ := strings.Cut(line[3:], " ")
			if _, ok := work[name]; !ok {
				return fail("no such chain")
			}
			if set := SetOf(body); set != "" && k.HasSet != nil && !k.HasSet(set) {
				return fail("Set " + set + " doesn't exist")
			}
			work[name] = append(work[name], body)
		case strings.HasPrefix(line, "-I "):
			words := strings.SplitN(line[3:], " ", 3)
			work[words[0]] = slices.Insert(work[words[0]], 0, words[2])
		case strings.HasPrefix(line, "-D "):
			name, body, _ := strings.Cut(line[3:], " ")
			i := slices.Index(work[name], body)
			if i < 0 {
				return fail("no such rule")
			}
			work[name] = slices.Delete(work[name], i, i+1)
		case strings.HasPrefix(line, "-X "):
			if rules, ok := work[line[3:]]; !ok || len(rules) > 0 {
				return fail("no such chain, or not empty")
			}
			delete(work, line[3:])
		case line == "COMMIT":
			if err := errors.Join(checkTargets(work), k.checkReached(work)); err != nil {
				return fail(err.Error())
			}
			k.Tables[tbl] = work
			k.report()
		default:
			return fail("not understood")
		}
	}
	return nil
}

// SetOf returns the ipset that a rule asks; "" for none.
func SetOf(rule string) string {
	for _, option := range []string{"--match-set ", "--map-set "} {
		if _, rest, is := strings.Cut(rule, option); is {
			name, _, _ := strings.Cut(rest, " ")
			return name
		}
	}
	return ""
}

func checkTargets(t xtables.Content) error {
	for name, rules := range t {
		for _, r := range rules {
			if to := xtables.Target(r); strings.HasPrefix(to, "KUBE-") {
				if _, ok := t[to]; !ok {
					return fmt.Errorf("chain %s leads to %s, which does not exist", name, to)
				}
			}
		}
	}
	return nil
}

// checkReached is what nf_tables looks at only in rules that packets can get to: above all, how deep they lead.
func (k *Kernel) checkReached(t xtables.Content) error {
	if way := Deepest(t); len(way)-1 > xtables.MaxNesting {
		return fmt.Errorf("too many links: %s", strings.Join(way, " > "))
	}
	if k.RefuseReached == "" {
		return nil
	}
	for name := range xtables.Depths(t) {
		for _, r := range t[name] {
			if strings.Contains(r, k.RefuseReached) {
				return fmt.Errorf("refused where it is reached, in chain %s: %s", name, r)
			}
		}
	}
	return nil
}

// Deepest is the longest way from a built-in chain through the chains of a table.
func Deepest(held xtables.Content) []string {
	memo := map[string][]string{}
	var from func(name string) []string
	from = func(name string) []string {
		if way, known := memo[name]; known {
			return way
		}
		var longest []string
		for _, r := range held[name] {
			if to := xtables.Target(r); to != "" {
				if _, is := held[to]; is {
					if way := from(to); len(way) > len(longest) {
						longest = way
					}
				}
			}
		}
		memo[name] = append([]string{name}, longest...)
		return memo[name]
	}
	var out []string
	for name := range held {
		if way := from(name); names.Builtin(name) && len(way) > len(out) {
			out = way
		}
	}
	return out
}
