package nfttest

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// dump is a listing that is under way.
type dump struct {
	message
	at         int // how many have been listed
	generation uint32
	changed    bool // since it began

	// What there is to list, as of a generation.
	listed *listing
}

type listing struct {
	generation uint32
	kind       uint16
	things     [][]byte
	no         unix.Errno
}

// mostInPart is how many things a part of a listing has at most, and partBytes about how many bytes. The kernel has no bound of the former.
const mostInPart, partBytes = 100, 30000

// ask answers a question, or begins to. The Kernel must be locked.
func (s *socket) ask(m message) {
	if s.lost = s.lost || s.suffers(Unreadable); s.lost {
		return
	}
	if m.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
		s.dump = &dump{message: m, generation: s.generation}
		return
	}
	t := s.table(m.body[0], m.text(tableAttr))
	switch {
	case m.kind() == unix.NFT_MSG_GETGEN:
		s.answer(m, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN, 0, netlink.Buffer{0, 0, 0, 0}.BigEndian32(unix.NFTA_GEN_ID, s.generation+1))
	case t == nil:
		s.outcome(m, unix.ENOENT, -1)
	case m.kind() == unix.NFT_MSG_GETTABLE:
		s.answer(m, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, 0, t.describe())
	case m.kind() == unix.NFT_MSG_GETSETELEM:
		s.find(m, t)
	default:
		s.outcome(m, unix.EOPNOTSUPP, -1)
	}
}

func (t *table) begin() netlink.Buffer { return netlink.Buffer{t.protocol, 0, 0, 0} }

func (t *table) describe() netlink.Buffer {
	return t.begin().Text(unix.NFTA_TABLE_NAME, t.name).BigEndian32(unix.NFTA_TABLE_FLAGS, t.flags)
}

// find answers with each element that is asked for, up to the first that is not there.
func (s *socket) find(m message, t *table) {
	in := t.set(m.text(unix.NFTA_SET_ELEM_LIST_SET))
	if in == nil {
		s.outcome(m, unix.ENOENT, -1)
		return
	}
	for _, raw := range netlink.Attributes(m.attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		key, no := in.keyOf(raw)
		e := in.elements[key]
		if no == 0 && e == nil {
			no = unix.ENOENT
		}
		if no != 0 {
			s.outcome(m, no, -1)
			return
		}
		s.answer(m, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM, 0, t.listed(in, []*element{e}))
	}
}

func (t *table) listed(s *set, list []*element) netlink.Buffer {
	return t.begin().Text(tableAttr, t.name).Text(unix.NFTA_SET_ELEM_LIST_SET, s.name).
		Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b netlink.Buffer) netlink.Buffer {
			for _, e := range list {
				b = b.Nest(exprListed, func(b netlink.Buffer) netlink.Buffer { return append(b, e.attrs...) })
			}
			return b
		})
}

// part answers with the next part of a listing. As in the kernel, it goes on after as many things as have been listed, whatever they are now.
func (s *socket) part() {
	d := s.dump
	if s.suffers(Busy) {
		s.generation++
	}
	d.changed = d.changed || d.generation != s.generation
	flags := uint16(unix.NLM_F_MULTI)
	if d.changed {
		flags |= unix.NLM_F_DUMP_INTR
	}
	if d.listed == nil || d.listed.generation != s.generation {
		d.listed = &listing{generation: s.generation}
		d.listed.kind, d.listed.things, d.listed.no = s.list(d.message)
	}
	list := d.listed.things[min(d.at, len(d.listed.things)):]
	if no := d.listed.no; no != 0 || len(list) == 0 {
		s.dump = nil
		s.answer(d.message, unix.NLMSG_DONE, flags, binary.NativeEndian.AppendUint32(nil, uint32(-int32(no))))
		return
	}
	list = list[:min(mostInPart, len(list))]
	for size, i := 0, 0; i < len(list); i++ {
		if size += len(list[i]); size > partBytes {
			list = list[:i]
		}
	}
	d.at += len(list)
	if d.listed.kind == unix.NFT_MSG_NEWSETELEM {
		t := s.table(d.body[0], d.text(tableAttr))
		in := t.set(d.text(unix.NFTA_SET_ELEM_LIST_SET))
		var elements []*element
		for _, key := range list {
			elements = append(elements, in.elements[string(key)])
		}
		list = [][]byte{t.listed(in, elements)}
	}
	out := make([]byte, 0, 2*partBytes)
	for _, body := range list {
		out = netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | d.listed.kind, Flags: flags, Body: body}.Append(out, d.Seq)
	}
	s.answers = append(s.answers, out)
}

