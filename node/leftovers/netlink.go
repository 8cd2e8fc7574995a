package leftovers

import (
	"bytes"
	"errors"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// absent reports whether an error says that the kernel has no such subsystem, so that there is nothing to list.
func absent(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// tables lists the nftables tables of all families.
func tables() ([]*nftables.Table, error) {
	c, err := nftables.New()
	if err == nil {
		var list []*nftables.Table
		if list, err = c.ListTables(); err == nil {
			return list, nil
		}
	}
	if absent(err) {
		return nil, nil
	}
	return nil, err
}

// deleteTable deletes a table with all that is in it.
func deleteTable(t *nftables.Table) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.DelTable(t)
	return c.Flush()
}

// What golang.org/x/sys/unix and vishvananda/netlink lack of linux/netfilter/nfnetlink_acct.h.
const (
	subsystemAccounting = 7 // NFNL_SUBSYS_ACCT
	accountingGet       = 1 // NFNL_MSG_ACCT_GET
	accountingDelete    = 3 // NFNL_MSG_ACCT_DEL
	accountingName      = 1 // NFACCT_NAME
)

// accounting makes a request about accounting objects.
func accounting(message, flags int, name string) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(subsystemAccounting<<8|message, flags)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	if name != "" {
		r.AddData(nl.NewRtAttr(accountingName, nl.ZeroTerminated(name)))
	}
	return r
}

// dumpTries is how often a list is asked for that changes while the kernel makes it.
const dumpTries = 5

// counters lists the accounting objects.
func counters() ([]string, error) {
	answers, err := [][]byte(nil), error(netlink.ErrDumpInterrupted)
	for try := 0; try < dumpTries && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
		answers, err = accounting(accountingGet, unix.NLM_F_DUMP, "").Execute(unix.NETLINK_NETFILTER, 0)
	}
	if err != nil {
		if absent(err) {
			return nil, nil
		}
		return nil, err
	}
	var out []string
	for _, a := range answers {
		attributes, err := nl.ParseRouteAttr(a[nl.SizeofNfgenmsg:])
		if err != nil {
			return nil, err
		}
		for _, at := range attributes {
			if at.Attr.Type == accountingName {
				out = append(out, string(bytes.TrimRight(at.Value, "\x00")))
			}
		}
	}
	return out, nil
}

func deleteCounter(name string) error {
	_, err := accounting(accountingDelete, unix.NLM_F_ACK, name).Execute(unix.NETLINK_NETFILTER, 0)
	return err
}
