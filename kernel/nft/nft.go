// Package nft reads and changes the kernel's nftables objects of IPv4 and IPv6, in the network namespace of the calling thread. It does
// not decide what they are.
package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// ErrAbsent is the error of a kernel without nftables.
var ErrAbsent = errors.New("this kernel has no nftables (module nf_tables)")

// absent returns ErrAbsent instead of the errors with which a kernel without nftables answers.
func absent(err error) error {
	for _, no := range []error{unix.EINVAL, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
		if errors.Is(err, no) {
			return ErrAbsent
		}
	}
	return err
}

// Protocol returns the number by which nftables knows a family.
func Protocol(f plan.Family) byte {
	if f == plan.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// FamilyName returns the name of a family in the language of nft.
func FamilyName(f plan.Family) string {
	if f == plan.IPv6 {
		return "ip6"
	}
	return "ip"
}

// list opens a Conn and collects what read returns for each object of one kind in a table, or with an empty name in all tables. Without
// nftables, the error is ErrAbsent.
func list[T any](f plan.Family, table string, get uint16, more func(netlink.Buffer) netlink.Buffer, read func(attrs []byte) T) ([]T, error) {
	c, err := Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return listBy(c, f, table, get, more, read)
}

// listBy is list by a Conn.
func listBy[T any](c *Conn, f plan.Family, table string, get uint16, more func(netlink.Buffer) netlink.Buffer, read func(attrs []byte) T) (out []T, err error) {
	err = c.dump(f, table, get, more, func() { out = nil }, func(attrs []byte) { out = append(out, read(attrs)) })
	return out, err
}

// Tables returns the names of the tables of a family. Without nftables, the error is ErrAbsent.
func Tables(f plan.Family) ([]string, error) {
	c, err := Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Tables(f)
}

// Tables is the function of that name by this Conn.
func (c *Conn) Tables(f plan.Family) ([]string, error) {
	return listBy(c, f, "", unix.NFT_MSG_GETTABLE, nil, func(attrs []byte) string {
		return netlink.Text(netlink.Attribute(attrs, unix.NFTA_TABLE_NAME))
	})
}

// Chains returns the names of the chains of a table. There are none if the table does not exist.
func Chains(f plan.Family, table string) ([]string, error) {
	return list(f, table, unix.NFT_MSG_GETCHAIN, nil, func(attrs []byte) string {
		return netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_NAME))
	})
}

// Rules returns what read returns for the attributes of each rule of a chain, or with an empty name of all chains of a table. The
// attributes are valid only during the call. There are no rules if the table or chain does not exist.
func Rules[T any](f plan.Family, table, chain string, read func(attrs []byte) T) ([]T, error) {
	if chain == "" {
		return list(f, table, unix.NFT_MSG_GETRULE, nil, read)
	}
	return list(f, table, unix.NFT_MSG_GETRULE, func(b netlink.Buffer) netlink.Buffer { return b.Text(unix.NFTA_RULE_CHAIN, chain) }, read)
}

// Digests returns a number for each of some chains of a table, in their order. It is another one where a chain's rules are: if any is added,
// removed or replaced, also by an equal one. What the rules count does not matter. A chain that does not exist has the number of one
// without rules. Numbers are comparable within one process.
func Digests(f plan.Family, table string, chains []string) ([]uint64, error) {
	c, err := Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var h maphash.Hash
	h.SetSeed(digestSeed)
	out := make([]uint64, len(chains))
	for i, chain := range chains {
		ofChain := func(b netlink.Buffer) netlink.Buffer { return b.Text(unix.NFTA_RULE_CHAIN, chain) }
		if err := c.dump(f, table, unix.NFT_MSG_GETRULE, ofChain, h.Reset, func(attrs []byte) { digest(&h, attrs) }); err != nil {
			return nil, err
		}
		out[i] = h.Sum64()
	}
	return out, nil
}

var digestSeed = maphash.MakeSeed()

// digest adds a rule to a digest, given its attributes, but for what it counts.
func digest(h *maphash.Hash, attrs []byte) {
	add := func(kind uint16, value []byte) {
		var head [4]byte
		binary.NativeEndian.PutUint16(head[:], kind)
		binary.NativeEndian.PutUint16(head[2:], uint16(len(value)))
		_, _ = h.Write(head[:])
		_, _ = h.Write(value)
	}
	for kind, value := range netlink.Attributes(attrs) {
		if kind != unix.NFTA_RULE_EXPRESSIONS {
			add(kind, value)
			continue
		}
		for kind, expr := range netlink.Attributes(value) {
			if isCounter(expr) {
				expr = nil
			}
			add(kind, expr)
		}
	}
}

// Generation returns a number that changes whenever anything in nf_tables changes.
func (c *Conn) Generation() (uint32, error) {
	answer, err := c.conn.Ask(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Body: netlink.Buffer{0, 0, 0, 0}})
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of nf_tables: %w", absent(err))
	}
	raw := netlink.Attribute(answer[min(headerLen, len(answer)):], unix.NFTA_GEN_ID)
	if len(raw) != 4 {
		return 0, errors.New("asking for the generation of nf_tables: the kernel does not tell it")
	}
	return binary.BigEndian.Uint32(raw), nil
}

// commit opens a Conn and carries out a transaction.
func commit(b *Batch) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Commit(b)
}

// DeleteTable deletes a table with everything in it, in one step. The error for a table that does not exist is ENOENT.
func DeleteTable(f plan.Family, name string) error {
	b := NewBatch(f, name)
	b.DeleteTable()
	return commit(b)
}

// DeleteRule deletes a rule by its handle. The error for a rule that does not exist is ENOENT.
func DeleteRule(f plan.Family, table, chain string, handle uint64) error {
	b := NewBatch(f, table)
	b.DeleteRule(chain, handle)
	return commit(b)
}

// FamiliesWith returns the families that have a table of a name in the network namespace of the calling thread.
func FamiliesWith(name string) ([]plan.Family, error) {
	c, err := Dial()
	if errors.Is(err, ErrAbsent) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.FamiliesWith(name)
}

// FamiliesWith is the function of that name by this Conn.
func (c *Conn) FamiliesWith(name string) ([]plan.Family, error) {
	var out []plan.Family
	for _, f := range plan.Families {
		names, err := c.Tables(f)
		if err != nil && !errors.Is(err, ErrAbsent) {
			return nil, fmt.Errorf("listing nftables tables: %w", err)
		}
		if slices.Contains(names, name) {
			out = append(out, f)
		}
	}
	return out, nil
}

// RemoveTables removes the tables of a name in both families, if they exist.
func RemoveTables(name string) error {
	c, err := Dial()
	if errors.Is(err, ErrAbsent) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.Close()
	return c.RemoveTables(name)
}

// RemoveTables is the function of that name by this Conn.
func (c *Conn) RemoveTables(name string) error {
	families, err := c.FamiliesWith(name)
	errs := []error{err}
	for _, f := range families {
		b := NewBatch(f, name)
		b.DeleteTable()
		if err := c.Commit(b); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("removing nftables table %s %s: %w", FamilyName(f), name, err))
		}
	}
	return errors.Join(errs...)
}