// list returns the things that a listing is of, in order: the bodies of their messages, or the keys of elements.
func (k *Kernel) list(m message) (kind uint16, list [][]byte, no unix.Errno) {
	name := m.text(tableAttr)
	if t := k.table(m.body[0], name); t == nil && name != "" && m.kind() != unix.NFT_MSG_GETRULE && m.kind() != unix.NFT_MSG_GETCHAIN {
		return 0, nil, unix.ENOENT
	}
	for _, t := range k.tables {
		if t.protocol != m.body[0] {
			continue
		}
		switch m.kind() {
		case unix.NFT_MSG_GETTABLE:
			kind, list = unix.NFT_MSG_NEWTABLE, append(list, t.describe())
			continue
		case unix.NFT_MSG_GETCHAIN: // of all tables
			kind = unix.NFT_MSG_NEWCHAIN
			for _, c := range t.chains {
				list = append(list, append(t.begin(), c.attrs...))
			}
			continue
		}
		if t.name != name {
			continue
		}
		switch m.kind() {
		case unix.NFT_MSG_GETSET:
			kind = unix.NFT_MSG_NEWSET
			for _, s := range t.sets {
				list = append(list, append(t.begin(), s.attrs...).BigEndian32(numberAttr, uint32(s.count())))
			}
		case unix.NFT_MSG_GETRULE:
			kind = unix.NFT_MSG_NEWRULE
			of := m.text(unix.NFTA_RULE_CHAIN)
			for _, c := range t.chains {
				for _, r := range c.rules {
					if of == "" || of == c.name {
						list = append(list, append(t.begin(), r.attrs...))
					}
				}
			}
		case unix.NFT_MSG_GETSETELEM:
			kind = unix.NFT_MSG_NEWSETELEM
			s := t.set(m.text(unix.NFTA_SET_ELEM_LIST_SET))
			if s == nil {
				return 0, nil, unix.ENOENT
			}
			for _, key := range slices.Sorted(maps.Keys(s.elements)) {
				list = append(list, []byte(key))
			}
		case unix.NFT_MSG_GETOBJ, unix.NFT_MSG_GETFLOWTABLE: // There are none.
		default:
			return 0, nil, unix.EOPNOTSUPP
		}
	}
	return kind, list, 0
}

// Others returns all tables of a family but those of a name, as text. The Kernel must be locked.
func (k *Kernel) Others(f plan.Family, name string) string {
	var out strings.Builder
	for _, t := range k.tables {
		if t.protocol != nft.Protocol(f) || t.name == name {
			continue
		}
		fmt.Fprintf(&out, "table %s %#x\n", t.name, t.flags)
		for _, s := range t.sets {
			fmt.Fprintf(&out, "set %x\n", s.attrs)
			for _, key := range slices.Sorted(maps.Keys(s.elements)) {
				fmt.Fprintf(&out, "%x\n", s.elements[key].attrs)
			}
		}
		for _, c := range t.chains {
			fmt.Fprintf(&out, "chain %x\n", c.attrs)
			for _, r := range c.rules {
				fmt.Fprintf(&out, "%x\n", r.attrs)
			}
		}
	}
	return out.String()
}

// Chain is a chain as it was read, with the handles of its rules.
type Chain struct {
	nft.Chain
	Handles []uint64
}

