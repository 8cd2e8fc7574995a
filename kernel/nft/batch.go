package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Types of values in keys and data of sets, by the numbers that nft knows them by. In a concatenation each value begins a register of
// four bytes.
const (
	TypeVerdict     = 1
	TypeIPv4        = 7
	TypeIPv6        = 8
	TypeProtocol    = 12
	TypeServicePort = 13
	TypeMark        = 19
	TypeClassID     = 23
)

var typeBytes = map[uint32]uint32{TypeVerdict: 0, TypeIPv4: 4, TypeIPv6: 16, TypeProtocol: 1, TypeServicePort: 2, TypeMark: 4, TypeClassID: 4}

var typeNames = map[uint32]string{TypeVerdict: "verdict", TypeIPv4: "ipv4_addr", TypeIPv6: "ipv6_addr", TypeProtocol: "inet_proto",
	TypeServicePort: "inet_service", TypeMark: "mark", TypeClassID: "classid"}

// Concat is the type of a concatenation of values, or of a single one.
type Concat []uint32

// number is how nft encodes the type.
func (c Concat) number() uint32 {
	var n uint32
	for _, t := range c {
		n = n<<6 | t
	}
	return n
}

// Length is that of a value in bytes. A part fills whole registers of four bytes, unless it is the only one.
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
	// Interval is for sets in whose elements the last part of the key is a range.
	Interval bool
	// Dynamic is for maps that rules add to, with a timeout for each element; Size is the most that they hold.
	Dynamic bool
	Size    uint32
}

func (s Set) flags() uint32 {
	var f uint32
	if s.Data != nil {
		f |= unix.NFT_SET_MAP
	}
	if s.Interval {
		f |= unix.NFT_SET_INTERVAL | setConcat
	}
	if s.Dynamic {
		f |= unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT
	}
	return f
}

// verdictData is the type by which the kernel knows that a map leads to chains.
const verdictData = 0xffffff00

func (s Set) dataType() uint32 {
	if len(s.Data) == 1 && s.Data[0] == TypeVerdict {
		return verdictData
	}
	return s.Data.number()
}

// What golang.org/x/sys lacks.
const (
	policyAccept    = 1 // NF_ACCEPT
	setConcat       = 0x80
	setDescConcat   = 2
	setFieldLen     = 1
	setElemKeyEnd   = 10
	listElem        = 1
	commentUserdata = 0
	keyOrder        = 0
	dataOrder       = 1
	labelUserdata   = 0xf0
	mostComment     = 127
)

// Element is an element of a set. Key, End and Data are bytes as they are in registers. End, of an interval, is the last key.
type Element struct {
	Key, End, Data string
	// Chain, if not empty, is where an element of a map of verdicts leads.
	Chain string
	// Comment is for people, who see it in the output of nft.
	Comment string
}

// ChainSpec is a chain. One without Hook is reached from others only.
type ChainSpec struct {
	Name string
	Hook *Hook
	// Rules are in order.
	Rules []Rule
}

// Hook is where a base chain is called.
type Hook struct {
	Type     string // nat or filter
	Name     string
	Number   uint32
	Priority int32
}

// Batch is a transaction that is being put together. Nothing happens before Conn.Commit.
type Batch struct {
	family   plan.Family
	table    string
	messages []netlink.Message
	what     []string // each message, for errors
	elements int
	bytes    int
}

// NewBatch begins a transaction about one table.
func NewBatch(f plan.Family, table string) *Batch { return &Batch{family: f, table: table} }

// Empty reports whether there is nothing to commit.
func (b *Batch) Empty() bool { return len(b.messages) == 0 }

// Elements is how many elements are added or removed.
func (b *Batch) Elements() int { return b.elements }

func (b *Batch) add(kind, flags uint16, what string, body netlink.Buffer) {
	b.messages = append(b.messages, netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | kind, Flags: flags, Body: body})
	b.what = append(b.what, what)
	b.bytes += len(body)
}

func (b *Batch) begin() netlink.Buffer { return netlink.Buffer{Protocol(b.family), 0, 0, 0} }

