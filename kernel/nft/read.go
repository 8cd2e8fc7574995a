package nft

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Content is what a table contains, except for elements.
type Content struct {
	// Dormant says that the kernel does not call the table's chains.
	Dormant bool
	// Sets has an entry for each set that has a name of its own: whether it has the expected form.
	Sets map[string]bool
	// Counts is how many elements each of them has, with those whose time is over and that the kernel has not removed yet. It is empty
	// where the kernel does not tell; Linux 6.18 does.
	Counts  map[string]int
	Chains  map[string]ChainContent
	Objects []Object
}

// Object is a flowtable or a stateful object of a table. This program has none.
type Object struct {
	Name string
	// Type is the kernel's number of a type of stateful object; 0 for a flowtable.
	Type uint32
}

var objectTypes = map[uint32]string{0: "flowtable", unix.NFT_OBJECT_COUNTER: "counter", unix.NFT_OBJECT_QUOTA: "quota",
	unix.NFT_OBJECT_CT_HELPER: "ct helper", unix.NFT_OBJECT_LIMIT: "limit", unix.NFT_OBJECT_TUNNEL: "tunnel",
	unix.NFT_OBJECT_CT_TIMEOUT: "ct timeout", unix.NFT_OBJECT_SECMARK: "secmark", unix.NFT_OBJECT_CT_EXPECT: "ct expectation",
	unix.NFT_OBJECT_SYNPROXY: "synproxy"}

// String is such as "counter incoming".
func (o Object) String() string {
	if word := objectTypes[o.Type]; word != "" {
		return word + " " + o.Name
	}
	return fmt.Sprintf("object %s of type %d", o.Name, o.Type)
}

// ChainContent is what a chain contains.
type ChainContent struct {
	// Labels identify the rules, in order.
	Labels []string
	// Other says that the chain has another type, hook, priority or policy than expected.
	Other bool
	// Base says that it has a hook, where the kernel calls it.
	Base bool
}

// Holds reports whether a chain has the hook and the rules that it should have.
func (c ChainContent) Holds(want Chain) bool {
	return !c.Other && slices.Equal(c.Labels, want.labels())
}

// Match returns, for each rule of the chain, the index of the rule that it is in want; -1 if it is none of those.
func (c ChainContent) Match(want Chain) (out []int) {
	labels := want.labels()
	for _, l := range c.Labels {
		out = append(out, slices.Index(labels, l))
	}
	return out
}

// Intact reports whether the table, which may be nil, has these sets and chains, nothing else, and is in force.
func (c *Content) Intact(sets []Set, chains []Chain) bool {
	if c == nil || c.Dormant || len(c.Chains) != len(chains) || len(c.Sets) != len(sets) || len(c.Objects) > 0 {
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
	out, err := c.table(f, table)
	if err != nil || out == nil {
		return nil, err
	}
	wantSets := map[string]Set{}
	for _, s := range sets {
		wantSets[s.Name] = s
	}
	err = c.dump(f, table, unix.NFT_MSG_GETSET, nil, func() { out.Sets, out.Counts = map[string]bool{}, map[string]int{} }, func(attrs []byte) {
		if netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_SET_FLAGS))&unix.NFT_SET_ANONYMOUS != 0 { // It is a part of a rule.
			return
		}
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
	for _, kind := range []uint16{unix.NFT_MSG_GETFLOWTABLE, unix.NFT_MSG_GETOBJ} {
		before := len(out.Objects)
		err := c.dump(f, table, kind, nil, func() { out.Objects = out.Objects[:before] }, func(attrs []byte) {
			o := Object{Name: netlink.Text(netlink.Attribute(attrs, unix.NFTA_OBJ_NAME))}
			if kind == unix.NFT_MSG_GETOBJ {
				o.Type = uint32(netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_OBJ_TYPE)))
			}
			out.Objects = append(out.Objects, o)
		})
		if err != nil {
			return nil, err
		}
	}
	out.Chains, err = c.chains(f, table, chains)
	return out, err
}

// table reads what a table is like; nil if it does not exist.
func (c *Conn) table(f plan.Family, table string) (*Content, error) {
	answer, err := c.conn.Ask(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE,
		Body: netlink.Buffer{Protocol(f), 0, 0, 0}.Text(tableAttr, table)})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, reading(f, table, err)
	}
	flags := netlink.BigEndian(netlink.Attribute(answer[min(headerLen, len(answer)):], unix.NFTA_TABLE_FLAGS))
	return &Content{Dormant: flags&unix.NFT_TABLE_F_DORMANT != 0}, nil
}

