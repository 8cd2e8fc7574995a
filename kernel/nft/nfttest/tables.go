package nfttest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
)

type table struct {
	protocol byte
	name     string
	flags    uint32
	sets     []*set
	chains   []*chain
}

type set struct {
	name                string
	attrs               netlink.Buffer // as answers have them
	keyBytes, dataBytes int            // dataBytes is -1 where there are no data
	verdicts            bool
	size                int
	elements            map[string]*element
}

type element struct {
	key, data, chain string
	attrs            netlink.Buffer
	read             *nft.Element // decoded, once Elements has done so
}

type chain struct {
	name  string
	attrs netlink.Buffer
	hook  []byte // nil without one
	rules []*rule
}

type rule struct {
	handle uint64
	attrs  netlink.Buffer
	chains []string  // that it leads to
	sets   []string  // that it looks up
	maps   []string  // of those, the maps whose verdicts it takes
	hooks  []uint64  // those at which its expressions work, all of which are to translate; nil for any
	read   *nft.Rule // decoded, once Chains has done so
}

func (m message) kind() uint16 { return m.Type & 0xff }

func (m message) attr(kind uint16) []byte { return netlink.Attribute(m.body[headerBytes:], kind) }

func (m message) text(kind uint16) string { return netlink.Text(m.attr(kind)) }

const (
	headerBytes = 4 // of struct nfgenmsg
	tableAttr   = unix.NFTA_RULE_TABLE
	numberAttr  = 20 // NFTA_SET_NELEMS
	exprListed  = 1  // NFTA_LIST_ELEM
	verdictType = 0xffffff00
)

// refusal is an error, and where in the body of the message it is; -1 where the kernel does not say.
type refusal struct {
	no unix.Errno
	at int
}

func refused(no unix.Errno) *refusal { return &refusal{no, -1} }

// transaction is one that is being carried out.
type transaction struct {
	kernel  *Kernel
	undo    []func()
	changes []message
	touched map[byte]map[string]bool // tables, by family
	leads   *message                 // the last that may lead to a chain
}

func (t *transaction) did(m message, undo func()) {
	t.undo = append(t.undo, undo)
	t.changes = append(t.changes, message{netlink.Header{Type: m.Type}, m.body})
	if t.touched[m.body[0]] == nil {
		t.touched[m.body[0]] = map[string]bool{}
	}
	t.touched[m.body[0]][m.text(tableAttr)] = true
}

// input is what has changed something, as text.
func (t *transaction) input() string {
	var out strings.Builder
	for i, m := range t.changes {
		if i == 0 || &m.body[0] != &t.changes[i-1].body[0] { // One message may be many changes.
			fmt.Fprintf(&out, "%d %q\n", m.kind(), m.body)
		}
	}
	return out.String()
}

// adds reports whether something is added.
func (t *transaction) adds() bool {
	added := []uint16{unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_NEWSET, unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_NEWRULE, unix.NFT_MSG_NEWSETELEM}
	return slices.ContainsFunc(t.changes, func(m message) bool { return slices.Contains(added, m.kind()) })
}

// put changes something, which is taken back if the transaction fails.
func put[T any](t *transaction, m message, to *T, now T) {
	was := *to
	*to = now
	t.did(m, func() { *to = was })
}

func (k *Kernel) table(protocol byte, name string) *table {
	i := slices.IndexFunc(k.tables, func(t *table) bool { return t.protocol == protocol && t.name == name })
	if i < 0 {
		return nil
	}
	return k.tables[i]
}

func (t *table) set(name string) *set {
	i := slices.IndexFunc(t.sets, func(s *set) bool { return s.name == name })
	if i < 0 {
		return nil
	}
	return t.sets[i]
}

func (t *table) chain(name string) *chain {
	i := slices.IndexFunc(t.chains, func(c *chain) bool { return c.name == name })
	if i < 0 {
		return nil
	}
	return t.chains[i]
}

// plus and less return another slice, as undo has the old one.
func plus[T any](list []T, one T) []T { return append(slices.Clip(list), one) }

func less[T comparable](list []T, one T) []T {
	return slices.DeleteFunc(slices.Clone(list), func(other T) bool { return other == one })
}

