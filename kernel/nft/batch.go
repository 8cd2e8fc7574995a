package nft

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Types of values in keys and data of sets, as nft numbers them. In a concatenation, each value begins a register of four bytes.
const (
	TypeVerdict     = 1
	TypeIPv4        = 7
	TypeIPv6        = 8
	TypeProtocol    = 12
	TypeServicePort = 13
	TypeClassID     = 23
)

var typeBytes = map[uint32]uint32{TypeVerdict: 0, TypeIPv4: 4, TypeIPv6: 16, TypeProtocol: 1, TypeServicePort: 2, TypeClassID: 4}

var typeNames = map[uint32]string{TypeVerdict: "verdict", TypeIPv4: "ipv4_addr", TypeIPv6: "ipv6_addr", TypeProtocol: "inet_proto",
	TypeServicePort: "inet_service", TypeClassID: "classid"}

// Concat is the type of a concatenation of values, or of a single one.
type Concat []uint32

// number returns nft's number of the type.
func (c Concat) number() uint32 {
	var n uint32
	for _, t := range c {
		n = n<<6 | t
	}
	return n
}

// Length returns the length of a value in bytes. A part fills whole registers of four bytes, unless it is the only one.
func (c Concat) Length() int {
	if len(c) == 1 {
		return int(typeBytes[c[0]])
	}
	n := 0
	for _, t := range c {
		n += int(typeBytes[t]+3) &^ 3
	}
	return n
}

func (c Concat) String() string {
	var s string
	for i, t := range c {
		if i > 0 {
			s += " . "
		}
		s += typeNames[t]
	}
	return s
}

// Set is a named set, or with Data a map.
type Set struct {
	Name      string
	Key, Data Concat
	// Dynamic says that rules add elements, each with a timeout; Size bounds their number, and Collect is how often the kernel looks through
	// all of them and removes those whose time is over. No lookup finds these in the meantime.
	Dynamic bool
	Size    uint32
	Collect time.Duration
	// Counted sets count, with each element, the packets that were looked up and found it.
	Counted bool
}

func (s Set) flags() uint32 {
	var f uint32
	if s.Data != nil {
		f |= unix.NFT_SET_MAP
	}
	if s.Dynamic {
		f |= unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT
	}
	return f
}

// verdictData is the kernel's type of data that are verdicts.
const verdictData = 0xffffff00

func (s Set) dataType() uint32 {
	if len(s.Data) == 1 && s.Data[0] == TypeVerdict {
		return verdictData
	}
	return s.Data.number()
}

// Constants that golang.org/x/sys lacks.
const (
	policyAccept    = 1 // NF_ACCEPT
	tableOwner      = 2 // NFT_TABLE_F_OWNER
	chainFlags      = 10
	chainBinding    = 4 // NFT_CHAIN_BINDING
	setElemExprs    = 11
	setExpr         = 17
	setExprs        = 18
	setNumber       = 20
	catchAll        = 2 // NFT_SET_ELEM_CATCHALL
	listElem        = 1
	commentUserdata = 0
	keyOrder        = 0
	dataOrder       = 1
	labelUserdata   = 0xf0
	mostComment     = 127
)

// Element is an element of a set. Key and Data are bytes as in registers. One without a Key is for all keys that no other element has (nft calls it
// a catch-all element).
type Element struct {
	Key, Data string
	// Chain is where an element of a verdict map leads.
	Chain string
	// Comment is for people, who see it in the output of nft.
	Comment string
	// Packets is how many packets a set that is Counted has counted.
	Packets uint64
	// Other names what the kernel has with the element besides, which only other programs write: another verdict than goto, expressions
	// other than a counter, a timeout, an object.
	Other string
}

// Rule is one rule: its expressions, and how it reads in the language of nft.
type Rule struct {
	Text  string
	Exprs []expr.Any
	// Comment is for people, who see it in the output of nft.
	Comment string
}

// Chain is a chain. One without a Hook is reached only from other chains.
type Chain struct {
	Name  string
	Hook  *Hook
	Rules []Rule
}

// Hook says where the kernel calls a base chain, whose policy is to accept.
type Hook struct {
	// Type is nat, filter or route. In a chain of type route, a packet whose mark changes is routed again.
	Type string
	// Name is prerouting, input, forward, output or postrouting.
	Name     string
	Priority int32
}

