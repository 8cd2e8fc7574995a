package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/probe"
	"nodeproxy/ipvs"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/topology"
)

// hostPort is a port at which a program listens on all addresses of the node.
const hostPort = 9999

// unusedVIP is an address of the range that no Service has.
var unusedVIP = nth(harness.ServiceCIDR4, 65000)

func vip(i int) netip.Addr { return nth(harness.ServiceCIDR4, 10+i) }

// cost is one thing that a value of --ipvs-vips costs, or does to packets.
type cost struct {
	what string
	took time.Duration // or else:
	text string
}

// vipLab is a node on which package ipvs works without a control plane, a neighbour of it, and what was measured.
type vipLab struct {
	*stage
	neighbour           *harness.Node
	way                 ipvs.VIPs
	services, endpoints int
	plan                *plan.Plan
	backend             *ipvs.Backend
	costs               []cost
}

// compareVIPs programs many Services on a node of their own for each value of --ipvs-vips, and prints how they differ. Each is measured
// three times, and the best time counts: what makes one longer has other causes.
func compareVIPs(ctx context.Context, o *options) error {
	if _, err := measureVIPs(ctx, min(o.vips, 100), o.endpoints, ipvs.Routes); err != nil { // The first run of every program takes longer.
		return err
	}
	var results [2][]cost
	for range 3 {
		for i, way := range []ipvs.VIPs{ipvs.Routes, ipvs.Addresses} {
			costs, err := measureVIPs(ctx, o.vips, o.endpoints, way)
			if err != nil {
				return fmt.Errorf("--ipvs-vips=%s: %w", way, err)
			}
			o.progress("--ipvs-vips=%s: %d Services programmed in %s, again in %s", way, o.vips, duration(costs[0].took), duration(costs[1].took))
			for j, was := range results[i] {
				costs[j].took = min(costs[j].took, was.took)
			}
			results[i] = costs
		}
	}
	t := newTable(os.Stdout)
	t.line(fmt.Sprintf("\n%d Services x %d endpoints, IPv4", o.vips, o.endpoints), "routes", "addresses")
	for i, c := range results[0] {
		t.line(c.what, c.String(), results[1][i].String())
	}
	return t.Flush()
}

func (c cost) String() string {
	if c.text != "" {
		return c.text
	}
	return duration(c.took)
}

func measureVIPs(ctx context.Context, services, endpoints int, way ipvs.VIPs) (costs []cost, err error) {
	w, err := harness.Build(harness.Options{Pods: []int{2, 0}, Ports: []uint16{}})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	stage, err := newStage(w.Node1(), endpointRange)
	if err != nil {
		return nil, err
	}
	defer stage.close()
	server, err := probe.Serve(stage.Netns, hostPort, probe.Greet)
	if err != nil {
		return nil, err
	}
	defer server.Close()
	l := &vipLab{stage: stage, neighbour: w.Nodes[1], way: way, services: services, endpoints: endpoints}
	l.plan = plan.New(plan.Node{Name: "node1", IPs: []netip.Addr{stage.IP4}}, plan.Settings{
		DetectLocal:  plan.DetectLocal{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix(podRange)}},
		ServiceCIDRs: []netip.Prefix{harness.ServiceCIDR4},
	})
	for i := range services {
		l.plan.Set(l.service(i, i*endpoints))
	}
	for _, step := range []func(context.Context) error{l.program, l.changeSome, l.list, l.observePackets, l.observeARP, l.remove} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return l.costs, nil
}

// service is the i-th ServicePort, with endpoints at the addresses that begin at the first-th.
func (l *vipLab) service(i, first int) *plan.ServicePort {
	var list []topology.Endpoint
	for n := range l.endpoints {
		list = append(list, topology.Endpoint{
			Addr: netip.AddrPortFrom(nth(endpointRange, 1+first+n), endpointPort), Ready: true, Serving: true, Node: "node2",
		})
	}
	return &plan.ServicePort{
		Key: plan.Key{
			Service: plan.Service{Namespace: namespace, Name: fmt.Sprintf("s%d", i)}, Protocol: plan.TCP, Family: plan.IPv4,
		},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: vip(i), Protocol: plan.TCP, Port: servicePort}},
		Endpoints: topology.Select(list, topology.Node{Name: "node1"}, topology.UseOf(plan.Cluster, plan.Cluster, false)),
	}
}

