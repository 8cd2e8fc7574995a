package iptables

import (
	"bytes"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Observer receives what happens to rules. Its methods must be safe for concurrent use, and must not block.
type Observer interface {
	// RestoreFailed reports a run of iptables-restore that failed. partial is true where it was to write a change only, so
	// that everything will be compared with the kernel next.
	RestoreFailed(f plan.Family, partial bool)
	// IPTablesRules reports, after a sync that the kernel took but for single ServicePorts, how many rules a table (filter or
	// nat) holds in chains of this program, and how many rules that sync has written.
	IPTablesRules(f plan.Family, table string, total, written int)
}

// ruleCounts are the numbers of rules of one family, by table. Rules in built-in chains that lead to ours are not counted; nor
// does kube-proxy count them.
type ruleCounts struct {
	observer Observer // nil for none
	total    map[names.Table]int
	written  map[names.Table]int
	partial  bool // the sync that is at work writes a change only
}

func newRuleCounts(o Observer) ruleCounts {
	return ruleCounts{observer: o, total: map[names.Table]int{}, written: map[names.Table]int{}}
}

// begin is to be called before each sync.
func (c *ruleCounts) begin() {
	c.partial = false
	clear(c.written)
}

func (c *ruleCounts) failed(f plan.Family) {
	if c.observer != nil {
		c.observer.RestoreFailed(f, c.partial)
	}
}

// wrote counts the rules in an input of iptables-restore, and returns how many chains it writes or removes, and how many rules.
func (c *ruleCounts) wrote(input xtables.Input) (chains, rules int) {
	var in names.Table
	for line := range input {
		if name, ok := bytes.CutPrefix(line, []byte("*")); ok {
			in = names.Table(bytes.TrimSuffix(name, []byte("\n")))
		} else if bytes.HasPrefix(line, []byte("-A ")) {
			if rules++; c.observer != nil {
				c.written[in]++
			}
		} else if line[0] == ':' || bytes.HasPrefix(line, []byte("-X ")) {
			chains++
		}
	}
	return chains, rules
}

func (c *ruleCounts) report(f plan.Family) {
	if c.observer == nil {
		return
	}
	for _, t := range tables {
		c.observer.IPTablesRules(f, string(t), c.total[t], c.written[t])
	}
}
