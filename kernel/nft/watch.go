package nft

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// watchBuffer is the size, in bytes, of the buffer for notifications: each element in a transaction has one.
const watchBuffer = 16 << 20

// Change is what one transaction has changed in the watched tables of a family.
type Change struct {
	Family plan.Family
	// Port is the number of the socket that made the change (Conn.Port).
	Port uint32
	// ElementsOnly says that nothing but elements of sets has changed.
	ElementsOnly bool
}

// Notifications are those of nf_tables about all transactions, as a netlink.Subscription passes them on.
type Notifications interface {
	Follow(ctx context.Context, each func(h netlink.Header, body []byte), failed func(error))
}

// Subscribe opens a socket for notifications in the network namespace of the calling thread.
func Subscribe() (Notifications, error) {
	return netlink.Subscribe(unix.NETLINK_NETFILTER, watchBuffer, unix.NFNLGRP_NFTABLES)
}

// Watch opens a socket with subscribe, such as Subscribe. It returns a function that until ctx ends calls changed after each transaction that
// has changed one of the tables, and lost after notifications were lost.
func Watch(subscribe func() (Notifications, error), tables ...string) (func(ctx context.Context, changed func(Change), lost func(error)), error) {
	subscription, err := subscribe()
	if err != nil {
		return nil, fmt.Errorf("watching the nftables tables %s: %w", strings.Join(tables, ", "), err)
	}
	return func(ctx context.Context, changed func(Change), lost func(error)) {
		w := &watched{tables: tables, changed: changed, current: map[byte]Change{}}
		subscription.Follow(ctx, w.message, func(err error) {
			clear(w.current)
			lost(err)
		})
	}, nil
}

// watched makes changes of notifications.
type watched struct {
	tables  []string
	changed func(Change)
	current map[byte]Change // by the current transaction
}

func (w *watched) message(h netlink.Header, body []byte) {
	if h.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(body) < headerLen {
		return
	}
	switch kind := h.Type & 0xff; {
	case kind == unix.NFT_MSG_NEWGEN: // the end of a transaction
		for _, f := range plan.Families {
			if c, touched := w.current[Protocol(f)]; touched {
				c.Family = f
				w.changed(c)
			}
		}
		clear(w.current)
	case slices.Contains(w.tables, netlink.Text(netlink.Attribute(body[headerLen:], tableAttr))):
		c, touched := w.current[body[0]]
		elements := kind == unix.NFT_MSG_NEWSETELEM || kind == unix.NFT_MSG_DELSETELEM
		w.current[body[0]] = Change{Port: h.Port, ElementsOnly: elements && (!touched || c.ElementsOnly)}
	}
}
