package main

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"nodeproxy/e2e/harness"
)

// programmingTimeout is for how long bench waits until rules are in place, far beyond any goal.
const programmingTimeout = 4 * time.Minute

// lab is a node with two pods: the client, and a server that answers at every address of endpointRange.
type lab struct {
	*harness.World
	client, server *harness.Pod
	servers        *servers
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
	if err := l.routeEndpoints(); err != nil {
		l.Close()
		return nil, err
	}
	if l.servers, err = serve(l.server.Netns, endpointPort); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Close ends everything in the lab and removes it.
func (l *lab) Close() {
	if l.servers != nil {
		l.servers.close()
	}
	_ = l.World.Close()
}

// routeEndpoints sends endpointRange from the node to the server, where all of it is local.
func (l *lab) routeEndpoints() error {
	dst := &net.IPNet{IP: endpointRange.Addr().AsSlice(), Mask: net.CIDRMask(endpointRange.Bits(), 32)}
	toServer, err := l.Node1().Netlink().LinkByName(harness.PodInterfacePrefix + l.server.Name)
	if err != nil {
		return fmt.Errorf("the node's interface to %s: %w", l.server.Name, err)
	}
	lo, err := l.server.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback of %s: %w", l.server.Name, err)
	}
	err = l.Node1().Netlink().RouteAdd(&netlink.Route{
		LinkIndex: toServer.Attrs().Index, Dst: dst, Gw: l.server.IP4.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
	})
	if err != nil {
		return fmt.Errorf("route to the endpoints: %w", err)
	}
	err = l.server.Netlink().RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: dst, Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL,
		Scope: netlink.SCOPE_HOST,
	})
	if err != nil {
		return fmt.Errorf("make the endpoints local in %s: %w", l.server.Name, err)
	}
	return nil
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
