package iptables

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
)

// kernelTable is the content of a table as iptables-save prints it: the rules of each chain, in the form in which chain
// holds them.
type kernelTable map[string][]string

// parseSave reads the output of iptables-save for one table, and reports whether the table is in it, from its first line to its
// last. Lines that it does not know are passed over: they are not ours.
func parseSave(in io.Reader, t table) (held kernelTable, whole bool, err error) {
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
		t[name] = append(t[name], body)
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

// ownPrefixes are those of the chains that come and go with Services, and so may be stale.
var ownPrefixes = []string{prefixCluster, prefixLocal, prefixExternal, prefixFirewall, prefixEndpoint}

// mayBeStale reports whether a chain that nothing wants is ours, or kube-proxy's, to remove.
func mayBeStale(name string) bool {
	for _, p := range ownPrefixes {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}