var hookNumbers = map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "input": unix.NF_INET_LOCAL_IN,
	"forward": unix.NF_INET_FORWARD, "output": unix.NF_INET_LOCAL_OUT, "postrouting": unix.NF_INET_POST_ROUTING}

// labels identify the rules. The kernel keeps them beside these.
func (c Chain) labels() []string {
	hook := ""
	if c.Hook != nil {
		hook = fmt.Sprint(*c.Hook)
	}
	out := make([]string, len(c.Rules))
	for i, r := range c.Rules {
		sum := sha256.Sum256([]byte(fmt.Sprintf("%s %s %s", c.Name, hook, r.Text)))
		out[i] = fmt.Sprintf("nodeproxy %x", sum[:8])
	}
	return out
}

// Batch is a transaction that is being prepared. Nothing happens before Conn.Commit.
type Batch struct {
	family   plan.Family
	table    string
	messages []netlink.Message
	what     []string // what each message does, for errors
	elements int
	bytes    int
}

// NewBatch begins a transaction that changes one table.
func NewBatch(f plan.Family, table string) *Batch { return &Batch{family: f, table: table} }

// Clone returns a copy, to which other parts may be added.
func (b *Batch) Clone() *Batch {
	out := *b
	out.messages, out.what = slices.Clone(b.messages), slices.Clone(b.what)
	return &out
}

// Empty reports whether there is nothing to commit.
func (b *Batch) Empty() bool { return len(b.messages) == 0 }

// Elements returns how many elements are added or removed.
func (b *Batch) Elements() int { return b.elements }

func (b *Batch) add(kind, flags uint16, what string, body netlink.Buffer) {
	b.messages = append(b.messages, netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | kind, Flags: flags, Body: body})
	b.what = append(b.what, what)
	b.bytes += len(body)
}

func (b *Batch) begin() netlink.Buffer { return netlink.Buffer{Protocol(b.family), 0, 0, 0} }

// AddTable adds the table, which may exist already.
func (b *Batch) AddTable() {
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "adding the table", b.begin().Text(unix.NFTA_TABLE_NAME, b.table))
}

// AddOwnedTable adds a table that does not exist yet, and that the kernel removes when the Conn that commits it is closed, however the
// process ends. Nobody else can change it meanwhile. Kernels before 5.12 refuse that.
func (b *Batch) AddOwnedTable() {
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "adding the table",
		b.begin().Text(unix.NFTA_TABLE_NAME, b.table).BigEndian32(unix.NFTA_TABLE_FLAGS, tableOwner))
}

// DeleteTable removes the table, which must exist, with everything in it.
func (b *Batch) DeleteTable() {
	b.add(unix.NFT_MSG_DELTABLE, 0, "removing the table", b.begin().Text(unix.NFTA_TABLE_NAME, b.table))
}

// AddSet adds a set that does not exist yet.
func (b *Batch) AddSet(s Set) {
	body := b.begin().Text(unix.NFTA_SET_TABLE, b.table).Text(unix.NFTA_SET_NAME, s.Name).
		BigEndian32(unix.NFTA_SET_FLAGS, s.flags()).
		BigEndian32(unix.NFTA_SET_KEY_TYPE, s.Key.number()).BigEndian32(unix.NFTA_SET_KEY_LEN, uint32(s.Key.Length()))
	if s.Data != nil {
		body = body.BigEndian32(unix.NFTA_SET_DATA_TYPE, s.dataType()).BigEndian32(unix.NFTA_SET_DATA_LEN, uint32(s.Data.Length()))
	}
	body = body.BigEndian32(unix.NFTA_SET_ID, uint32(len(b.messages)+1))
	if s.Size > 0 {
		body = body.Nest(unix.NFTA_SET_DESC, func(d netlink.Buffer) netlink.Buffer { return d.BigEndian32(unix.NFTA_SET_DESC_SIZE, s.Size) })
	}
	if s.Collect > 0 {
		body = body.BigEndian32(unix.NFTA_SET_GC_INTERVAL, uint32(s.Collect.Milliseconds()))
	}
	if s.Counted {
		body = body.Nest(setExpr, func(d netlink.Buffer) netlink.Buffer { return d.Text(unix.NFTA_EXPR_NAME, "counter") })
	}
	body = body.Bytes(unix.NFTA_SET_USERDATA, append(byteOrder(keyOrder, s.Key), byteOrder(dataOrder, s.Data)...)...)
	b.add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "adding set "+s.Name, body)
}

