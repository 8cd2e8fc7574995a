package iptables

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"nodeproxy/kernel/names"
	"regexp"
	"slices"
	"strings"
)

// kernelTable is the content of a table as iptables-save prints it: the rules of each chain, in the form in which chain
// holds them.
type kernelTable map[string][]string

// parseSave reads the output of iptables-save for one table, and reports whether the table is in it, from its first line to its
// last. Lines that it does not know are passed over: they are not ours.
func parseSave(in io.Reader, t names.Table) (held kernelTable, whole bool, err error) {
	held = kernelTable{}
	begun := false
	err = eachLine(in, func(line string) {
		switch {
		case line == "*"+string(t):
			begun = true
		case line == "COMMIT":
			whole = begun
		default:
			held.add(line)
		}
	})
	return held, whole, err
}

// eachLine calls do for each line that a program prints.
func eachLine(in io.Reader, do func(line string)) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		do(lines.Text())
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading its output: %w", err)
	}
	return nil
}

// add notes a chain or rule down, as iptables-save or iptables -S prints it.
func (t kernelTable) add(line string) {
	word, rest, _ := strings.Cut(line, " ")
	switch {
	case word == "-A":
		name, body, _ := strings.Cut(rest, " ")
		t[name] = append(t[name], withAddresses(body))
		return
	case strings.HasPrefix(word, ":"):
		rest = word[1:]
	case word != "-N" && word != "-P":
		return
	}
	name, _, _ := strings.Cut(rest, " ")
	if _, seen := t[name]; !seen {
		t[name] = nil
	}
}

// withAddresses is a rule with its IPv6 addresses as Go prints them. The C library of the GNU project prints those of which
// only the last 32 bits are set, ::/96 but ::/111, with these as an IPv4 address: ::1.2.3.4.
func withAddresses(rule string) string {
	if !mayHaveDotted(rule) {
		return rule
	}
	return dotted.ReplaceAllStringFunc(rule, func(match string) string {
		m := dotted.FindStringSubmatch(match)
		addr, err := netip.ParseAddr(m[2])
		if err != nil {
			return match
		}
		return m[1] + addr.String()
	})
}

// dotted finds such addresses behind the options that take one.
var dotted = regexp.MustCompile(`((?:^| )(?:-[sd]|--ctorigdst|--to-destination) \[?)(::[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+)`)

// mayHaveDotted is false, at little cost, for nearly every rule that has none.
func mayHaveDotted(rule string) bool {
	for {
		_, after, found := strings.Cut(rule, "::")
		if !found {
			return false
		}
		rest := strings.TrimLeft(after, "0123456789")
		if len(rest) < len(after) && strings.HasPrefix(rest, ".") {
			return true
		}
		rule = after
	}
}

// has reports whether the table has a chain with exactly these rules.
func (t kernelTable) has(c chain) bool {
	rules, ok := t[c.name]
	return ok && sameRules(chain{c.name, rules}, c)
}

// leads reports whether a built-in chain has a rule that leads to another chain. A rule there that leads to the same chain and can't
// be read counts: to add one at each comparison would be worse.
func (t kernelTable) leads(from, rule string) bool {
	return slices.ContainsFunc(t[from], func(r string) bool {
		return r == rule || unread(r) && jumpTarget(r) == jumpTarget(rule)
	})
}
