package nft

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// watchBuffer is room for the notifications of a large transaction of our own, one for each element.
const watchBuffer = 16 << 20

// Watch opens a socket in the network namespace of the caller's thread, and returns a function that calls tell with each notification
// of a change of the tables of a name until ctx ends, with the port of the socket of who made it, and lost where notifications were lost.
func Watch(table string) (func(ctx context.Context, tell func(f plan.Family, port uint32), lost func(error)), error) {
	subscription, err := netlink.Subscribe(unix.NETLINK_NETFILTER, watchBuffer, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, fmt.Errorf("watching tables %s of nftables: %w", table, err)
	}
	return func(ctx context.Context, tell func(plan.Family, uint32), lost func(error)) {
		subscription.Follow(ctx, func(h netlink.Header, body []byte) {
			const header = 4 // struct nfgenmsg, which begins with the family
			if h.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(body) < header || h.Type&0xff == unix.NFT_MSG_NEWGEN ||
				netlink.Text(netlink.Attribute(body[header:], tableAttr)) != table {
				return
			}
			for _, f := range plan.Families {
				if Protocol(f) == body[0] {
					tell(f, h.Port)
				}
			}
		}, lost)
	}, nil
}
