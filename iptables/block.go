package iptables

import (
	"nodeproxy/kernel/names"
	"slices"
	"strings"
)

// block is a change of one table that the kernel makes as a whole: chains to fill anew and chains to remove.
type block struct {
	table   names.Table
	writes  []chain
	removes []string
	// grows is how many more rules the table has after it.
	grows int
}

func (b *block) empty() bool { return len(b.writes) == 0 && len(b.removes) == 0 }

func (b *block) write(c chain)      { b.writes = append(b.writes, c) }
func (b *block) remove(name string) { b.removes = append(b.removes, name) }

// replace is write for a chain that has had so many rules, and removeChain is remove for one.
func (b *block) replace(was int, c chain) {
	b.write(c)
	b.grows += len(c.rules) - was
}

func (b *block) removeChain(was int, name string) {
	b.remove(name)
	b.grows -= was
}

// blocks are a change of both tables. Each changes as a whole, one after the other.
type blocks struct{ nat, filter block }

func (b *blocks) write(c tableChain) {
	if c.table == names.Filter {
		b.filter.write(c.chain)
	} else {
		b.nat.write(c.chain)
	}
}

// filterFirst and natFirst say which table changes first.
func (b *blocks) filterFirst() []block {
	b.nat.table, b.filter.table = names.NAT, names.Filter
	return []block{b.filter, b.nat}
}

func (b *blocks) natFirst() []block {
	list := b.filterFirst()
	slices.Reverse(list)
	return list
}

// ownChains adds what differs between the chains that a ServicePort had and those that it has.
func (b *block) ownChains(before, after []chain) {
	old := make(map[string]chain, len(before))
	for _, c := range before {
		old[c.name] = c
	}
	for _, c := range after {
		if was, ok := old[c.name]; !ok || !sameRules(was, c) {
			b.replace(len(was.rules), c)
		}
		delete(old, c.name)
	}
	for _, c := range before {
		if _, gone := old[c.name]; gone {
			b.removeChain(len(c.rules), c.name)
		}
	}
}

// appendTo writes the block as iptables-restore reads it. A chain line empties the chain if it exists and makes it if
// not; so chains to be removed have one too, since only an empty chain can be removed. With --noflush, all other chains
// stay as they are.
func (b *block) appendTo(out *strings.Builder) {
	out.WriteString("*" + string(b.table) + "\n")
	for _, c := range b.writes {
		out.WriteString(":" + c.name + " - [0:0]\n")
	}
	for _, name := range b.removes {
		out.WriteString(":" + name + " - [0:0]\n")
	}
	for _, c := range b.writes {
		c.appendTo(out, "")
	}
	for _, name := range b.removes {
		out.WriteString("-X " + name + "\n")
	}
	out.WriteString("COMMIT\n")
}

// appendTo writes the chain's rules, each behind a prefix.
func (c chain) appendTo(out *strings.Builder, prefix string) {
	for _, r := range c.rules {
		out.WriteString(prefix)
		out.WriteString("-A ")
		out.WriteString(c.name)
		out.WriteByte(' ')
		out.WriteString(r)
		out.WriteByte('\n')
	}
}

// text joins blocks into one input for iptables-restore.
func text(blocks []block) string {
	var out strings.Builder
	for i := range blocks {
		blocks[i].appendTo(&out)
	}
	return out.String()
}