// byteOrder returns userdata that says how nft prints keys or data.
func byteOrder(kind byte, c Concat) []byte {
	const host, network = 1, 2
	order := uint32(network)
	if len(c) == 1 && c[0] == TypeClassID {
		order = host
	}
	return binary.NativeEndian.AppendUint32([]byte{kind, 4}, order)
}

// AddChain adds a chain without its rules. It may exist already with the same hook.
func (b *Batch) AddChain(c Chain) {
	body := b.begin().Text(unix.NFTA_CHAIN_TABLE, b.table).Text(unix.NFTA_CHAIN_NAME, c.Name)
	if c.Hook != nil {
		body = body.Nest(unix.NFTA_CHAIN_HOOK, func(h netlink.Buffer) netlink.Buffer {
			return h.BigEndian32(unix.NFTA_HOOK_HOOKNUM, hookNumbers[c.Hook.Name]).BigEndian32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		}).BigEndian32(unix.NFTA_CHAIN_POLICY, policyAccept).Text(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
	}
	b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "adding chain "+c.Name, body)
}

// DeleteSet removes a set, with its elements, that no rule uses.
func (b *Batch) DeleteSet(name string) {
	b.add(unix.NFT_MSG_DELSET, 0, "removing set "+name, b.begin().Text(unix.NFTA_SET_TABLE, b.table).Text(unix.NFTA_SET_NAME, name))
}

// DeleteObject removes an object that no rule uses.
func (b *Batch) DeleteObject(o Object) {
	kind, body := uint16(unix.NFT_MSG_DELFLOWTABLE), b.begin().Text(tableAttr, b.table).Text(unix.NFTA_OBJ_NAME, o.Name)
	if o.Type != 0 {
		kind, body = unix.NFT_MSG_DELOBJ, body.BigEndian32(unix.NFTA_OBJ_TYPE, o.Type)
	}
	b.add(kind, 0, "removing "+o.String(), body)
}

// DeleteChain removes a chain that has no rules and that nothing leads to.
func (b *Batch) DeleteChain(name string) {
	b.add(unix.NFT_MSG_DELCHAIN, 0, "removing chain "+name,
		b.begin().Text(unix.NFTA_CHAIN_TABLE, b.table).Text(unix.NFTA_CHAIN_NAME, name))
}

// FlushChain removes the rules of a chain.
func (b *Batch) FlushChain(name string) {
	b.add(unix.NFT_MSG_DELRULE, 0, "removing the rules of chain "+name,
		b.begin().Text(unix.NFTA_RULE_TABLE, b.table).Text(unix.NFTA_RULE_CHAIN, name))
}

// DeleteRule removes a rule by its handle.
func (b *Batch) DeleteRule(chain string, handle uint64) {
	body := b.begin().Text(unix.NFTA_RULE_TABLE, b.table).Text(unix.NFTA_RULE_CHAIN, chain)
	b.add(unix.NFT_MSG_DELRULE, 0, "removing a rule of chain "+chain,
		body.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, handle)...))
}

// AddChains adds chains that do not exist yet, with their rules.
func (b *Batch) AddChains(chains []Chain) error {
	for _, c := range chains {
		b.AddChain(c)
	}
	for _, c := range chains {
		if err := b.AddRules(c); err != nil {
			return err
		}
	}
	return nil
}

// AddRules appends the rules of a chain to it.
func (b *Batch) AddRules(c Chain) error {
	labels := c.labels()
	for i, r := range c.Rules {
		list := netlink.Buffer{}
		for _, e := range r.Exprs {
			raw, err := expr.Marshal(Protocol(b.family), e)
			if err != nil {
				return fmt.Errorf("rule %q of chain %s: %w", r.Text, c.Name, err)
			}
			list = list.Bytes(listElem|unix.NLA_F_NESTED, raw...)
		}
		body := b.begin().Text(unix.NFTA_RULE_TABLE, b.table).Text(unix.NFTA_RULE_CHAIN, c.Name).
			Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, list...).
			Bytes(unix.NFTA_RULE_USERDATA, userdata(r.Comment, labels[i])...)
		b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "adding rule "+r.Text+" to chain "+c.Name, body)
	}
	return nil
}

