// Package nfacct lists and deletes the kernel's accounting objects, which rules of iptables count packets with.
package nfacct

import (
	"errors"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// What golang.org/x/sys/unix lacks of linux/netfilter/nfnetlink_acct.h.
const (
	msgGet    = unix.NFNL_SUBSYS_ACCT<<8 | 1
	msgDelete = unix.NFNL_SUBSYS_ACCT<<8 | 3
	attrName  = 1
)

// headerLen is the length of the header of nfnetlink.
const headerLen = 4

func header() netlink.Buffer { return netlink.Buffer{unix.AF_UNSPEC, 0, 0, 0} }

// List returns the names of the accounting objects in the network namespace of the calling thread. A kernel without accounting has
// none.
func List() ([]string, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	var names []string
	err = netlink.Retry(func() error {
		names = nil
		return c.Dump(netlink.Message{Type: msgGet, Body: header()}, func(body []byte) error {
			names = append(names, netlink.Text(netlink.Attribute(body[min(headerLen, len(body)):], attrName)))
			return nil
		})
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	return names, err
}

// Delete deletes an accounting object. The error of one that a rule counts with is EBUSY, and that of none ENOENT.
func Delete(name string) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer c.Close()
	if errs := c.Do(netlink.Message{Type: msgDelete, Body: header().Text(attrName, name)}); errs != nil {
		return errs[0]
	}
	return nil
}
