package host

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Policy is a policy of IPsec by which the kernel sends nothing (RFC 4301).
type Policy struct {
	// From and To are the packets that it is for, and Incoming whether these are taken rather than sent.
	From, To netip.Prefix
	Incoming bool
	// Peer is that with which no keys have been agreed, so that nothing can be encrypted for it; invalid where the policy is to block.
	Peer netip.Addr
}

func (p Policy) String() string {
	why := "action block"
	if p.Peer.IsValid() {
		why = fmt.Sprintf("it has to be encrypted for %s, with which no keys have been agreed", p.Peer)
	}
	return fmt.Sprintf("%s to %s: %s", p.From, p.To, why)
}

// Shut returns the policies of IPsec for any protocol by which packets to other hosts, or between these, are dropped: those that block, and those for
// which packets wait for a security association.
func Shut() (out []Policy, err error) {
	keyed := keyManager()
	for _, f := range plan.Families {
		policies, err := List(func() ([]links.XfrmPolicy, error) { return links.XfrmPolicyList(int(netlink.Family(f))) })
		var states []links.XfrmState
		if err == nil && len(policies) > 0 {
			states, err = List(func() ([]links.XfrmState, error) { return links.XfrmStateList(int(netlink.Family(f))) })
		}
		if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) { // The kernel has no IPsec.
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("listing the policies of IPsec: %w", err)
		}
		for _, p := range policies {
			one := Policy{From: prefixOf(p.Src), To: prefixOf(p.Dst), Incoming: p.Dir != links.XFRM_DIR_OUT}
			some := p.Dir == links.XFRM_DIR_IN || p.Proto != 0 || p.SrcPort != 0 || p.DstPort != 0 || p.Ifindex != 0 || p.Ifid != 0 || p.Mark != nil
			if some || p.Dir > links.XFRM_DIR_FWD || !one.From.IsValid() || !one.To.IsValid() || preceded(p, policies) {
				continue
			}
			if p.Action != links.XFRM_POLICY_BLOCK {
				if one.Peer = unkeyed(p, states, keyed); !one.Peer.IsValid() {
					continue
				}
			}
			out = append(out, one)
		}
	}
	return out, nil
}

// preceded reports whether another policy comes first for some of the same packets.
func preceded(p links.XfrmPolicy, all []links.XfrmPolicy) bool {
	return slices.ContainsFunc(all, func(o links.XfrmPolicy) bool {
		return o.Dir == p.Dir && o.Priority < p.Priority && prefixOf(o.Src).Overlaps(prefixOf(p.Src)) && prefixOf(o.Dst).Overlaps(prefixOf(p.Dst))
	})
}

// keyManager reports whether a program waits to be asked for keys, by XFRMNLGRP_ACQUIRE; also where that can't be read.
func keyManager() bool {
	const acquire = 1 // the first group
	text, err := os.ReadFile("/proc/thread-self/net/netlink")
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line) // The second is the protocol, and the fourth has the groups.
		if len(f) < 4 || f[1] != strconv.Itoa(unix.NETLINK_XFRM) {
			continue
		}
		if groups, err := strconv.ParseUint(f[3], 16, 32); err == nil && groups&acquire != 0 {
			return true
		}
	}
	return err != nil
}

// unkeyed returns the peer for which a policy asks that packets are protected, where they wait for keys that have not been agreed, or nobody is there to
// agree on any; invalid if there is none.
func unkeyed(p links.XfrmPolicy, states []links.XfrmState, manager bool) netip.Addr {
	if p.Dir != links.XFRM_DIR_OUT { // What comes is not expected to be protected everywhere.
		return netip.Addr{}
	}
	for _, t := range p.Tmpls {
		peer := addrOf(t.Dst)
		if !peer.IsValid() || t.Optional != 0 {
			continue
		}
		waits, has := !manager, false
		for _, s := range states {
			to := s.Dst.Equal(t.Dst) && s.Proto == t.Proto
			waits, has = waits || to && s.Spi == 0, has || to && s.Spi != 0
		}
		if waits && !has {
			return peer
		}
	}
	return netip.Addr{}
}