// AddTable adds the table, which may be there already.
func (b *Batch) AddTable() {
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "adding the table", b.begin().Text(unix.NFTA_TABLE_NAME, b.table))
}

// DeleteTable removes the table, which must be there, with all that is in it.
func (b *Batch) DeleteTable() {
	b.add(unix.NFT_MSG_DELTABLE, 0, "removing the table", b.begin().Text(unix.NFTA_TABLE_NAME, b.table))
}

// AddSet adds a set that is not there.
func (b *Batch) AddSet(s Set) {
	body := b.begin().Text(unix.NFTA_SET_TABLE, b.table).Text(unix.NFTA_SET_NAME, s.Name).
		BigEndian32(unix.NFTA_SET_FLAGS, s.flags()).
		BigEndian32(unix.NFTA_SET_KEY_TYPE, s.Key.number()).BigEndian32(unix.NFTA_SET_KEY_LEN, uint32(s.Key.Length()))
	if s.Data != nil {
		body = body.BigEndian32(unix.NFTA_SET_DATA_TYPE, s.dataType()).BigEndian32(unix.NFTA_SET_DATA_LEN, uint32(s.Data.Length()))
	}
	body = body.BigEndian32(unix.NFTA_SET_ID, uint32(len(b.messages)+1))
	if s.Size > 0 || s.Interval {
		body = body.Nest(unix.NFTA_SET_DESC, func(d netlink.Buffer) netlink.Buffer {
			if s.Size > 0 {
				d = d.BigEndian32(unix.NFTA_SET_DESC_SIZE, s.Size)
			}
			if !s.Interval {
				return d
			}
			return d.Nest(setDescConcat, func(d netlink.Buffer) netlink.Buffer {
				for _, t := range s.Key {
					d = d.Nest(listElem, func(d netlink.Buffer) netlink.Buffer { return d.BigEndian32(setFieldLen, typeBytes[t]) })
				}
				return d
			})
		})
	}
	body = body.Bytes(unix.NFTA_SET_USERDATA, append(byteOrder(keyOrder, s.Key), byteOrder(dataOrder, s.Data)...)...)
	b.add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "adding set "+s.Name, body)
}

// byteOrder is what tells nft how to print keys or data.
func byteOrder(kind byte, c Concat) []byte {
	const host, network = 1, 2
	order := uint32(network)
	if len(c) == 1 && (c[0] == TypeMark || c[0] == TypeClassID) {
		order = host
	}
	return binary.NativeEndian.AppendUint32([]byte{kind, 4}, order)
}

// AddChain adds a chain without its rules. It may be there already with the same hook.
func (b *Batch) AddChain(c ChainSpec) {
	body := b.begin().Text(unix.NFTA_CHAIN_TABLE, b.table).Text(unix.NFTA_CHAIN_NAME, c.Name)
	if c.Hook != nil {
		body = body.Nest(unix.NFTA_CHAIN_HOOK, func(h netlink.Buffer) netlink.Buffer {
			return h.BigEndian32(unix.NFTA_HOOK_HOOKNUM, c.Hook.Number).BigEndian32(unix.NFTA_HOOK_PRIORITY, uint32(c.Hook.Priority))
		}).BigEndian32(unix.NFTA_CHAIN_POLICY, policyAccept).Text(unix.NFTA_CHAIN_TYPE, c.Hook.Type)
	}
	b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "adding chain "+c.Name, body)
}

// DeleteChain removes a chain without rules that nothing leads to.
func (b *Batch) DeleteChain(name string) {
	b.add(unix.NFT_MSG_DELCHAIN, 0, "removing chain "+name,
		b.begin().Text(unix.NFTA_CHAIN_TABLE, b.table).Text(unix.NFTA_CHAIN_NAME, name))
}

// FlushChain removes the rules of a chain.
func (b *Batch) FlushChain(name string) {
	b.add(unix.NFT_MSG_DELRULE, 0, "removing the rules of chain "+name,
		b.begin().Text(unix.NFTA_RULE_TABLE, b.table).Text(unix.NFTA_RULE_CHAIN, name))
}

