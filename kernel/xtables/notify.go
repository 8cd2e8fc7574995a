package xtables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
)

// notifications are what the kernel sends about each change of nf_tables in this network namespace.
type notifications struct {
	subscription *netlink.Subscription
	tables       []watched
	// concern is the first change of a transaction that concerns us; the message at its end says who made it.
	concern string
}

// notifyBuffer is for how many bytes of notifications the socket has room. One sync may cause megabytes.
const notifyBuffer = 16 << 20

// openNotifications subscribes to the kernel's notifications.
func openNotifications(tables []watched) (*notifications, error) {
	s, err := netlink.Subscribe(unix.NETLINK_NETFILTER, notifyBuffer, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, fmt.Errorf("nf_tables: %w", err)
	}
	return &notifications{subscription: s, tables: tables}, nil
}

// follow reads notifications until ctx ends.
func (n *notifications) follow(ctx context.Context, suspect func(string)) {
	n.subscription.Follow(ctx, func(h netlink.Header, body []byte) { n.message(h, body, suspect) }, func(err error) {
		if errors.Is(err, unix.ENOBUFS) {
			suspect("notifications of nf_tables were lost")
		} else {
			suspect(fmt.Sprintf("reading notifications of nf_tables: %v", err))
		}
	})
}

func (n *notifications) message(h netlink.Header, body []byte, suspect func(string)) {
	const headerLen = 4 // of nfnetlink
	if h.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(body) < headerLen {
		return
	}
	own := func(t watched) bool { return t.tool.children.has(h.Port) }
	switch kind := h.Type & 0xff; {
	case kind == unix.NFT_MSG_NEWGEN:
		if n.concern != "" {
			suspect(n.concern + by(body[headerLen:]))
		}
		n.concern = ""
	case n.concern == "" && !slices.ContainsFunc(n.tables, own):
		n.concern = n.concerns(kind, body[0], body[headerLen:])
	}
}

// concerns says what of ours a change by another program may have to do with; empty if with nothing. In built-in chains, it
// is the removal of rules that lead to our chains. Rules that others add there are their business.
func (n *notifications) concerns(kind uint16, protocol byte, attrs []byte) string {
	name := func(attr uint16) string { return netlink.Text(netlink.Attribute(attrs, attr)) }
	t := names.Table(name(unix.NFTA_TABLE_NAME))
	i := slices.IndexFunc(n.tables, func(w watched) bool { return nft.Protocol(w.tool.Family) == protocol && w.table == t })
	if i < 0 {
		return ""
	}
	where := n.tables[i]
	switch kind {
	case unix.NFT_MSG_DELTABLE:
		return where.String() + " was removed"
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		if c := name(unix.NFTA_CHAIN_NAME); names.IsOurs(t, c) || names.Builtin(c) && kind == unix.NFT_MSG_DELCHAIN {
			return fmt.Sprintf("chain %s of %s was made or removed", c, where)
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		c := name(unix.NFTA_RULE_CHAIN)
		if names.IsOurs(t, c) || names.Builtin(c) && kind == unix.NFT_MSG_DELRULE && bytes.Contains(attrs, []byte("KUBE-")) {
			return fmt.Sprintf("a rule in chain %s of %s was added or removed", c, where)
		}
	}
	return ""
}

// by names who made a change, for people. The process id is as the host sees it.
func by(generation []byte) string {
	pid := netlink.Attribute(generation, unix.NFTA_GEN_PROC_PID)
	if len(pid) < 4 {
		return ""
	}
	return fmt.Sprintf(" by %s (process %d of the host)", netlink.Text(netlink.Attribute(generation, unix.NFTA_GEN_PROC_NAME)), binary.BigEndian.Uint32(pid))
}
