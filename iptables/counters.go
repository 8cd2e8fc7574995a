package iptables

import (
	"strings"
	"sync"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// InvalidDropped returns how many packets KUBE-FORWARD has dropped since connection tracking took them for invalid, in
// both families. It lists that one chain, which takes a few milliseconds whatever the number of Services. The number begins
// at zero again when the chain is written, and is zero before it is there.
func (b *Backend) InvalidDropped() (uint64, error) {
	var sum uint64
	for _, e := range b.Engines {
		t, ok := e.Kernel.(*xtables.Program)
		if !ok {
			continue
		}
		rules, err := xtables.ListChain(t, names.Filter, names.Forward)
		if err != nil {
			return 0, err
		}
		for _, rule := range rules {
			if strings.Contains(rule, " --ctstate INVALID ") && strings.HasSuffix(rule, " -j DROP") {
				_, packets := xtables.Counted(rule)
				sum += packets
			}
		}
	}
	return sum, nil
}

// LocalhostNodePorts returns what reads how many connections node ports at loopback addresses have accepted: the packets
// that begin one, as in kube-proxy. It lists one chain of table nat, which takes milliseconds on the nft variant; the legacy
// one reads the whole table for it. The number begins at zero again when the chain is written.
func (b *Backend) LocalhostNodePorts() func() (uint64, error) {
	var mu sync.Mutex
	var last, lastLed uint64
	return func() (uint64, error) {
		mu.Lock()
		defer mu.Unlock()
		led, back, err := b.localhostNodePorts()
		if err != nil {
			return 0, err
		}
		n := led - min(led, back)
		if led >= lastLed {
			// A packet that came while the kernel listed the rules may be in the second counter and not in the first one.
			n = max(n, last)
		}
		last, lastLed = n, led
		return n, nil
	}
}

// localhostNodePorts returns how many packets for loopback addresses were led to the node ports, and how many came back.
func (b *Backend) localhostNodePorts() (led, back uint64, err error) {
	for _, e := range b.Engines {
		t, ok := e.Kernel.(*xtables.Program)
		if !ok || e.family != plan.IPv4 {
			continue
		}
		rules, err := xtables.ListChain(t, names.NAT, names.Services)
		if err != nil {
			return 0, 0, err
		}
		for _, rule := range rules {
			_, packets := xtables.Counted(rule)
			switch {
			case !strings.HasPrefix(rule, "-A "+names.Services+" -d 127."):
			case strings.HasSuffix(rule, " -j "+names.NodePorts):
				led += packets
			case strings.HasSuffix(rule, " -j RETURN"):
				back += packets
			}
		}
	}
	return led, back, nil
}
