package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// Ruleset reads the rules of all programs, those of the nft variant of iptables among them, in the network namespace of the calling
// thread.
type Ruleset struct {
	conn    *nftables.Conn
	dormant map[ChainID]bool // tables, without a chain
	chains  map[ChainID]*nftables.Chain
	rules   map[ChainID][][]expr.Any
	sets    map[setName]*setContent
	// Devices are the chains that devices call, at the hooks ingress and egress, and devices are the names of these.
	Devices []ChainID
	devices map[ChainID][]string
	// Asked is of how many chains and sets the kernel has been asked for what is in them.
	Asked int
}

type setName struct{ family, table, set string }

// setContent is a set or a map; known is false where its elements can't be told.
type setContent struct {
	set             *nftables.Set // nil if it can't be read
	asked           bool          // for its elements
	known, interval bool
	// list has the elements in order of their keys, and in an interval set the ends of intervals, each before what begins there.
	list []nftables.SetElement
	// others is the element for all keys that no other has; nil if there is none.
	others *nftables.SetElement
}

// ChainID names a chain. Family is ip, ip6, inet, bridge or netdev.
type ChainID struct{ Family, Table, Chain string }

func (c ChainID) String() string {
	return fmt.Sprintf("chain %s of table %s %s", c.Chain, c.Family, c.Table)
}

// BaseChain is a chain that the kernel calls.
type BaseChain struct {
	ChainID
	// Hook is as in Hook, or ingress, and so is Type.
	Type, Hook string
	// Devices are the interfaces that call it at the hook ingress.
	Devices  []string
	Priority int32
	// Drops says that the policy is to drop.
	Drops bool
}

var familyNames = map[nftables.TableFamily]string{
	nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6", nftables.TableFamilyINet: "inet", nftables.TableFamilyNetdev: "netdev",
	nftables.TableFamilyBridge: "bridge",
}

// inetIngress is the hook ingress of tables of family inet, NF_INET_INGRESS.
const inetIngress = 5

// ReadRuleset lists all chains. Their rules are read when they are asked for.
func ReadRuleset() (*Ruleset, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, err
	}
	tables, err := conn.ListTables()
	if err != nil {
		return nil, fmt.Errorf("listing the tables of nftables: %w", absent(err))
	}
	dormant := map[ChainID]bool{}
	for _, t := range tables {
		flags := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, t.Flags)) // The library takes it for a native number.
		if flags&unix.NFT_TABLE_F_DORMANT != 0 {
			dormant[ChainID{Family: familyNames[t.Family], Table: t.Name}] = true
		}
	}
	list, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("listing the chains of nftables: %w", absent(err))
	}
	r := &Ruleset{conn: conn, dormant: dormant, chains: map[ChainID]*nftables.Chain{}, rules: map[ChainID][][]expr.Any{}, sets: map[setName]*setContent{}}
	for _, c := range list {
		family := familyNames[c.Table.Family]
		if family != "" {
			r.chains[ChainID{family, c.Table.Name, c.Name}] = c
		}
		if c.Hooknum != nil && (family == "netdev" || family == "inet" && *c.Hooknum == inetIngress) {
			r.Devices = append(r.Devices, ChainID{family, c.Table.Name, c.Name})
		}
	}
	if len(r.Devices) > 0 {
		if r.devices, err = devices(); err != nil {
			return nil, fmt.Errorf("listing the chains of devices: %w", err)
		}
	}
	return r, nil
}

// devices returns the names of the devices that call chains, which the library does not read.
func devices() (map[ChainID][]string, error) {
	const names, name = 4, 1 // NFTA_HOOK_DEVS, NFTA_DEVICE_NAME
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	out := map[ChainID][]string{}
	for _, f := range []nftables.TableFamily{nftables.TableFamilyINet, nftables.TableFamilyNetdev} {
		err := c.Dump(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETCHAIN, Body: netlink.Buffer{byte(f), 0, 0, 0}}, func(body []byte) error {
			attrs := body[min(headerLen, len(body)):]
			hook := netlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK)
			id := ChainID{familyNames[f], netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_TABLE)), netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_NAME))}
			if dev := netlink.Attribute(hook, unix.NFTA_HOOK_DEV); dev != nil {
				out[id] = []string{netlink.Text(dev)}
			}
			for kind, dev := range netlink.Attributes(netlink.Attribute(hook, names)) {
				if of := netlink.Text(dev); kind == name && !slices.Contains(out[id], of) {
					out[id] = append(out[id], of)
				}
			}
			return nil
		})
		if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
			return nil, err
		}
	}
	return out, nil
}

// Bases returns the base chains of the hooks of IP and of bridges, and those that devices call at the hook ingress, in no order.
func (r *Ruleset) Bases() []BaseChain {
	var out []BaseChain
	for id, c := range r.chains {
		if c.Hooknum == nil || c.Priority == nil || r.dormant[ChainID{Family: id.Family, Table: id.Table}] {
			continue
		}
		b := BaseChain{ChainID: id, Type: string(c.Type), Priority: int32(*c.Priority), Drops: c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop}
		switch hook := uint32(*c.Hooknum); {
		case id.Family == "netdev" && hook == unix.NF_NETDEV_INGRESS, id.Family == "inet" && hook == inetIngress:
			b.Hook, b.Devices = "ingress", r.devices[id]
		case id.Family != "netdev":
			for name, number := range hookNumbers {
				if number == hook {
					b.Hook = name
				}
			}
		}
		if b.Hook != "" {
			out = append(out, b)
		}
	}
	return out
}