// AddRules appends the rules of a chain to it.
func (b *Batch) AddRules(c ChainSpec) error {
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
			Bytes(unix.NFTA_RULE_USERDATA, userdata(r.Comment, c.Label(i))...)
		b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "adding rule "+r.Text+" to chain "+c.Name, body)
	}
	return nil
}

// userdata is what the kernel keeps beside a rule or element: a comment for people, and a label for this program.
func userdata(comment string, label []byte) []byte {
	var out []byte
	if comment != "" {
		comment = Comment(comment)
		out = append(append(append(out, commentUserdata, byte(len(comment)+1)), comment...), 0)
	}
	if len(label) > 0 {
		out = append(append(out, labelUserdata, byte(len(label))), label...)
	}
	return out
}

// Comment is as much of a text as a comment of nft may have.
func Comment(text string) string { return text[:min(len(text), mostComment)] }

// userdataOf returns the part of userdata of one type.
func userdataOf(raw []byte, want byte) []byte {
	for len(raw) >= 2 && len(raw) >= 2+int(raw[1]) {
		if raw[0] == want {
			return raw[2 : 2+raw[1]]
		}
		raw = raw[2+raw[1]:]
	}
	return nil
}

// A message has at most so many elements, and so many bytes of them: its length has 32 bits, but that of the list of elements 16, and
// what is over is cut off without an error.
const (
	mostElements = 500
	mostBytes    = 60000
)

// AddElements adds elements. One that is in the set already must have the same data.
func (b *Batch) AddElements(s Set, list []Element) {
	b.elementMessages(s, list, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, "adding to")
}

// DeleteElements removes elements, all of which are in the set.
func (b *Batch) DeleteElements(s Set, list []Element) {
	b.elementMessages(s, list, unix.NFT_MSG_DELSETELEM, 0, "removing from")
}

func (b *Batch) elementMessages(s Set, list []Element, kind, flags uint16, what string) {
	for len(list) > 0 {
		var nested netlink.Buffer
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
		d = d.Nest(unix.NFTA_SET_ELEM_KEY, value(e.Key))
		if e.End != "" {
			d = d.Nest(setElemKeyEnd, value(e.End))
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
			d = d.Bytes(unix.NFTA_SET_ELEM_USERDATA, userdata(e.Comment, nil)...)
		}
		return d
	})
}

const gotoVerdict = 0xfffffffc // NFT_GOTO, which is -4

// Conn is a lasting socket for transactions and dumps of nf_tables, in the network namespace of the thread that opened it. It is not
// safe for concurrent use.
type Conn struct{ conn *netlink.Conn }

// sendBuffer is the length of the largest transaction. The kernel keeps a transaction in its own memory until it is carried out.
const sendBuffer = 256 << 20

// Dial opens a Conn. It does not find out whether the kernel has nftables.
func Dial() (*Conn, error) {
	c, err := netlink.DialLarge(unix.NETLINK_NETFILTER, sendBuffer)
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return &Conn{c}, nil
}

// Close closes the socket.
func (c *Conn) Close() error { return c.conn.Close() }

// RefusedError says that the kernel has refused a transaction, of which nothing has been done. After any other error of Commit, that
// is not known.
type RefusedError struct {
	// What is the part of the transaction that was refused first.
	What string
	Err  error
}

func (e *RefusedError) Error() string { return e.What + ": " + e.Err.Error() }

// Unwrap returns the kernel's error.
func (e *RefusedError) Unwrap() error { return e.Err }

// Commit carries out a transaction, all or nothing of it.
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
		what := "committing the transaction"
		if i > 0 && i <= len(b.what) {
			what = b.what[i-1]
		} else if i == 0 && len(errs) > 1 {
			continue // What failed is told by another one.
		}
		return fmt.Errorf("%s: %w", prefix, &RefusedError{what, absentOr(errs[i], i)})
	}
	return nil
}

// absentOr is ErrAbsent where the very beginning of a transaction is not understood.
func absentOr(err error, i int) error {
	if i == 0 && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)) {
		return ErrAbsent
	}
	return err
}

// Port is the number by which notifications know who has made a change.
func (c *Conn) Port() uint32 { return c.conn.Port() }