// chains reads the chains of a table, and their rules. want are those expected in it.
func (c *Conn) chains(f plan.Family, table string, want []Chain) (map[string]ChainContent, error) {
	hooks := map[string]*Hook{}
	for _, ch := range want {
		hooks[ch.Name] = ch.Hook
	}
	empty, parts := map[string]ChainContent{}, map[string]bool{} // parts are chains without a name of their own, each of which goes with its rule
	// The kernel counts the chains of all tables, so one of ours may be left out, or listed twice, where others come and go meanwhile. Then
	// all listings together count. A chain that is in none of them is found by its rules.
	err := c.dump(f, table, unix.NFT_MSG_GETCHAIN, nil, func() {}, func(attrs []byte) {
		name := netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_NAME))
		if netlink.BigEndian(netlink.Attribute(attrs, chainFlags))&chainBinding != 0 {
			parts[name] = true
			return
		}
		empty[name] = ChainContent{Other: !hooks[name].is(attrs), Base: netlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK) != nil}
	})
	if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
		return nil, err
	}
	var out map[string]ChainContent
	err = c.dump(f, table, unix.NFT_MSG_GETRULE, nil, func() { out = maps.Clone(empty) }, func(attrs []byte) {
		name := netlink.Text(netlink.Attribute(attrs, unix.NFTA_RULE_CHAIN))
		if parts[name] {
			return
		}
		ch := out[name]
		ch.Labels = append(ch.Labels, string(userdataOf(netlink.Attribute(attrs, unix.NFTA_RULE_USERDATA), labelUserdata)))
		out[name] = ch
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
	each := netlink.Attribute(attrs, setExpr)
	if s.Counted && each == nil || each != nil && !isCounter(each) || netlink.Attribute(attrs, setExprs) != nil {
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

// Elements reads the elements of a set, as Sample does; there are none if the set does not exist.
func (c *Conn) Elements(f plan.Family, table string, s Set) ([]Element, error) {
	var out []Element
	err := c.Sample(f, table, s, func(e Element) error {
		out = append(out, e)
		return nil
	})
	return out, err
}

// Sample calls each with the elements of a set; it stops at the first error of each. If the set changes meanwhile, some elements may be
// missing or listed twice, and so they may soon after it has grown, while the kernel moves them to a larger hash table in the background.
// The kernel also calls a listing interrupted if any other table has changed, which does no harm; so it is not begun again.
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

// ElementKey is the key of an element in one of a table's sets. Without a Key, it stands for the catch-all element.
type ElementKey struct{ Set, Key string }

// Element returns the element of a set that has the key of e, and whether there is one.
func (c *Conn) Element(f plan.Family, table string, s Set, e Element) (Element, bool, error) {
	var out Element
	var found bool
	err := c.Find(f, table, []ElementKey{{s.Name, e.Key}}, func(_ int, el Element, is bool) error {
		out, found = el, is
		return nil
	})
	return out, found, err
}

// Find looks for elements by their keys, and calls each, in order, with the index of a key, the element that has it, and whether there is one.
// It stops at the first error of each. Other than a listing, it finds every element that is there all the while, and its time is proportional
// to the number of keys.
func (c *Conn) Find(f plan.Family, table string, keys []ElementKey, each func(i int, e Element, is bool) error) error {
	i := 0
	var stopped error
	next := func(answer []byte) error {
		e, is := Element{}, false
		for _, raw := range listed(answer) {
			if got := parseElement(raw); got.Key == keys[i].Key {
				e, is = got, true
			}
		}
		i++
		stopped = each(i-1, e, is)
		return stopped
	}
	for i < len(keys) {
		some := keys[i:min(i+netlink.AskedAtOnce, len(keys))]
		if other := slices.IndexFunc(some, func(k ElementKey) bool { return k.Set != some[0].Set }); other > 0 {
			some = some[:other]
		}
		end := i + len(some)
		// One request for all of them takes less time than one for each. But the kernel stops at the first that is not there.
		err := c.conn.AskFor(question(f, table, some), len(some), next)
		if errors.Is(err, unix.ENOENT) && stopped == nil {
			var single []netlink.Message
			for n := range keys[i:end] {
				single = append(single, question(f, table, keys[i+n:][:1]))
			}
			err = c.conn.AskAll(single, func(_ int, answer []byte, err error) error {
				if err != nil && !errors.Is(err, unix.ENOENT) {
					return err
				}
				return next(answer)
			})
		}
		if stopped != nil {
			return stopped
		}
		if err != nil {
			return fmt.Errorf("reading elements of set %s of nftables: %w", some[0].Set, err)
		}
	}
	return nil
}

// question asks for elements of one set.
func question(f plan.Family, table string, keys []ElementKey) netlink.Message {
	return netlink.Message{Type: getElements, Body: netlink.Buffer{Protocol(f), 0, 0, 0}.Text(tableAttr, table).
		Text(unix.NFTA_SET_ELEM_LIST_SET, keys[0].Set).
		Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b netlink.Buffer) netlink.Buffer {
			for _, k := range keys {
				b = appendElement(b, Element{Key: k.Key}, false)
			}
			return b
		})}
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
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = string(netlink.Attribute(v, unix.NFTA_DATA_VALUE))
			if verdict := netlink.Attribute(v, unix.NFTA_DATA_VERDICT); verdict != nil {
				e.parseVerdict(verdict)
			}
		case unix.NFTA_SET_ELEM_EXPR:
			e.parseExpr(v)
		case setElemExprs:
			for _, one := range netlink.Attributes(v) {
				e.parseExpr(one)
			}
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment = netlink.Text(userdataOf(v, commentUserdata))
		case unix.NFTA_SET_ELEM_TIMEOUT:
			e.has("timeout")
		case unix.NFTA_SET_ELEM_OBJREF:
			e.has("object " + netlink.Text(v))
		case unix.NFTA_SET_ELEM_FLAGS: // Of a catch-all element, it is its having no key that counts.
			if flags := netlink.BigEndian(v) &^ catchAll; flags != 0 {
				e.has(fmt.Sprintf("flags %#x", flags))
			}
		}
	}
	return e
}