// userdata returns what the kernel keeps beside a rule or element: a comment for people, and a label for this program.
func userdata(comment, label string) []byte {
	var out []byte
	if comment != "" {
		comment = Comment(comment)
		out = append(append(append(out, commentUserdata, byte(len(comment)+1)), comment...), 0)
	}
	if label != "" {
		out = append(append(out, labelUserdata, byte(len(label))), label...)
	}
	return out
}

// Comment shortens a text to the length that comments of nft may have.
func Comment(text string) string { return text[:min(len(text), mostComment)] }

// userdataOf returns the part of userdata of one type.
func userdataOf(raw []byte, want byte) []byte {
	for len(raw) >= 2 {
		end := 2 + int(raw[1])
		if len(raw) < end {
			return nil
		}
		if raw[0] == want {
			return raw[2:end]
		}
		raw = raw[end:]
	}
	return nil
}

// The elements of a message are bounded in number and in bytes: the length of a message has 32 bits, but the length of its list of
// elements has 16, and overflows without an error.
const (
	mostElements = 500
	mostBytes    = 60000
)

// AddElements adds elements. An element that exists already must have the same data.
func (b *Batch) AddElements(s Set, list []Element) {
	b.elementMessages(s, list, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, "adding to")
}

// DeleteElements removes elements, all of which must exist.
func (b *Batch) DeleteElements(s Set, list []Element) {
	b.elementMessages(s, list, unix.NFT_MSG_DELSETELEM, 0, "removing from")
}

func (b *Batch) elementMessages(s Set, list []Element, kind, flags uint16, what string) {
	for len(list) > 0 {
		// Most elements of a set are as long as the first.
		const headers = 36
		each := headers + len(list[0].Key) + len(list[0].Data) + len(list[0].Comment) + len(list[0].Chain)
		nested := make(netlink.Buffer, 0, min(len(list), mostElements)*each)
		n := 0
		for n < len(list) && n < mostElements && len(nested) < mostBytes {
			nested = appendElement(nested, list[n], kind == unix.NFT_MSG_NEWSETELEM)
			n++
		}
		body := b.begin().Text(unix.NFTA_SET_ELEM_LIST_TABLE, b.table).Text(unix.NFTA_SET_ELEM_LIST_SET, s.Name).
			Bytes(unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED, nested...)
		b.add(kind, flags, fmt.Sprintf("%s set %s %d elements", what, s.Name, n), body)
		b.elements += n
		list = list[n:]
	}
}

func appendElement(b netlink.Buffer, e Element, whole bool) netlink.Buffer {
	value := func(v string) func(netlink.Buffer) netlink.Buffer {
		return func(d netlink.Buffer) netlink.Buffer { return d.Bytes(unix.NFTA_DATA_VALUE, []byte(v)...) }
	}
	return b.Nest(listElem, func(d netlink.Buffer) netlink.Buffer {
		if e.Key == "" {
			d = d.BigEndian32(unix.NFTA_SET_ELEM_FLAGS, catchAll)
		} else {
			d = d.Nest(unix.NFTA_SET_ELEM_KEY, value(e.Key))
		}
		if !whole {
			return d
		}
		switch {
		case e.Chain != "":
			d = d.Nest(unix.NFTA_SET_ELEM_DATA, func(d netlink.Buffer) netlink.Buffer {
				return d.Nest(unix.NFTA_DATA_VERDICT, func(d netlink.Buffer) netlink.Buffer {
					return d.BigEndian32(unix.NFTA_VERDICT_CODE, gotoVerdict).Text(unix.NFTA_VERDICT_CHAIN, e.Chain)
				})
			})
		case e.Data != "":
			d = d.Nest(unix.NFTA_SET_ELEM_DATA, value(e.Data))
		}
		if e.Comment != "" {
			d = d.Bytes(unix.NFTA_SET_ELEM_USERDATA, userdata(e.Comment, "")...)
		}
		return d
	})
}

