package xtables

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"strings"

	"nodeproxy/kernel/names"
)

// kernelTable is the content of a table as iptables-save prints it: the rules of each chain, in the form in which chain
// holds them.
type Content map[string][]string

// parseSave reads the output of iptables-save for one table, and reports whether the table is in it, from its first line to its
// last. Lines that it does not know are passed over: they are not ours.
func parseSave(in io.Reader, t names.Table) (held Content, whole bool, err error) {
	held = Content{}
	begun := false
	err = EachLine(in, func(line string) {
		switch {
		case line == "*"+string(t):
			begun = true
		case line == "COMMIT":
			whole = begun
		default:
			held.Add(line)
		}
	})
	return held, whole, err
}

// eachLine calls do for each line that a program prints.
func EachLine(in io.Reader, do func(line string)) error {
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
func (t Content) Add(line string) {
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

// MaxNesting is how many chains deep below a built-in one nf_tables lets rules lead, whether they jump or go to
// (NFT_JUMP_STACK_SIZE is 16, the built-in chain included). It refuses a rule that leads deeper with EMLINK.
const MaxNesting = 15

// Depths returns, for each chain that packets can get to, how many chains deep below a built-in one it lies at most.
func Depths(held Content) map[string]int {
	out := map[string]int{}
	var visit func(name string, depth int)
	visit = func(name string, depth int) {
		if was, seen := out[name]; seen && was >= depth {
			return
		}
		out[name] = depth
		for _, r := range held[name] {
			if to := Target(r); to != "" {
				if _, is := held[to]; is {
					visit(to, depth+1)
				}
			}
		}
	}
	for name := range held {
		if names.Builtin(name) {
			visit(name, 0)
		}
	}
	return out
}
