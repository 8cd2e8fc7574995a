package iptables

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// kernelTable is the content of a table as iptables-save prints it: the rules of each chain, in the form in which chain
// holds them.
type kernelTable map[string][]string

// parseSave reads the output of iptables-save for one table. Lines that it does not know (of other tools that write to
// the same table by nft) are passed over: they are not ours.
func parseSave(in io.Reader) (kernelTable, error) {
	out := kernelTable{}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			if _, seen := out[name]; !seen {
				out[name] = nil
			}
		case strings.HasPrefix(line, "-A "):
			name, body, _ := strings.Cut(line[len("-A "):], " ")
			out[name] = append(out[name], body)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading the output of iptables-save: %w", err)
	}
	return out, nil
}

// has reports whether the table has a chain with exactly these rules.
func (t kernelTable) has(c chain) bool {
	rules, ok := t[c.name]
	return ok && sameRules(chain{c.name, rules}, c)
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