const gotoVerdict = 0xfffffffc // NFT_GOTO, which is -4

// Conn is a lasting socket for transactions and dumps of nf_tables, in the network namespace of the thread that opened it. It is not
// safe for concurrent use.
type Conn struct{ conn *netlink.Conn }

// sendBuffer bounds the length of a transaction, in bytes.
const sendBuffer = 256 << 20

// Dial opens a Conn. It does not find out whether the kernel has nftables.
func Dial() (*Conn, error) {
	s, err := netlink.OpenLarge(unix.NETLINK_NETFILTER, sendBuffer)
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", absent(err))
	}
	return NewConn(s), nil
}

// NewConn returns a Conn that uses a socket.
func NewConn(s netlink.Socket) *Conn { return &Conn{netlink.NewConn(s)} }

// Close closes the socket.
func (c *Conn) Close() error { return c.conn.Close() }

// RefusedError says that the kernel has rejected a transaction and done nothing of it. After any other error of Commit, it is not known
// whether the transaction was carried out.
type RefusedError struct {
	// What is the first part of the transaction that failed.
	What string
	// Removes says that this part removes something.
	Removes bool
	// Set and Element are the element that was refused, where the kernel says which; without data. Set is empty where it does not.
	Set     string
	Element Element
	Err     error
}

func (e *RefusedError) Error() string { return e.What + ": " + e.Err.Error() }

// Unwrap returns the kernel's error.
func (e *RefusedError) Unwrap() error { return e.Err }

// Commit carries out a transaction completely or not at all.
func (c *Conn) Commit(b *Batch) error {
	if b.Empty() {
		return nil
	}
	subsystem := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES} // the last two are the number in network order
	messages := make([]netlink.Message, 0, len(b.messages)+2)
	messages = append(messages, netlink.Message{Type: unix.NFNL_MSG_BATCH_BEGIN, Body: subsystem})
	messages = append(messages, b.messages...)
	messages = append(messages, netlink.Message{Type: unix.NFNL_MSG_BATCH_END, Body: subsystem})
	errs, err := c.conn.Transact(messages)
	prefix := fmt.Sprintf("table %s %s of nftables", FamilyName(b.family), b.table)
	if err != nil {
		return fmt.Errorf("%s: %w", prefix, err)
	}
	for _, i := range slices.Sorted(maps.Keys(errs)) {
		refused := &RefusedError{What: "committing the transaction", Err: absentOr(errs[i], i)}
		if i > 0 && i <= len(b.what) {
			refused.What, refused.Removes = b.what[i-1], b.messages[i-1].Flags&unix.NLM_F_CREATE == 0
			var at *netlink.AtError
			if errors.As(errs[i], &at) {
				refused.Set, refused.Element = elementAt(b.messages[i-1], at.Offset)
			}
		} else if i == 0 && len(errs) > 1 {
			continue // Another error says what failed.
		}
		return fmt.Errorf("%s: %w", prefix, refused)
	}
	return nil
}

// elementAt is the element in a message of which an attribute begins at an offset, and its set.
func elementAt(m netlink.Message, offset int) (set string, e Element) {
	if kind := m.Type & 0xff; kind != unix.NFT_MSG_NEWSETELEM && kind != unix.NFT_MSG_DELSETELEM {
		return "", Element{}
	}
	const header = 4
	list := netlink.Attribute(m.Body[header:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	end := len(m.Body) - len(list) // The list is what comes last.
	for _, raw := range netlink.Attributes(list) {
		begin := end
		end = begin + header + (len(raw)+3)&^3
		if begin <= offset && offset < end {
			e = parseElement(raw)
			return netlink.Text(netlink.Attribute(m.Body[header:], unix.NFTA_SET_ELEM_LIST_SET)), Element{Key: e.Key}
		}
	}
	return "", Element{}
}

// absentOr returns ErrAbsent if the kernel rejects the beginning of a transaction, message 0, as unknown.
func absentOr(err error, i int) error {
	if i == 0 && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)) {
		return ErrAbsent
	}
	return err
}

// Port returns the socket's number, which notifications of its changes have.
func (c *Conn) Port() uint32 { return c.conn.Port() }