// carryOut carries out one message.
func (t *transaction) carryOut(m message) *refusal {
	if len(m.body) < headerBytes || !netlink.Whole(m.body[headerBytes:]) {
		return refused(unix.EINVAL)
	}
	tbl, create := t.kernel.table(m.body[0], m.text(tableAttr)), m.Flags&unix.NLM_F_CREATE != 0
	if m.kind() == unix.NFT_MSG_NEWTABLE {
		switch {
		case tbl != nil && m.Flags&unix.NLM_F_EXCL != 0:
			return refused(unix.EEXIST)
		case tbl == nil:
			put(t, m, &t.kernel.tables, plus(t.kernel.tables, &table{protocol: m.body[0], name: m.text(tableAttr)}))
		case m.attr(unix.NFTA_TABLE_FLAGS) != nil:
			put(t, m, &tbl.flags, uint32(netlink.BigEndian(m.attr(unix.NFTA_TABLE_FLAGS))))
		}
		return nil
	}
	if tbl == nil {
		return refused(unix.ENOENT)
	}
	switch m.kind() {
	case unix.NFT_MSG_DELTABLE:
		put(t, m, &t.kernel.tables, less(t.kernel.tables, tbl))
		return nil
	case unix.NFT_MSG_NEWSET:
		return t.newSet(m, tbl)
	case unix.NFT_MSG_DELSET:
		return t.deleteSet(m, tbl)
	case unix.NFT_MSG_NEWCHAIN:
		return t.newChain(m, tbl)
	case unix.NFT_MSG_DELCHAIN:
		return t.deleteChain(m, tbl)
	case unix.NFT_MSG_NEWRULE:
		if !create {
			return refused(unix.EOPNOTSUPP)
		}
		return t.newRule(m, tbl)
	case unix.NFT_MSG_DELRULE:
		return t.deleteRules(m, tbl)
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		return t.elements(m, tbl)
	case unix.NFT_MSG_DELOBJ, unix.NFT_MSG_DELFLOWTABLE: // There are none.
		return refused(unix.ENOENT)
	}
	return refused(unix.EOPNOTSUPP)
}

func (t *transaction) newSet(m message, in *table) *refusal {
	name := m.text(unix.NFTA_SET_NAME)
	number := func(kind uint16) int { return int(netlink.BigEndian(m.attr(kind))) }
	if in.set(name) != nil {
		return refused(unix.EEXIST)
	}
	s := &set{name: name, keyBytes: number(unix.NFTA_SET_KEY_LEN), dataBytes: -1, verdicts: number(unix.NFTA_SET_DATA_TYPE) == verdictType,
		size:     int(netlink.BigEndian(netlink.Attribute(m.attr(unix.NFTA_SET_DESC), unix.NFTA_SET_DESC_SIZE))),
		elements: map[string]*element{}}
	if m.attr(unix.NFTA_SET_ID) == nil || s.keyBytes == 0 || s.keyBytes > 64 {
		return refused(unix.EINVAL)
	}
	if number(unix.NFTA_SET_FLAGS)&unix.NFT_SET_MAP != 0 {
		if s.dataBytes = number(unix.NFTA_SET_DATA_LEN); !s.verdicts && (s.dataBytes == 0 || s.dataBytes > 64) {
			return refused(unix.EINVAL)
		}
	}
	s.attrs = without(m, unix.NFTA_SET_ID)
	put(t, m, &in.sets, plus(in.sets, s))
	return nil
}

// without returns the attributes of a message but for some.
func without(m message, some ...uint16) (out netlink.Buffer) {
	for kind, value := range netlink.Attributes(m.body[headerBytes:]) {
		if !slices.Contains(some, kind) {
			out = out.Bytes(kind, value...)
		}
	}
	return out
}

func (t *transaction) deleteSet(m message, in *table) *refusal {
	s := in.set(m.text(unix.NFTA_SET_NAME))
	if s == nil {
		return refused(unix.ENOENT)
	}
	for _, c := range in.chains {
		if slices.ContainsFunc(c.rules, func(r *rule) bool { return slices.Contains(r.sets, s.name) }) {
			return refused(unix.EBUSY)
		}
	}
	put(t, m, &in.sets, less(in.sets, s))
	return nil
}

func (t *transaction) newChain(m message, in *table) *refusal {
	name, hook := m.text(unix.NFTA_CHAIN_NAME), m.attr(unix.NFTA_CHAIN_HOOK)
	c := in.chain(name)
	switch {
	case c != nil && (m.Flags&unix.NLM_F_EXCL != 0 ||
		hook != nil && (!bytes.Equal(c.hook, hook) || !bytes.Equal(netlink.Attribute(c.attrs, unix.NFTA_CHAIN_TYPE), m.attr(unix.NFTA_CHAIN_TYPE)))):
		return refused(unix.EEXIST)
	case c != nil:
		t.did(m, func() {})
		return nil
	case m.Flags&unix.NLM_F_CREATE == 0:
		return refused(unix.ENOENT)
	}
	put(t, m, &in.chains, plus(in.chains, &chain{name: name, attrs: without(m), hook: slices.Clone(hook)}))
	return nil
}

