package main

import (
	"net/netip"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
)

// programmingTimeout is for how long bench waits until rules are in place, far beyond any goal.
const programmingTimeout = 4 * time.Minute

// lab is a node with two pods: the client, and a server that answers at every address of endpointRange.
type lab struct {
	*harness.World
	client, server *harness.Pod
	servers        *probe.Server
}

// newLab makes a lab. Close removes it.
func newLab() (*lab, error) {
	w, err := harness.Build(harness.Options{Pods: []int{2}, Ports: []uint16{9}})
	if err != nil {
		return nil, err
	}
	l := &lab{World: w, client: w.Pod("n1a"), server: w.Pod("n1b")}
	// The clients reset connections by the hundred thousand. Kept for the usual ten seconds, they would fill the kernel's
	// table, and what is measured would depend on what was measured before.
	if err := l.Node1().Sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1"); err != nil {
		l.Close()
		return nil, err
	}
	if err := l.server.Take(endpointRange); err != nil {
		l.Close()
		return nil, err
	}
	if l.servers, err = probe.Serve(l.server.Netns, endpointPort, answer); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Close ends everything in the lab and removes it.
func (l *lab) Close() {
	if l.servers != nil {
		l.servers.Close()
	}
	_ = l.World.Close()
}

// pod is an address that no service has to do with.
func (l *lab) pod() netip.AddrPort { return netip.AddrPortFrom(l.server.IP4, endpointPort) }

// start runs nodeproxy on the node and waits until it reports the rules to be in sync. It returns how long that took,
// from before the process existed.
func (l *lab) start(variant harness.Variant) (*harness.Daemon, time.Duration, error) {
	begun := time.Now()
	d, err := l.StartDaemon(l.Node1(), daemonFlags(variant)...)
	if err != nil {
		return nil, 0, err
	}
	err = d.WaitFor(programmingTimeout, harness.InSync)
	return d, time.Since(begun), err
}

func daemonFlags(variant harness.Variant) []string {
	return []string{"--iptables-backend=" + string(variant), "--cluster-cidr=" + podRange.String()}
}
