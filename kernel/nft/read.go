package nft

import (
	"errors"
	"fmt"
	"iter"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Content is what a table contains, except for elements.
type Content struct {
	// Dormant says that the kernel does not call the table's chains.
	Dormant bool
	// Sets has an entry for each set: whether it has the expected form.
	Sets map[string]bool
	// Counts is how many elements each set has, with those whose time is over and that the kernel has not removed yet. It is empty
	// where the kernel does not tell; Linux 6.18 does.
	Counts map[string]int
	Chains map[string]ChainContent
}

// ChainContent is what a chain contains.
type ChainContent struct {
	// Labels identify the rules, in order.
	Labels []string
	// Other says that the chain has another type, hook, priority or policy than expected.
	Other bool
}

// Holds reports whether a chain has the hook and the rules that it should have.
func (c ChainContent) Holds(want Chain) bool {
	if c.Other || len(c.Labels) != len(want.Rules) {
		return false
	}
	for i, l := range c.Labels {
		if l != string(want.label(i)) {
			return false
		}
	}
	return true
}

// Match returns, for each rule of the chain, the index of the rule that it is in want; -1 if it is none of those.
func (c ChainContent) Match(want Chain) []int {
	index := map[string]int{}
	for i := range want.Rules {
		index[string(want.label(i))] = i
	}
	var out []int
	for _, l := range c.Labels {
		if i, is := index[l]; is {
			out = append(out, i)
		} else {
			out = append(out, -1)
		}
	}
	return out
}

// Intact reports whether the table, which may be nil, has these sets and chains, no other chains, and is in force.
func (c *Content) Intact(sets []Set, chains []Chain) bool {
	if c == nil || c.Dormant || len(c.Chains) != len(chains) {
		return false
	}
	for _, s := range sets {
		if !c.Sets[s.Name] {
			return false
		}
	}
	for _, ch := range chains {
		if is, there := c.Chains[ch.Name]; !there || !is.Holds(ch) {
			return false
		}
	}
	return true
}

// Read reads a table, except for elements; it returns nil if the table does not exist. sets and chains are those expected in it.
func (c *Conn) Read(f plan.Family, table string, sets []Set, chains []Chain) (*Content, error) {
	var out *Content
	err := c.dump(f, table, unix.NFT_MSG_GETTABLE, nil, func() { out = nil }, func(attrs []byte) {
		out = &Content{Dormant: netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_TABLE_FLAGS))&unix.NFT_TABLE_F_DORMANT != 0}
	})
	if err != nil || out == nil {
		return nil, err
	}
	wantSets := map[string]Set{}
	for _, s := range sets {
		wantSets[s.Name] = s
	}
	err = c.dump(f, table, unix.NFT_MSG_GETSET, nil, func() { out.Sets, out.Counts = map[string]bool{}, map[string]int{} }, func(attrs []byte) {
		name := netlink.Text(netlink.Attribute(attrs, unix.NFTA_SET_NAME))
		want, known := wantSets[name]
		out.Sets[name] = known && want.is(attrs)
		if n := netlink.Attribute(attrs, setNumber); n != nil {
			out.Counts[name] = int(netlink.BigEndian(n))
		}
	})
	if err != nil {
		return nil, err
	}
	hooks := map[string]*Hook{}
	for _, ch := range chains {
		hooks[ch.Name] = ch.Hook
	}
	others := map[string]bool{}
	err = c.dump(f, table, unix.NFT_MSG_GETCHAIN, nil, func() { others = map[string]bool{} }, func(attrs []byte) {
		name := netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_NAME))
		others[name] = !hooks[name].is(attrs)
	})
	if err != nil {
		return nil, err
	}
	err = c.dump(f, table, unix.NFT_MSG_GETRULE, nil, func() {
		out.Chains = map[string]ChainContent{}
		for name, other := range others {
			out.Chains[name] = ChainContent{Other: other}
		}
	}, func(attrs []byte) {
		name := netlink.Text(netlink.Attribute(attrs, unix.NFTA_RULE_CHAIN))
		ch := out.Chains[name]
		ch.Labels = append(ch.Labels, string(userdataOf(netlink.Attribute(attrs, unix.NFTA_RULE_USERDATA), labelUserdata)))
		out.Chains[name] = ch
	})
	return out, err
}

// is reports whether the attributes of a set in the kernel describe s.
func (s Set) is(attrs []byte) bool {
	number := func(kind uint16) uint32 { return uint32(netlink.BigEndian(netlink.Attribute(attrs, kind))) }
	size := uint32(netlink.BigEndian(netlink.Attribute(netlink.Attribute(attrs, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE)))
	if number(unix.NFTA_SET_FLAGS) != s.flags() || number(unix.NFTA_SET_KEY_TYPE) != s.Key.number() ||
		number(unix.NFTA_SET_KEY_LEN) != uint32(s.Key.Length()) || size != s.Size ||
		number(unix.NFTA_SET_GC_INTERVAL) != uint32(s.Collect.Milliseconds()) {
		return false
	}
	if s.Counted && netlink.Attribute(attrs, setExpr) == nil {
		return false
	}
	return s.Data == nil || number(unix.NFTA_SET_DATA_TYPE) == s.dataType() &&
		(s.dataType() == verdictData || number(unix.NFTA_SET_DATA_LEN) == uint32(s.Data.Length()))
}

// is reports whether the attributes of a chain in the kernel describe one with this hook, or without one if h is nil.
func (h *Hook) is(attrs []byte) bool {
	raw := netlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK)
	if h == nil {
		return raw == nil
	}
	return raw != nil && netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_TYPE)) == h.Type &&
		uint32(netlink.BigEndian(netlink.Attribute(raw, unix.NFTA_HOOK_HOOKNUM))) == hookNumbers[h.Name] &&
		uint32(netlink.BigEndian(netlink.Attribute(raw, unix.NFTA_HOOK_PRIORITY))) == uint32(h.Priority) &&
		netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_CHAIN_POLICY)) == policyAccept
}