// Chains returns the chains of a table, in the order in which they were made. Its rules have no text. The Kernel must be locked.
func (k *Kernel) Chains(f plan.Family, name string) (out []Chain, err error) {
	t := k.table(nft.Protocol(f), name)
	if t == nil || t.flags&unix.NFT_TABLE_F_DORMANT != 0 {
		return nil, nil
	}
	for _, c := range t.chains {
		ch := Chain{Chain: nft.Chain{Name: c.name}}
		if c.hook != nil {
			ch.Hook = &nft.Hook{Type: netlink.Text(netlink.Attribute(c.attrs, unix.NFTA_CHAIN_TYPE)),
				Name:     hookNames[netlink.BigEndian(netlink.Attribute(c.hook, unix.NFTA_HOOK_HOOKNUM))],
				Priority: int32(netlink.BigEndian(netlink.Attribute(c.hook, unix.NFTA_HOOK_PRIORITY)))}
		}
		for _, r := range c.rules {
			if r.read == nil {
				exprs, err := exprsOf(f, netlink.Attribute(r.attrs, unix.NFTA_RULE_EXPRESSIONS))
				if err != nil {
					return nil, fmt.Errorf("chain %s: %w", c.name, err)
				}
				r.read = &nft.Rule{Text: fmt.Sprintf("%s rule %d", c.name, r.handle), Exprs: exprs}
			}
			ch.Rules, ch.Handles = append(ch.Rules, *r.read), append(ch.Handles, r.handle)
		}
		out = append(out, ch)
	}
	return out, nil
}

// Elements returns the elements of a table by the names of its sets. The Kernel must be locked.
func (k *Kernel) Elements(f plan.Family, name string) (map[string][]nft.Element, error) {
	t := k.table(nft.Protocol(f), name)
	if t == nil {
		return nil, nil
	}
	from, out := nft.NewConn(&socket{Process: k.Still().Start()}), map[string][]nft.Element{}
	for _, s := range t.sets {
		for _, e := range s.elements {
			if e.read != nil {
				continue
			}
			list, err := from.Elements(f, name, nft.Set{Name: s.name})
			if err != nil {
				return nil, err
			}
			for _, read := range list {
				s.elements[read.Key].read = &read
			}
		}
		for _, key := range slices.Sorted(maps.Keys(s.elements)) {
			out[s.name] = append(out[s.name], *s.elements[key].read)
		}
	}
	return out, nil
}

var hookNames = map[uint64]string{unix.NF_INET_PRE_ROUTING: "prerouting", unix.NF_INET_LOCAL_IN: "input", unix.NF_INET_FORWARD: "forward",
	unix.NF_INET_LOCAL_OUT: "output", unix.NF_INET_POST_ROUTING: "postrouting"}

// exprsOf reads a list of expressions.
func exprsOf(f plan.Family, list []byte) (out []expr.Any, err error) {
	for _, raw := range netlink.Attributes(list) {
		name, data := netlink.Text(netlink.Attribute(raw, unix.NFTA_EXPR_NAME)), netlink.Attribute(raw, unix.NFTA_EXPR_DATA)
		var e expr.Any
		switch name {
		case "payload":
			e = &expr.Payload{}
		case "meta":
			e = &expr.Meta{}
		case "immediate":
			e = &expr.Immediate{}
			if netlink.BigEndian(netlink.Attribute(data, unix.NFTA_IMMEDIATE_DREG)) == unix.NFT_REG_VERDICT {
				e = &expr.Verdict{}
			}
		case "bitwise":
			e = &expr.Bitwise{}
		case "cmp":
			e = &expr.Cmp{}
		case "fib":
			e = &expr.Fib{}
		case "ct":
			e = &expr.Ct{}
		case "hash":
			e = &expr.Hash{}
		case "numgen":
			e = &expr.Numgen{}
		case "lookup":
			e = &expr.Lookup{}
		case "dynset":
			e = &expr.Dynset{}
		case "nat":
			e = &expr.NAT{}
		case "masq":
			e = &expr.Masq{}
		case "reject":
			e = &expr.Reject{}
		default:
			return nil, fmt.Errorf("expression %q is not known", name)
		}
		if err := expr.Unmarshal(nft.Protocol(f), data, e); err != nil {
			return nil, fmt.Errorf("expression %s: %w", name, err)
		}
		out = append(out, e)
	}
	return out, nil
}
