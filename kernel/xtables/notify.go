package xtables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// notifications are what the kernel tells of each change of nf_tables in this network namespace.
type notifications struct {
	file   *os.File
	tables []watched
	// concern is the first change of a transaction that concerns us; the message at its end says who made it.
	concern string
}

// notifyBuffer is for how many bytes of notifications the socket has room. One sync may cause megabytes.
const notifyBuffer = 16 << 20

// openNotifications subscribes to the kernel's notifications.
func openNotifications(tables []watched) (*notifications, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, notifyBuffer) != nil {
		// As far as net.core.rmem_max allows. With less, more gets lost, and everything is compared more often.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, notifyBuffer)
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("subscribing to notifications of nf_tables: %w", err)
	}
	return &notifications{file: os.NewFile(uintptr(fd), "nf_tables notifications"), tables: tables}, nil
}

// follow reads notifications until ctx ends.
func (n *notifications) follow(ctx context.Context, suspect func(string)) {
	defer context.AfterFunc(ctx, func() { n.file.Close() })()
	buffer := make([]byte, 64<<10)
	for {
		size, err := n.file.Read(buffer)
		switch {
		case ctx.Err() != nil || errors.Is(err, os.ErrClosed):
			n.file.Close()
			return
		case errors.Is(err, unix.ENOBUFS):
			suspect("notifications of nf_tables were lost")
			continue
		case err != nil:
			suspect(fmt.Sprintf("reading notifications of nf_tables: %v", err))
			time.Sleep(time.Second) // an error that stays is not to keep a processor busy
			continue
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:size])
		if err != nil {
			suspect(fmt.Sprintf("reading notifications of nf_tables: %v", err))
			continue
		}
		for _, m := range messages {
			n.message(m, suspect)
		}
	}
}

func (n *notifications) message(m syscall.NetlinkMessage, suspect func(string)) {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < 4 {
		return
	}
	own := func(t watched) bool { return t.tool.children.has(m.Header.Pid) }
	switch kind := m.Header.Type & 0xff; {
	case kind == unix.NFT_MSG_NEWGEN:
		if n.concern != "" {
			suspect(n.concern + by(m.Data[4:]))
		}
		n.concern = ""
	case n.concern == "" && !slices.ContainsFunc(n.tables, own):
		n.concern = n.concerns(kind, m.Data[0], m.Data[4:])
	}
}

// The attributes of messages, as in linux/netfilter/nf_tables.h.
const (
	attrTable     = 1 // in messages about a table, chain or rule
	attrRuleChain = 2
	attrChainName = 3
	attrProcPID   = 2 // of a generation
	attrProcName  = 3
)

// concerns says what of ours a change by another program may have to do with; empty if with nothing. In built-in chains, it
// is the removal of rules that lead to our chains. Rules that others add there are their business.
func (n *notifications) concerns(kind uint16, protocol byte, attrs []byte) string {
	i := slices.IndexFunc(n.tables, func(t watched) bool { return nfProtocol(t.tool.Family) == protocol })
	if i < 0 {
		return ""
	}
	t := names.Table(text0(attribute(attrs, attrTable)))
	if !slices.Contains(n.tables[i].tables, t) {
		return ""
	}
	name := func(attr uint16) string { return text0(attribute(attrs, attr)) }
	where := fmt.Sprintf("table %s (%s)", t, n.tables[i].tool.Family)
	switch kind {
	case unix.NFT_MSG_DELTABLE:
		return where + " was removed"
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		if c := name(attrChainName); names.IsOurs(t, c) || names.Builtin(c) && kind == unix.NFT_MSG_DELCHAIN {
			return fmt.Sprintf("chain %s of %s was made or removed", c, where)
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		c := name(attrRuleChain)
		if names.IsOurs(t, c) || names.Builtin(c) && kind == unix.NFT_MSG_DELRULE && bytes.Contains(attrs, []byte("KUBE-")) {
			return fmt.Sprintf("a rule in chain %s of %s was added or removed", c, where)
		}
	}
	return ""
}

func nfProtocol(f plan.Family) byte {
	if f == plan.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// by names who made a change, for people. The process id is as the host sees it.
func by(generation []byte) string {
	pid := attribute(generation, attrProcPID)
	if len(pid) < 4 {
		return ""
	}
	return fmt.Sprintf(" by %s (process %d of the host)", text0(attribute(generation, attrProcName)), binary.BigEndian.Uint32(pid))
}

// attribute returns the content of the first attribute of a type; nil if there is none.
func attribute(b []byte, want uint16) []byte {
	for kind, content := range attributes(b) {
		if kind == want {
			return content
		}
	}
	return nil
}

// attributes are the types of attributes and their contents, up to one that is cut off.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	const header, kinds = 4, 0x3fff // the highest bits of the type are flags
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= header {
			size := int(binary.NativeEndian.Uint16(b))
			if size < header || size > len(b) || !yield(binary.NativeEndian.Uint16(b[2:])&kinds, b[header:size]) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}

// text0 is a text that may end with a NUL.
func text0(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
