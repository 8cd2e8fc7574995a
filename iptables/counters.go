package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// InvalidDropped returns how many packets KUBE-FORWARD has dropped since connection tracking took them for invalid, in
// both families. It lists that one chain, which takes a few milliseconds whatever the number of Services. The number begins
// at zero again when the chain is written, and is zero before it is there.
func (b *Backend) InvalidDropped() (uint64, error) {
	var sum uint64
	for _, e := range b.engines {
		t, ok := e.tool.(*tool)
		if !ok {
			continue
		}
		rules, err := listChain(t, names.Filter, names.Forward)
		if err != nil {
			return 0, err
		}
		for _, rule := range rules {
			if strings.Contains(rule, " --ctstate INVALID ") && strings.HasSuffix(rule, " -j DROP") {
				sum += counted(rule)
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
	for _, e := range b.engines {
		t, ok := e.tool.(*tool)
		if !ok || e.family != plan.IPv4 {
			continue
		}
		rules, err := listChain(t, names.NAT, names.Services)
		if err != nil {
			return 0, 0, err
		}
		for _, rule := range rules {
			switch {
			case !strings.HasPrefix(rule, "-A "+names.Services+" -d 127."):
			case strings.HasSuffix(rule, " -j "+names.NodePorts):
				led += counted(rule)
			case strings.HasSuffix(rule, " -j RETURN"):
				back += counted(rule)
			}
		}
	}
	return led, back, nil
}

// listChain lists a chain with counters; nothing if there is no such chain.
func listChain(t *tool, tbl names.Table, name string) ([]string, error) {
	ctx := context.Background()
	rules, err := t.list(ctx, tbl, name)
	if err == nil {
		return rules, nil
	}
	// What is said of a chain that does not exist differs from version to version.
	if failed := (*readError)(nil); errors.As(err, &failed) && !t.hasChain(ctx, tbl, name) {
		return nil, nil
	}
	return nil, fmt.Errorf("listing chain %s of %s: %w", name, t.family, err)
}

// hasChain reports whether a table has a chain; true where that is not known.
func (t *tool) hasChain(ctx context.Context, tbl names.Table, name string) bool {
	if t.variant == NFT {
		names, err := nftChains(t.family, tbl)
		return err != nil || slices.Contains(names, name)
	}
	all, err := t.list(ctx, tbl)
	return err != nil || slices.Contains(all, "-N "+name)
}

// list lists chains of a table with counters, a line for each chain and rule: all of them, or one of that name.
func (t *tool) list(ctx context.Context, tbl names.Table, name ...string) ([]string, error) {
	args := append([]string{"-t", string(tbl), "-v", "-S"}, name...)
	if t.variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	var lines []string
	err := t.read(ctx, t.path, "", func(out io.Reader) error {
		return eachLine(out, func(line string) { lines = append(lines, line) })
	}, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.path, err)
	}
	return lines, nil
}

// counted reads the number of packets of a rule, as in
// "-A KUBE-FORWARD -m conntrack --ctstate INVALID -c 3 156 -j DROP".
func counted(rule string) uint64 {
	_, after, _ := strings.Cut(rule, " -c ")
	text, _, _ := strings.Cut(after, " ")
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0 // The line of the chain itself.
	}
	return n
}
