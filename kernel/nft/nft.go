// Package nft reads and changes the kernel's nftables objects of IPv4 and IPv6, in the network namespace of the calling thread. It does
// not decide what they are.
package nft

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// ErrAbsent is the error of a kernel without nftables.
var ErrAbsent = errors.New("this kernel has no nftables (module nf_tables)")

// absent makes ErrAbsent of what a kernel without nftables answers.
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

func tableFamily(f plan.Family) nftables.TableFamily { return nftables.TableFamily(Protocol(f)) }

// Tables returns the names of the tables of a family. The error of a kernel without nftables is ErrAbsent.
func Tables(f plan.Family) ([]string, error) {
	c, err := nftables.New()
	var list []*nftables.Table
	if err == nil {
		list, err = c.ListTablesOfFamily(tableFamily(f))
	}
	if err != nil {
		return nil, absent(err)
	}
	var names []string
	for _, t := range list {
		names = append(names, t.Name)
	}
	return names, nil
}

// DeleteTable deletes a table with all that is in it, in one step. The error of one that is not there is ENOENT.
func DeleteTable(f plan.Family, name string) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.DelTable(&nftables.Table{Family: tableFamily(f), Name: name})
	return c.Flush()
}

// Chains returns the names of the chains of a table; none of a table that is not there.
func Chains(f plan.Family, table string) ([]string, error) {
	var names []string
	err := dump(f, table, "", unix.NFT_MSG_GETCHAIN, func(attrs []byte) {
		names = append(names, netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_NAME)))
	})
	return names, err
}

// Rules calls each with the attributes of each rule of a chain, or with an empty name of all chains of a table. They are valid during the
// call only. A table or chain that is not there has none.
func Rules(f plan.Family, table, chain string, each func(attrs []byte)) error {
	return dump(f, table, chain, unix.NFT_MSG_GETRULE, func(attrs []byte) {
		if chain == "" || netlink.Text(netlink.Attribute(attrs, unix.NFTA_RULE_CHAIN)) == chain {
			each(attrs)
		}
	})
}

// tableAttr is the type of the attribute with the name of the table, whatever a message is about.
const tableAttr = unix.NFTA_RULE_TABLE

// dump calls each with the attributes of all that a table, or a chain, has of one kind.
func dump(f plan.Family, table, chain string, get uint16, each func(attrs []byte)) error {
	const headerLen = 4
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("listing table %s of nf_tables (%s): %w", table, f, err)
	}
	defer c.Close()
	body := netlink.Buffer{Protocol(f), 0, 0, 0}.Text(tableAttr, table)
	if chain != "" {
		body = body.Text(unix.NFTA_RULE_CHAIN, chain)
	}
	err = c.Dump(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | get, Body: body}, func(body []byte) error {
		attrs := body[min(headerLen, len(body)):]
		if netlink.Text(netlink.Attribute(attrs, tableAttr)) == table {
			each(attrs)
		}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing table %s of nf_tables (%s): %w", table, f, err)
	}
	return nil
}

// DeleteRule deletes a rule by its handle. The error of one that is not there is ENOENT.
func DeleteRule(f plan.Family, table, chain string, handle uint64) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := &nftables.Table{Name: table, Family: tableFamily(f)}
	if err := c.DelRule(&nftables.Rule{Table: t, Chain: &nftables.Chain{Name: chain, Table: t}, Handle: handle}); err != nil {
		return err
	}
	return c.Flush()
}
