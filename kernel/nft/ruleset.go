package nft

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Ruleset reads the rules of all programs, those of the nft variant of iptables among them, in the network namespace of the calling
// thread.
type Ruleset struct {
	conn    *nftables.Conn
	dormant map[ChainID]bool // tables, without a chain
	chains  map[ChainID]*nftables.Chain
	rules   map[ChainID][][]expr.Any
	sets    map[setName]*setContent
}

type setName struct{ family, table, set string }

// setContent is a set; its list is nil where that can't be told.
type setContent struct {
	interval bool
	list     []nftables.SetElement
}

// ChainID names a chain. Family is ip, ip6 or inet.
type ChainID struct{ Family, Table, Chain string }

func (c ChainID) String() string {
	return fmt.Sprintf("chain %s of table %s %s", c.Chain, c.Family, c.Table)
}

// BaseChain is a chain that the kernel calls.
type BaseChain struct {
	ChainID
	// Hook is as in Hook, and so is Type.
	Type, Hook string
	Priority   int32
	// Drops says that the policy is to drop.
	Drops bool
}

var familyNames = map[nftables.TableFamily]string{
	nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6", nftables.TableFamilyINet: "inet",
}

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
		if family := familyNames[c.Table.Family]; family != "" {
			r.chains[ChainID{family, c.Table.Name, c.Name}] = c
		}
	}
	return r, nil
}

// Bases returns the base chains of the hooks of IP, in no order.
func (r *Ruleset) Bases() []BaseChain {
	var out []BaseChain
	for id, c := range r.chains {
		if c.Hooknum == nil || c.Priority == nil || r.dormant[ChainID{Family: id.Family, Table: id.Table}] {
			continue
		}
		b := BaseChain{ChainID: id, Type: string(c.Type), Priority: int32(*c.Priority), Drops: c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop}
		for name, number := range hookNumbers {
			if number == uint32(*c.Hooknum) {
				b.Hook = name
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

// Contains reports whether a set of a chain's table has an element; known is false where that can't be told.
func (r *Ruleset) Contains(id ChainID, set string, key []byte) (is, known bool) {
	s := r.set(id, set)
	if s.list == nil {
		return false, false
	}
	if !s.interval {
		for _, e := range s.list {
			if len(e.Key) != len(key) { // A concatenation.
				return false, false
			}
			is = is || string(e.Key) == string(key)
		}
		return is, true
	}
	// The elements are the ends of intervals, in any order: the one at or before the key says whether it is within.
	var before *nftables.SetElement
	for i, e := range s.list {
		if len(e.Key) != len(key) {
			return false, false
		}
		if string(e.Key) <= string(key) && (before == nil || string(e.Key) > string(before.Key) || string(e.Key) == string(before.Key) && !e.IntervalEnd) {
			before = &s.list[i]
		}
	}
	return before != nil && !before.IntervalEnd, true
}

// set reads a set of a chain's table, once.
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
	s, err := r.conn.GetSetByName(c.Table, set)
	if err != nil || s.IsMap || s.Concatenation {
		return out
	}
	list, err := r.conn.GetSetElements(s)
	if err == nil {
		out.interval, out.list = s.Interval, append([]nftables.SetElement{}, list...)
	}
	return out
}

// Close closes the socket.
func (r *Ruleset) Close() error { return r.conn.CloseLasting() }