// Elements reads the elements of a set; there are none if the set does not exist. Soon after a set has grown, some may be missing or
// listed twice, while the kernel moves them to a larger hash table in the background.
func (c *Conn) Elements(f plan.Family, table string, s Set) ([]Element, error) {
	var out []Element
	name := func(b netlink.Buffer) netlink.Buffer { return b.Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name) }
	err := c.dump(f, table, unix.NFT_MSG_GETSETELEM, name, func() { out = out[:0] }, func(attrs []byte) {
		for _, raw := range netlink.Attributes(netlink.Attribute(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			out = append(out, parseElement(raw))
		}
	})
	return out, err
}

// Sample calls each with the elements of a set; it stops at the first error of each. If the set changes meanwhile, or has grown recently,
// some elements may be missing or listed twice.
func (c *Conn) Sample(f plan.Family, table string, s Set, each func(Element) error) error {
	body := netlink.Buffer{Protocol(f), 0, 0, 0}.Text(tableAttr, table).Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name)
	err := c.conn.Dump(netlink.Message{Type: getElements, Body: body}, func(body []byte) error {
		for _, raw := range listed(body) {
			if err := each(parseElement(raw)); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, netlink.ErrInterrupted) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading set %s of table %s %s of nftables: %w", s.Name, FamilyName(f), table, err)
	}
	return nil
}

// Element returns the element of a set that has the key of e, and whether there is one.
func (c *Conn) Element(f plan.Family, table string, s Set, e Element) (Element, bool, error) {
	body := netlink.Buffer{Protocol(f), 0, 0, 0}.Text(tableAttr, table).Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name).
		Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b netlink.Buffer) netlink.Buffer {
			return appendElement(b, Element{Key: e.Key, End: e.End}, false)
		})
	answer, err := c.conn.Ask(netlink.Message{Type: getElements, Body: body})
	if errors.Is(err, unix.ENOENT) {
		return Element{}, false, nil
	}
	if err != nil {
		return Element{}, false, fmt.Errorf("reading an element of set %s of nftables: %w", s.Name, err)
	}
	for _, raw := range listed(answer) {
		if got := parseElement(raw); got.Key == e.Key && got.End == e.End {
			return got, true, nil
		}
	}
	return Element{}, false, nil
}

const getElements = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETSETELEM

// listed returns the elements in a message.
func listed(body []byte) iter.Seq2[uint16, []byte] {
	return netlink.Attributes(netlink.Attribute(body[min(headerLen, len(body)):], unix.NFTA_SET_ELEM_LIST_ELEMENTS))
}

func parseElement(raw []byte) (e Element) {
	for kind, v := range netlink.Attributes(raw) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = string(netlink.Attribute(v, unix.NFTA_DATA_VALUE))
		case setElemKeyEnd:
			e.End = string(netlink.Attribute(v, unix.NFTA_DATA_VALUE))
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = string(netlink.Attribute(v, unix.NFTA_DATA_VALUE))
			if verdict := netlink.Attribute(v, unix.NFTA_DATA_VERDICT); verdict != nil {
				e.Chain = netlink.Text(netlink.Attribute(verdict, unix.NFTA_VERDICT_CHAIN))
			}
		case unix.NFTA_SET_ELEM_EXPR:
			e.Packets = netlink.BigEndian(netlink.Attribute(netlink.Attribute(v, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS))
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment = netlink.Text(userdataOf(v, commentUserdata))
		}
	}
	return e
}

// tableAttr is the type of the attribute with a table's name, in messages about any kind of object.
const tableAttr = unix.NFTA_RULE_TABLE

// headerLen is the length of struct nfgenmsg, which begins with the family.
const headerLen = 4

// dump calls each with the attributes of every object of one kind in a table, or with an empty name in all tables. If objects change
// meanwhile, it calls reset and starts again.
func (c *Conn) dump(f plan.Family, table string, get uint16, more func(netlink.Buffer) netlink.Buffer, reset func(), each func(attrs []byte)) error {
	body := netlink.Buffer{Protocol(f), 0, 0, 0}
	if get != unix.NFT_MSG_GETTABLE { // Old kernels do not list tables by name.
		body = body.Text(tableAttr, table)
	}
	if more != nil {
		body = more(body)
	}
	err := netlink.Retry(func() error {
		reset()
		return c.conn.Dump(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | get, Body: body}, func(body []byte) error {
			attrs := body[min(headerLen, len(body)):]
			if table == "" || netlink.Text(netlink.Attribute(attrs, tableAttr)) == table {
				each(attrs)
			}
			return nil
		})
	})
	if errors.Is(err, unix.ENOENT) {
		reset()
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading table %s %s of nftables: %w", FamilyName(f), table, absent(err))
	}
	return nil
}
