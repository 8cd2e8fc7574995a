package nftrules

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// guardWatch reads notifications of nf_tables. They come in transactions, each of which ends with the number of the new generation.
type guardWatch struct {
	changed func(plan.Family)
	touched map[plan.Family]bool // in the transaction so far
}

// WatchGuards opens a socket in the network namespace of the calling thread. It returns a function that calls changed, until ctx
// ends, after each transaction that concerns a guard of marks or the table of a Ports, and when notifications were lost.
func WatchGuards() (func(ctx context.Context, changed func(plan.Family)), error) {
	subscription, err := netlink.Subscribe(unix.NETLINK_NETFILTER, 0, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, fmt.Errorf("watching nftables tables %s: %w", names.IPVSMarks, err)
	}
	return func(ctx context.Context, changed func(plan.Family)) {
		w := &guardWatch{changed: changed, touched: map[plan.Family]bool{}}
		subscription.Follow(ctx, w.message, func(error) {
			for _, f := range plan.Families {
				changed(f)
			}
		})
	}, nil
}

func (w *guardWatch) message(h netlink.Header, body []byte) {
	const header = 4 // struct nfgenmsg, which begins with the family
	if h.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(body) < header {
		return
	}
	switch h.Type & 0xff {
	case unix.NFT_MSG_NEWGEN:
		for _, f := range plan.Families {
			if w.touched[f] {
				w.changed(f)
			}
		}
		clear(w.touched)
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE, unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		// This attribute is the table's name in each of these.
		if name := netlink.Text(netlink.Attribute(body[header:], unix.NFTA_TABLE_NAME)); name != names.IPVSMarks && name != names.IPVSPorts {
			return
		}
		for _, f := range plan.Families {
			if nft.Protocol(f) == body[0] {
				w.touched[f] = true
			}
		}
	}
}