func (t *transaction) deleteChain(m message, in *table) *refusal {
	c := in.chain(m.text(unix.NFTA_CHAIN_NAME))
	if c == nil {
		return refused(unix.ENOENT)
	}
	for _, other := range in.chains {
		if other != c && slices.ContainsFunc(other.rules, func(r *rule) bool { return slices.Contains(r.chains, c.name) }) {
			return refused(unix.EBUSY)
		}
	}
	for _, s := range in.sets {
		for _, e := range s.elements {
			if e.chain == c.name {
				return refused(unix.EBUSY)
			}
		}
	}
	put(t, m, &in.chains, less(in.chains, c))
	return nil
}

func (t *transaction) newRule(m message, in *table) *refusal {
	c := in.chain(m.text(unix.NFTA_RULE_CHAIN))
	if c == nil {
		return refused(unix.ENOENT)
	}
	r := &rule{handle: t.kernel.handle + 1}
	for _, e := range netlink.Attributes(m.attr(unix.NFTA_RULE_EXPRESSIONS)) {
		if no := r.add(in, netlink.Text(netlink.Attribute(e, unix.NFTA_EXPR_NAME)), netlink.Attribute(e, unix.NFTA_EXPR_DATA)); no != 0 {
			return refused(no)
		}
	}
	t.kernel.handle++
	r.attrs = without(m).Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, r.handle)...)
	if m.Flags&unix.NLM_F_APPEND != 0 {
		put(t, m, &c.rules, plus(c.rules, r))
	} else {
		put(t, m, &c.rules, append([]*rule{r}, c.rules...))
	}
	return nil
}

// add notes what an expression refers to.
func (r *rule) add(in *table, name string, data []byte) unix.Errno {
	of := ""
	switch name {
	case "immediate":
		to, no := in.leadsTo(netlink.Attribute(data, unix.NFTA_IMMEDIATE_DATA))
		if to != "" {
			r.chains = append(r.chains, to)
		}
		return no
	case "lookup":
		of = netlink.Text(netlink.Attribute(data, unix.NFTA_LOOKUP_SET))
	case "dynset":
		of = netlink.Text(netlink.Attribute(data, unix.NFTA_DYNSET_SET_NAME))
	case "nat":
		r.hooks = []uint64{unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_OUT}
		return 0
	case "masq":
		r.hooks = []uint64{unix.NF_INET_POST_ROUTING}
		return 0
	case "":
		return unix.EINVAL
	default:
		return 0
	}
	s := in.set(of)
	if s == nil {
		return unix.ENOENT
	}
	r.sets = append(r.sets, of)
	if dreg := netlink.Attribute(data, unix.NFTA_LOOKUP_DREG); name == "lookup" && dreg != nil {
		if s.dataBytes < 0 || s.verdicts != (netlink.BigEndian(dreg) == unix.NFT_REG_VERDICT) {
			return unix.EINVAL
		}
		if s.verdicts {
			r.maps = append(r.maps, of)
		}
	}
	return 0
}

// leadsTo returns the chain that a verdict leads to; "" for none.
func (t *table) leadsTo(data []byte) (string, unix.Errno) {
	name := netlink.Text(netlink.Attribute(netlink.Attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CHAIN))
	if name == "" {
		return "", 0
	}
	switch c := t.chain(name); {
	case c == nil:
		return "", unix.ENOENT
	case c.hook != nil:
		return "", unix.EOPNOTSUPP
	}
	return name, 0
}

func (t *transaction) deleteRules(m message, in *table) *refusal {
	name, handle := m.text(unix.NFTA_RULE_CHAIN), m.attr(unix.NFTA_RULE_HANDLE)
	chains := in.chains
	if name != "" {
		c := in.chain(name)
		if c == nil {
			return refused(unix.ENOENT)
		}
		chains = []*chain{c}
	}
	for _, c := range chains {
		left := []*rule{}
		if handle != nil {
			n := netlink.BigEndian(handle)
			left = slices.DeleteFunc(slices.Clone(c.rules), func(r *rule) bool { return r.handle == n })
			if len(left) == len(c.rules) {
				return refused(unix.ENOENT)
			}
		}
		if len(left) != len(c.rules) {
			put(t, m, &c.rules, left)
		}
	}
	return nil
}