// Rules returns the expressions of each rule of a chain.
func (r *Ruleset) Rules(id ChainID) ([][]expr.Any, error) {
	if known, is := r.rules[id]; is {
		return known, nil
	}
	c := r.chains[id]
	if c == nil {
		return nil, nil
	}
	r.Asked++
	list, err := r.conn.GetRules(c.Table, c)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", id, err)
	}
	out := make([][]expr.Any, len(list))
	for i, rule := range list {
		out[i] = rule.Exprs
	}
	r.rules[id] = out
	return out, nil
}

// KeyLen returns the length of the keys of a set of a chain's table, in bytes; 0 if that is not known.
func (r *Ruleset) KeyLen(id ChainID, set string) int {
	if s := r.set(id, set); s.set != nil && !s.set.IsMap {
		return int(s.set.KeyType.Bytes)
	}
	// Of a map of verdicts, the library takes the type of the values for that of the keys.
	if s := r.content(id, set); len(s.list) > 0 {
		return len(s.list[0].Key)
	}
	return 0
}

// Contains reports whether a set of a chain's table has an element; known is false where that can't be told.
func (r *Ruleset) Contains(id ChainID, set string, key []byte) (is, known bool) {
	e, known := r.content(id, set).find(key)
	return e != nil, known
}

// Verdict returns the verdict that a map of a chain's table has for a key; nil if none. known is false where that can't be told.
func (r *Ruleset) Verdict(id ChainID, set string, key []byte) (v *expr.Verdict, known bool) {
	e, known := r.content(id, set).find(key)
	if e == nil {
		return nil, known
	}
	return verdictOf(e), true
}

// Verdicts returns the different verdicts that a map of a chain's table has; known is false where that can't be told.
func (r *Ruleset) Verdicts(id ChainID, set string) (list []expr.Verdict, known bool) {
	s := r.content(id, set)
	seen := map[expr.Verdict]bool{}
	add := func(e *nftables.SetElement) {
		if v := *verdictOf(e); !e.IntervalEnd && !seen[v] {
			seen[v] = true
			list = append(list, v)
		}
	}
	for i := range s.list {
		add(&s.list[i])
	}
	if s.others != nil {
		add(s.others)
	}
	return list, s.known
}

// verdictOf reads the verdict of an element of a map.
func verdictOf(e *nftables.SetElement) *expr.Verdict {
	code := netlink.Attribute(e.Val, unix.NFTA_VERDICT_CODE)
	if len(code) != 4 {
		return &expr.Verdict{Kind: expr.VerdictContinue}
	}
	return &expr.Verdict{Kind: expr.VerdictKind(int32(binary.BigEndian.Uint32(code))), Chain: netlink.Text(netlink.Attribute(e.Val, unix.NFTA_VERDICT_CHAIN))}
}

// find returns the element that a key finds; nil if none. known is false where that can't be told.
func (s *setContent) find(key []byte) (e *nftables.SetElement, known bool) {
	if !s.known || len(s.list) > 0 && len(s.list[0].Key) != len(key) {
		return nil, false
	}
	i, is := slices.BinarySearchFunc(s.list, key, func(e nftables.SetElement, key []byte) int { return bytes.Compare(e.Key, key) })
	for is && i+1 < len(s.list) && bytes.Equal(s.list[i+1].Key, key) {
		i++
	}
	if !is && s.interval { // The element before the key says whether it is within an interval.
		i--
	}
	if (is || s.interval) && i >= 0 && !s.list[i].IntervalEnd {
		return &s.list[i], true
	}
	return s.others, true
}

// set reads what a set of a chain's table is, once, but not its elements: lists of blocked sources are long, and what looks for a destination does
// without them.
func (r *Ruleset) set(id ChainID, set string) *setContent {
	name := setName{id.Family, id.Table, set}
	if known := r.sets[name]; known != nil {
		return known
	}
	out := &setContent{}
	r.sets[name] = out
	c := r.chains[id]
	if c == nil {
		return out
	}
	if s, err := r.conn.GetSetByName(c.Table, set); err == nil {
		out.set = s
	}
	return out
}

// content reads the elements of a set of a chain's table, once.
func (r *Ruleset) content(id ChainID, set string) *setContent {
	out := r.set(id, set)
	s := out.set
	if s == nil || out.asked || s.Concatenation && s.Interval {
		return out
	}
	out.asked = true
	r.Asked++
	list, err := r.conn.GetSetElements(s)
	if err != nil {
		return out
	}
	for i, e := range list {
		switch {
		case len(e.Key) == 0:
			out.others = &list[i]
		case e.KeyEnd != nil || len(out.list) > 0 && len(e.Key) != len(out.list[0].Key):
			return out
		default:
			out.list = append(out.list, e)
		}
	}
	slices.SortStableFunc(out.list, func(a, b nftables.SetElement) int {
		c := bytes.Compare(a.Key, b.Key)
		switch {
		case c != 0 || a.IntervalEnd == b.IntervalEnd:
			return c
		case a.IntervalEnd:
			return -1
		}
		return 1
	})
	out.known, out.interval = true, s.Interval
	return out
}

// Close closes the socket.
func (r *Ruleset) Close() error { return r.conn.CloseLasting() }
