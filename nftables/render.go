package nftables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// text returns the key of an element in the language of nft.
func (i id) text(f plan.Family) string {
	if i.key == "" {
		return "*"
	}
	return valueText(sets(f)[i.set].Key, i.key)
}

// text returns what follows the key of an element in the language of nft.
func (v value) text(set nft.Set) string {
	out := ""
	if v.comment != "" {
		out = fmt.Sprintf(" comment %q", v.comment)
	}
	chain, other, _ := strings.Cut(v.chain, foreignMark)
	switch {
	case chain != "":
		out += " : goto " + chain
	case v.data != "":
		out += " : " + valueText(set.Data, v.data)
	}
	if other != "" {
		out += " # with " + other
	}
	return out
}

// valueText returns a value in the language of nft; one that is not as long as its type says, as a number.
func valueText(types nft.Concat, raw string) string {
	if len(raw) != types.Length() {
		return fmt.Sprintf("%#x", raw)
	}
	var parts []string
	for _, t := range types {
		n := min(nft.Concat{t, t}.Length()/2, len(raw))
		parts = append(parts, partText(t, []byte(raw[:n])))
		raw = raw[n:]
	}
	return strings.Join(parts, " . ")
}

func partText(t uint32, raw []byte) string {
	switch t {
	case nft.TypeIPv4, nft.TypeIPv6:
		a, _ := netip.AddrFromSlice(raw)
		return a.String()
	case nft.TypeProtocol:
		if p := netlink.ProtocolOf(raw[0]); p != "" {
			return p.Lower()
		}
		return fmt.Sprint(raw[0])
	case nft.TypeServicePort:
		return fmt.Sprint(binary.BigEndian.Uint16(raw))
	}
	return classID(binary.NativeEndian.Uint32(raw))
}

// Render returns the table of a family in the form of `nft list table`, in stable order, as input for `nft -f`. The map affinity is empty:
// rules fill it. How often the kernel collects its elements is left out, since nft takes that for sets only.
func Render(p *plan.Plan, f plan.Family, o Options) string {
	chains, elements, used := layoutOf(p, f, o).desired(p, func(*plan.ServicePort) written { return written{} })
	var out strings.Builder
	fmt.Fprintf(&out, "table %s %s {\n", nft.FamilyName(f), names.NFTables)
	order := slices.SortedFunc(maps.Keys(elements), compareIDs)
	for i, set := range o.sets(f) {
		n := slices.IndexFunc(order, func(x id) bool { return x.set != setID(i) })
		if n < 0 {
			n = len(order)
		}
		renderSet(&out, f, set, order[:n], elements)
		order = order[n:]
	}
	for _, c := range asInput(chains, used) {
		out.WriteString(chainText(c, "\t"))
	}
	out.WriteString("}\n")
	return out.String()
}

// asInput returns chains as nft can take them: no rule clears the priority. Those that only affinity needs are left out where no kind has
// it, as nft 1.0.6 aborts on their rules in family ip6.
func asInput(chains []nft.Chain, used map[kind]bool) []nft.Chain {
	remembers := false
	for k := range used {
		remembers = remembers || k.affinity > 0
	}
	var out []nft.Chain
	for _, c := range chains {
		if slices.ContainsFunc(ways, func(w way) bool { return !remembers && c.Name == w.chain(names.NFTChoice) }) {
			continue
		}
		c.Rules = slices.Clone(c.Rules)
		for i := range c.Rules {
			c.Rules[i].Text = strings.TrimPrefix(c.Rules[i].Text, clearing)
		}
		out = append(out, c)
	}
	return out
}

// chainText returns a chain in the form of `nft list chain`, each line indented.
func chainText(c nft.Chain, indent string) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%schain %s {\n", indent, c.Name)
	if c.Hook != nil {
		fmt.Fprintf(&out, "%s\ttype %s hook %s priority %d; policy accept;\n", indent, c.Hook.Type, c.Hook.Name, c.Hook.Priority)
	}
	for _, r := range c.Rules {
		fmt.Fprintf(&out, "%s\t%s", indent, r.Text)
		if r.Comment != "" {
			fmt.Fprintf(&out, " comment %q", r.Comment)
		}
		out.WriteString("\n")
	}
	out.WriteString(indent + "}\n")
	return out.String()
}

func renderSet(out *strings.Builder, f plan.Family, set nft.Set, order []id, elements map[id]value) {
	word, key, data, flags := "set", "type "+set.Key.String(), "", ""
	same := set.Name == names.NFTSame
	if same { // As input, no name of a type will do for a byte of any field.
		key = "typeof @nh,0,8 . @nh,0,8"
	}
	if set.Data != nil {
		word, data = "map", " : "+set.Data.String()
	}
	if set.Dynamic {
		flags = fmt.Sprintf(" flags dynamic,timeout; size %d;", set.Size)
	}
	if set.Counted {
		flags += " counter;"
	}
	fmt.Fprintf(out, "\t%s %s {\n\t\t%s%s;%s\n", word, set.Name, key, data, flags)
	if len(order) > 0 {
		out.WriteString("\t\telements = {\n")
		for _, i := range order {
			text := i.text(f)
			if same {
				text = fmt.Sprintf("%#x . %#x", i.key[0], i.key[4])
			}
			out.WriteString("\t\t\t" + text + elements[i].text(set) + ",\n")
		}
		out.WriteString("\t\t}\n")
	}
	out.WriteString("\t}\n")
}