// elements adds or removes elements. Without a list, it removes all.
func (t *transaction) elements(m message, in *table) *refusal {
	s := in.set(m.text(unix.NFTA_SET_ELEM_LIST_SET))
	if s == nil {
		return refused(unix.ENOENT)
	}
	list := m.attr(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	adds := m.kind() == unix.NFT_MSG_NEWSETELEM
	if list == nil && !adds {
		if len(s.elements) > 0 {
			put(t, m, &s.elements, map[string]*element{})
		}
		return nil
	}
	at := len(m.body) - len(list) // The list is what comes last.
	for _, raw := range netlink.Attributes(list) {
		change := t.deleteElement
		if adds {
			change = t.addElement
		}
		if no := change(m, in, s, raw); no != 0 {
			return &refusal{no, at}
		}
		at += (4 + len(raw) + 3) &^ 3
	}
	return nil
}

// count is how many elements there are but the catch-all element.
func (s *set) count() int {
	if s.elements[""] != nil {
		return len(s.elements) - 1
	}
	return len(s.elements)
}

func (s *set) keyOf(raw []byte) (key string, no unix.Errno) {
	const catchAll = 2 // NFT_SET_ELEM_CATCHALL
	value := netlink.Attribute(netlink.Attribute(raw, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
	others := netlink.BigEndian(netlink.Attribute(raw, unix.NFTA_SET_ELEM_FLAGS))&catchAll != 0
	if others != (value == nil) || !others && len(value) != s.keyBytes {
		return "", unix.EINVAL
	}
	return string(value), 0
}

func (t *transaction) addElement(m message, in *table, s *set, raw []byte) unix.Errno {
	key, no := s.keyOf(raw)
	if no != 0 {
		return no
	}
	e := &element{key: key, attrs: slices.Clone(raw)}
	data := netlink.Attribute(raw, unix.NFTA_SET_ELEM_DATA)
	if (data != nil) != (s.dataBytes >= 0) {
		return unix.EINVAL
	}
	if data != nil {
		value := netlink.Attribute(data, unix.NFTA_DATA_VALUE)
		if (value == nil) != s.verdicts || !s.verdicts && len(value) != s.dataBytes {
			return unix.EINVAL
		}
		if e.data = string(value); s.verdicts {
			e.data = string(netlink.Attribute(netlink.Attribute(data, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CODE))
			if e.chain, no = in.leadsTo(data); no != 0 {
				return no
			}
		}
	}
	switch was := s.elements[key]; {
	case was != nil && (m.Flags&unix.NLM_F_EXCL != 0 || was.data != e.data || was.chain != e.chain):
		return unix.EEXIST
	case was != nil:
		return 0
	case s.size > 0 && key != "" && s.count() >= s.size:
		return unix.ENFILE
	}
	s.elements[key] = e
	t.did(m, func() { delete(s.elements, key) })
	return 0
}

func (t *transaction) deleteElement(m message, _ *table, s *set, raw []byte) unix.Errno {
	key, no := s.keyOf(raw)
	if no != 0 {
		return no
	}
	was := s.elements[key]
	if was == nil {
		return unix.ENOENT
	}
	delete(s.elements, key)
	t.did(m, func() { s.elements[key] = was })
	return 0
}

// mostJumps is how deep chains may be nested below one that has a hook (NFT_JUMP_STACK_SIZE).
const mostJumps = 16

// valid returns the error for chains that are nested too deep, or in a circle, or that translate where that is not possible.
func (k *Kernel) valid() unix.Errno {
	for _, t := range k.tables {
		height, open := map[*chain]int{}, map[*chain]bool{}
		var visit func(c *chain) int
		visit = func(c *chain) int {
			if n, known := height[c]; known {
				return n
			}
			if open[c] {
				return mostJumps
			}
			open[c] = true
			most := 0
			for _, to := range t.next(c) {
				most = max(most, visit(to))
			}
			open[c], height[c] = false, most+1
			return most + 1
		}
		for _, c := range t.chains {
			if c.hook == nil {
				continue
			}
			if visit(c) > mostJumps {
				return unix.EMLINK
			}
			if !t.translates(c) {
				return unix.EOPNOTSUPP
			}
		}
	}
	return 0
}

// translates reports whether all that a chain with a hook leads to, and that translates, may do so there.
func (t *table) translates(base *chain) bool {
	nat := netlink.Text(netlink.Attribute(base.attrs, unix.NFTA_CHAIN_TYPE)) == "nat"
	hook := netlink.BigEndian(netlink.Attribute(base.hook, unix.NFTA_HOOK_HOOKNUM))
	met, list := map[*chain]bool{base: true}, []*chain{base}
	for ; len(list) > 0; list = list[1:] {
		for _, r := range list[0].rules {
			if r.hooks != nil && !(nat && slices.Contains(r.hooks, hook)) {
				return false
			}
		}
		for _, to := range t.next(list[0]) {
			if !met[to] {
				met[to], list = true, append(list, to)
			}
		}
	}
	return true
}

// next are the chains to which the rules of one lead.
func (t *table) next(c *chain) []*chain {
	names := map[string]bool{}
	for _, r := range c.rules {
		for _, name := range r.chains {
			names[name] = true
		}
		for _, name := range r.maps {
			for _, e := range t.set(name).elements {
				if e.chain != "" {
					names[e.chain] = true
				}
			}
		}
	}
	var out []*chain
	for _, name := range slices.Sorted(maps.Keys(names)) {
		out = append(out, t.chain(name))
	}
	return out
}