// has adds to what only other programs write.
func (e *Element) has(what string) {
	if e.Other != "" {
		e.Other += ", "
	}
	e.Other += what
}

var verdictNames = map[expr.VerdictKind]string{
	expr.VerdictJump: "jump ", expr.VerdictReturn: "return", expr.VerdictDrop: "drop", expr.VerdictAccept: "accept",
}

func (e *Element) parseVerdict(v []byte) {
	kind := expr.VerdictKind(int32(netlink.BigEndian(netlink.Attribute(v, unix.NFTA_VERDICT_CODE))))
	chain := netlink.Text(netlink.Attribute(v, unix.NFTA_VERDICT_CHAIN))
	switch name, known := verdictNames[kind]; {
	case kind == expr.VerdictGoto:
		e.Chain = chain
	case known:
		e.has(name + chain)
	default:
		e.has(fmt.Sprintf("verdict %d", kind))
	}
}

func (e *Element) parseExpr(v []byte) {
	if isCounter(v) {
		e.Packets = netlink.BigEndian(netlink.Attribute(netlink.Attribute(v, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS))
		return
	}
	e.has(netlink.Text(netlink.Attribute(v, unix.NFTA_EXPR_NAME)))
}

// isCounter reports whether an expression is a counter, which changes nothing for a packet.
func isCounter(expr []byte) bool {
	return string(bytes.TrimRight(netlink.Attribute(expr, unix.NFTA_EXPR_NAME), "\x00")) == "counter"
}

// tableAttr is the type of the attribute with a table's name, in messages about any kind of object.
const tableAttr = unix.NFTA_RULE_TABLE

// headerLen is the length of struct nfgenmsg, which begins with the family.
const headerLen = 4

// mostDumps bounds how often objects are listed that change meanwhile.
const mostDumps = 50

// dump calls each with the attributes of every object of one kind in a table, or with an empty name in all tables. If objects change
// meanwhile, it calls reset and starts again, up to a limit.
//
// Any transaction in the network namespace interrupts a listing, also one in a table that is not listed. Where other programs commit some
// hundred a second, a long listing is always interrupted. So one that is the same as the one before will do: nothing has changed in it.
func (c *Conn) dump(f plan.Family, table string, get uint16, more func(netlink.Buffer) netlink.Buffer, reset func(), each func(attrs []byte)) error {
	body := netlink.Buffer{Protocol(f), 0, 0, 0}
	if get != unix.NFT_MSG_GETTABLE { // Old kernels do not list tables by name.
		body = body.Text(tableAttr, table)
	}
	if more != nil {
		body = more(body)
	}
	var err error
	var listed maphash.Hash
	for n, before := 0, uint64(0); n < mostDumps; n++ {
		reset()
		listed.Reset()
		err = c.conn.Dump(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | get, Body: body}, func(body []byte) error {
			attrs := body[min(headerLen, len(body)):]
			if table == "" || netlink.Text(netlink.Attribute(attrs, tableAttr)) == table {
				_, _ = listed.Write(attrs)
				each(attrs)
			}
			return nil
		})
		if !errors.Is(err, netlink.ErrInterrupted) {
			break
		}
		same := n > 0 && listed.Sum64() == before
		if before = listed.Sum64(); same {
			err = nil
			break
		}
	}
	if errors.Is(err, unix.ENOENT) {
		reset()
		return nil
	}
	if err != nil {
		return reading(f, table, err)
	}
	return nil
}

func reading(f plan.Family, table string, err error) error {
	return fmt.Errorf("reading table %s %s of nftables: %w", FamilyName(f), table, absent(err))
}