// timed does something in the node's namespace, and adds what it took.
func (l *vipLab) timed(what string, fn func() error) error {
	begun := time.Now()
	err := l.Do(fn)
	l.costs = append(l.costs, cost{what: what, took: time.Since(begun)})
	return err
}

func (l *vipLab) note(what, text string) { l.costs = append(l.costs, cost{what: what, text: text}) }

// program programs everything with a Backend that knows nothing of the kernel, as after a start, twice.
func (l *vipLab) program(ctx context.Context) error {
	slab, heap, err := memoryHeld()
	if err != nil {
		return err
	}
	sync := func() (err error) {
		l.backend, err = ipvs.New(ipvs.Config{
			Options:  ipvs.Options{MasqueradeBit: 14, VIPs: l.way},
			Families: []plan.Family{plan.IPv4},
			Log:      slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
		if err != nil {
			return err
		}
		return l.backend.Sync(ctx, l.plan, plan.Everything())
	}
	if err := l.timed("programming all", sync); err != nil {
		return err
	}
	slabNow, heapNow, err := memoryHeld()
	if err != nil {
		return err
	}
	held, err := virtualServers(l.Netns)
	if err == nil && len(held) != l.services {
		err = fmt.Errorf("%d virtual servers for %d Services", len(held), l.services)
	}
	if err != nil {
		return err
	}
	err = l.timed("starting anew over what is there", sync)
	l.note("memory of the kernel", mebibytes(slabNow-slab))
	l.note("memory of the process (heap)", mebibytes(heapNow-heap))
	return err
}

// memoryHeld is what the kernel's slabs hold, and what this process has on its heap.
func memoryHeld() (slab, heap float64, err error) {
	held, err := machine.Slab()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(held), float64(m.HeapAlloc), err
}

// changeSome replaces all endpoints of some Services, one Service at a time.
func (l *vipLab) changeSome(ctx context.Context) error {
	var took []time.Duration
	for i := range 50 {
		sp := l.service(i*stride%l.services, l.endpoints*l.services+i)
		l.plan.Set(sp)
		begun := time.Now()
		if err := l.Do(func() error { return l.backend.Sync(ctx, l.plan, plan.Only(plan.Keys{sp.Key: {}})) }); err != nil {
			return err
		}
		took = append(took, time.Since(begun))
	}
	l.costs = append(l.costs, cost{what: "one endpoint changed, p50", took: percentile(took, 0.5)})
	return nil
}

// list lists the node's addresses as people do.
func (l *vipLab) list(context.Context) (err error) {
	begun := time.Now()
	out, err := l.Output("ip", "-o", "-4", "address", "show")
	l.costs = append(l.costs, cost{what: "ip -o address show", took: time.Since(begun)})
	l.note("addresses of the node", fmt.Sprint(strings.Count(out, "\n")))
	return err
}

// remove removes the device with all that is on it. Meanwhile, nobody else can change a network interface or a route of the machine.
func (l *vipLab) remove(context.Context) error {
	return l.timed("removing kube-ipvs0", func() error { return host.RemoveDevice(names.Device) })
}

// observePackets makes connections, and notes what becomes of them.
func (l *vipLab) observePackets(context.Context) error {
	last := vip(l.services - 1)
	const source = "source of connections from the node itself" // as the endpoint sees it
	for _, c := range []struct {
		what string
		from *harness.Netns
		to   netip.AddrPort
	}{
		{source, l.Netns, netip.AddrPortFrom(last, servicePort)},
		{"a port of the node at a Service's address, from a pod", l.client.Netns, netip.AddrPortFrom(last, hostPort)},
		{"  from the node itself", l.Netns, netip.AddrPortFrom(last, hostPort)},
		{"an address of the range without a Service, from a pod", l.client.Netns, netip.AddrPortFrom(unusedVIP, servicePort)},
	} {
		var a probe.Answer
		err := c.from.Do(func() (err error) {
			a, err = ipvsComparison.prober.Ask(c.to, harness.Patient)
			return err
		})
		if err != nil {
			return err
		}
		text := "answers"
		switch {
		case a.Refused:
			text = "refused"
		case !a.Endpoint.IsValid():
			text = "no answer"
		case c.what != source:
		case a.Client == l.IP4:
			text = "the node's address"
		case a.Client == last:
			text = "the Service's address"
		default:
			text = a.Client.String()
		}
		l.note(c.what, text)
	}
	return nil
}

// observeARP asks for addresses from a neighbour, as by default and with what --ipvs-strict-arp sets.
func (l *vipLab) observeARP(context.Context) error {
	for _, c := range []struct {
		what             string
		addr             netip.Addr
		ignore, announce string
	}{
		{"ARP for a Service's address on another interface", vip(l.services - 1), "0", "0"},
		{"  with --ipvs-strict-arp", vip(l.services - 1), "1", "2"},
		{"  for an address of the range without a Service", unusedVIP, "0", "0"},
	} {
		err := errors.Join(l.Sysctl("net/ipv4/conf/all/arp_ignore", c.ignore), l.Sysctl("net/ipv4/conf/all/arp_announce", c.announce))
		if err != nil {
			return err
		}
		if own, err := arping(l.neighbour, l.IP4); err != nil || !own {
			return errors.Join(err, fmt.Errorf("it answers ARP for its own address: %v", own))
		}
		answered, err := arping(l.neighbour, c.addr)
		if err != nil {
			return err
		}
		l.note(c.what, map[bool]string{true: "answers", false: "no answer"}[answered])
	}
	return nil
}

// arping has a node's kernel ask all on the network of its eth0 who has an address, and reports whether somebody answers.
func arping(from *harness.Node, target netip.Addr) (answered bool, err error) {
	nl := from.Netlink()
	link, err := nl.LinkByName("eth0")
	if err != nil {
		return false, fmt.Errorf("eth0 of %s: %w", from.Name, err)
	}
	index := link.Attrs().Index
	_ = nl.NeighDel(&netlink.Neigh{LinkIndex: index, IP: target.AsSlice()}) // What was known before; mostly nothing.
	route := &netlink.Route{
		LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: target.AsSlice(), Mask: net.CIDRMask(32, 32)},
	}
	if err := nl.RouteReplace(route); err != nil {
		return false, fmt.Errorf("route to %s: %w", target, err)
	}
	defer func() { err = errors.Join(err, nl.RouteDel(route)) }()
	err = from.Do(func() error { // The kernel has to find the neighbour before it can send this.
		c, err := net.Dial("udp", netip.AddrPortFrom(target, 9).String())
		if err == nil {
			_, err = c.Write([]byte{0})
			err = errors.Join(err, c.Close())
		}
		return err
	})
	for begun := time.Now(); err == nil; time.Sleep(50 * time.Millisecond) {
		known, failed := nl.NeighList(index, netlink.FAMILY_V4)
		if err = failed; err == nil && time.Since(begun) > harness.Limit {
			err = fmt.Errorf("the kernel does not say who has %s", target)
		}
		for _, n := range known {
			switch {
			case !n.IP.Equal(target.AsSlice()):
			case n.State == netlink.NUD_FAILED:
				return false, err
			case n.State&(netlink.NUD_REACHABLE|netlink.NUD_STALE|netlink.NUD_DELAY|netlink.NUD_PROBE) != 0:
				return true, err
			}
		}
	}
	return false, err
}
