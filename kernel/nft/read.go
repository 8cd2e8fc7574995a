package nft

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Content is what a table has besides elements.
type Content struct {
	// Dormant is set where the table's chains are not called.
	Dormant bool
	// Sets has the names of the sets, and whether each is as the one of that name that was asked for.
	Sets map[string]bool
	// Chains has the rules of each chain by their labels; a chain that was asked for with another hook has Other set.
	Chains map[string]ChainContent
}

// ChainContent is what a chain has.
type ChainContent struct {
	Labels []string
	// Other is set where the chain has another type, hook or priority than asked for.
	Other bool
}

// Label identifies a rule: each carries its label in the kernel.
func (c ChainSpec) Label(i int) []byte {
	hook := ""
	if c.Hook != nil {
		hook = fmt.Sprint(*c.Hook)
	}
	return Chain{Name: c.Name, Hook: hook, Rules: c.Rules}.label(i)
}

// Holds reports whether the chain is in the kernel as it should be.
func (c ChainContent) Holds(want ChainSpec) bool {
	if c.Other || len(c.Labels) != len(want.Rules) {
		return false
	}
	for i, l := range c.Labels {
		if l != string(want.Label(i)) {
			return false
		}
	}
	return true
}

// Read reads what a table has besides elements; nil if there is no such table. sets and chains are what is expected there.
func (c *Conn) Read(f plan.Family, table string, sets []Set, chains []ChainSpec) (*Content, error) {
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
	err = c.dump(f, table, unix.NFT_MSG_GETSET, nil, func() { out.Sets = map[string]bool{} }, func(attrs []byte) {
		name := netlink.Text(netlink.Attribute(attrs, unix.NFTA_SET_NAME))
		want, known := wantSets[name]
		out.Sets[name] = known && want.is(attrs)
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

// is reports whether the attributes of a set in the kernel are those of s.
func (s Set) is(attrs []byte) bool {
	number := func(kind uint16) uint32 { return uint32(netlink.BigEndian(netlink.Attribute(attrs, kind))) }
	size := uint32(netlink.BigEndian(netlink.Attribute(netlink.Attribute(attrs, unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE)))
	if number(unix.NFTA_SET_FLAGS) != s.flags() || number(unix.NFTA_SET_KEY_TYPE) != s.Key.number() ||
		number(unix.NFTA_SET_KEY_LEN) != uint32(s.Key.Length()) || size != s.Size {
		return false
	}
	return s.Data == nil || number(unix.NFTA_SET_DATA_TYPE) == s.dataType() &&
		(s.dataType() == verdictData || number(unix.NFTA_SET_DATA_LEN) == uint32(s.Data.Length()))
}

// is reports whether the attributes of a chain in the kernel are those of one with this hook, or none.
func (h *Hook) is(attrs []byte) bool {
	raw := netlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK)
	if h == nil {
		return raw == nil
	}
	return raw != nil && netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_TYPE)) == h.Type &&
		uint32(netlink.BigEndian(netlink.Attribute(raw, unix.NFTA_HOOK_HOOKNUM))) == h.Number &&
		uint32(netlink.BigEndian(netlink.Attribute(raw, unix.NFTA_HOOK_PRIORITY))) == uint32(h.Priority) &&
		netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_CHAIN_POLICY)) == policyAccept
}

// Elements reads the elements of a set; none of a set that is not there. Soon after a set has grown, some may be left out, and some be
// there twice: the kernel spreads them over a larger table beside everything else.
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
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment = netlink.Text(userdataOf(v, commentUserdata))
		}
	}
	return e
}

// dump calls each with the attributes of all that a table has of one kind. It begins anew, with reset, when that changes meanwhile.
func (c *Conn) dump(f plan.Family, table string, get uint16, more func(netlink.Buffer) netlink.Buffer, reset func(), each func(attrs []byte)) error {
	const headerLen = 4
	body := netlink.Buffer{Protocol(f), 0, 0, 0}
	if get != unix.NFT_MSG_GETTABLE { // A dump of tables with a name is not known to old kernels.
		body = body.Text(tableAttr, table)
	}
	if more != nil {
		body = more(body)
	}
	err := netlink.Retry(func() error {
		reset()
		return c.conn.Dump(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | get, Body: body}, func(body []byte) error {
			attrs := body[min(headerLen, len(body)):]
			if netlink.Text(netlink.Attribute(attrs, tableAttr)) == table {
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
