package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
	"nodeproxy/ipvs"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/topology"
)

// vipResult is what one value of --ipvs-vips costs, and what it does to packets.
type vipResult struct {
	// How long it takes to program all Services, to start anew over what is there, and to change one endpoint.
	program, again, change time.Duration
	slab, heap             float64       // bytes that the kernel and the process have more
	addresses              int           // of the node
	list                   time.Duration // for ip(8) to list them
	source                 string        // of connections from the node itself, as the endpoint sees it
	remove                 time.Duration // of the device with all that is on it
	// What becomes of connections to a port of the node by a Service's address, from a pod and from the node, and of those
	// from a pod to an address of the range that no Service has.
	hostPort, hostPortOwn, unused string
	// Whether the node answers ARP requests on another interface, as by default and with --ipvs-strict-arp: for a Service's
	// address, and for an address of the range that no Service has.
	arp, strictARP, unusedARP string
}

// hostPort is a port at which a program listens on all addresses of the node.
const hostPort = 9999

// vipRounds is how often each value is measured. The best time counts: what makes one longer has other causes.
const vipRounds = 3

// compareVIPs programs many Services on a node of their own for each value of --ipvs-vips, and prints how they differ.
func compareVIPs(ctx context.Context, o options) error {
	small := o
	small.vips = min(o.vips, 100) // The first run of every program takes longer.
	if _, err := measureVIPs(ctx, small, ipvs.Routes); err != nil {
		return err
	}
	var results [2]vipResult
	for round := range vipRounds {
		for i, way := range []ipvs.VIPs{ipvs.Routes, ipvs.Addresses} {
			r, err := measureVIPs(ctx, o, way)
			if err != nil {
				return fmt.Errorf("--ipvs-vips=%s: %w", way, err)
			}
			o.Progress("--ipvs-vips=%s: %d Services programmed in %s, again in %s", way, o.vips, measure.Duration(r.program),
				measure.Duration(r.again))
			if round > 0 {
				r.keepBest(results[i])
			}
			results[i] = r
		}
	}
	fmt.Println()
	printVIPs(os.Stdout, o, results[0], results[1])
	return nil
}

// keepBest takes over the times of another result that are shorter.
func (r *vipResult) keepBest(other vipResult) {
	r.program, r.again = min(r.program, other.program), min(r.again, other.again)
	r.change, r.list, r.remove = min(r.change, other.change), min(r.list, other.list), min(r.remove, other.remove)
}

func printVIPs(w io.Writer, o options, routes, addresses vipResult) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%d Services x %d endpoints, IPv4\troutes\taddresses\n", o.vips, o.endpoints)
	for _, row := range []struct {
		what string
		show func(vipResult) string
	}{
		{"programming all", func(r vipResult) string { return measure.Duration(r.program) }},
		{"starting anew over what is there", func(r vipResult) string { return measure.Duration(r.again) }},
		{"one endpoint changed, p50", func(r vipResult) string { return measure.Duration(r.change) }},
		{"memory of the kernel", func(r vipResult) string { return measure.Mebibytes(r.slab) }},
		{"memory of the process (heap)", func(r vipResult) string { return measure.Mebibytes(r.heap) }},
		{"addresses of the node", func(r vipResult) string { return fmt.Sprint(r.addresses) }},
		{"ip -o address show", func(r vipResult) string { return measure.Duration(r.list) }},
		{"removing kube-ipvs0", func(r vipResult) string { return measure.Duration(r.remove) }},
		{"source of connections from the node itself", func(r vipResult) string { return r.source }},
		{"a port of the node at a Service's address, from a pod", func(r vipResult) string { return r.hostPort }},
		{"  from the node itself", func(r vipResult) string { return r.hostPortOwn }},
		{"an address of the range without a Service, from a pod", func(r vipResult) string { return r.unused }},
		{"ARP for a Service's address on another interface", func(r vipResult) string { return r.arp }},
		{"  with --ipvs-strict-arp", func(r vipResult) string { return r.strictARP }},
		{"  for an address of the range without a Service", func(r vipResult) string { return r.unusedARP }},
	} {
		fmt.Fprintf(t, "%s\t%s\t%s\n", row.what, row.show(routes), row.show(addresses))
	}
	_ = t.Flush()
}

// vipLab is a node on which package ipvs works without a control plane, and a neighbour of it.
type vipLab struct {
	*measure.Stage
	neighbour *harness.Node
	way       ipvs.VIPs
	plan      *plan.Plan
	backend   *ipvs.Backend
}

func measureVIPs(ctx context.Context, o options, way ipvs.VIPs) (r vipResult, err error) {
	w, err := harness.Build(harness.Options{Pods: []int{2, 0}, Ports: []uint16{}})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	n := w.Nodes[0]
	stage, err := measure.NewStage(n, probe.Greet, measure.EndpointRange)
	if err != nil {
		return r, err
	}
	defer stage.Close()
	server, err := probe.Serve(n.Netns, hostPort, probe.Greet)
	if err != nil {
		return r, err
	}
	defer server.Close()
	l := &vipLab{Stage: stage, neighbour: w.Nodes[1], way: way}
	l.plan = vipPlan(n.IP4, o.vips, o.endpoints)
	for _, step := range []func(context.Context, options, *vipResult) error{
		l.measureProgramming, l.measureChanges, l.measureList, l.observePackets, l.observeARP, l.measureRemoval,
	} {
		if err := step(ctx, o, &r); err != nil {
			return r, err
		}
	}
	return r, nil
}

// vipPlan is a plan of Services whose cluster IPs follow each other from the start of the range, but for the first ten.
func vipPlan(node netip.Addr, services, endpoints int) *plan.Plan {
	p := plan.New(plan.Node{Name: "node1", IPs: []netip.Addr{node}}, plan.Settings{
		DetectLocal: plan.DetectLocal{
			Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix(measure.PodRange)},
		},
		ServiceCIDRs: []netip.Prefix{harness.ServiceCIDR4},
	})
	for i := range services {
		p.Set(vipService(i, i*endpoints, endpoints))
	}
	return p
}

// vipService is the i-th ServicePort, with endpoints at the addresses that begin at the first-th.
func vipService(i, first, endpoints int) *plan.ServicePort {
	var list []topology.Endpoint
	for n := range endpoints {
		addr := measure.Nth(measure.EndpointRange, 1+first+n)
		list = append(list, topology.Endpoint{
			Addr: netip.AddrPortFrom(addr, measure.EndpointPort), Ready: true, Serving: true, Node: "node2",
		})
	}
	return &plan.ServicePort{
		Key: plan.Key{
			Service:  plan.Service{Namespace: measure.Namespace, Name: fmt.Sprintf("s%d", i)},
			Protocol: plan.TCP, Family: plan.IPv4,
		},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: vip(i), Protocol: plan.TCP, Port: measure.ServicePort}},
		Endpoints: topology.Select(list, topology.Node{Name: "node1"}, topology.UseOf(plan.Cluster, plan.Cluster, false)),
	}
}

func vip(i int) netip.Addr { return measure.Nth(harness.ServiceCIDR4, 10+i) }

// unusedVIP is an address of the range that no Service has.
var unusedVIP = measure.Nth(harness.ServiceCIDR4, 65000)

// sync programs everything with a Backend that knows nothing of the kernel, as after a start.
func (l *vipLab) sync(ctx context.Context) (took time.Duration, err error) {
	begun := time.Now()
	err = l.Node.Do(func() (err error) {
		l.backend, err = ipvs.New(ipvs.Config{
			Options:  ipvs.Options{MasqueradeBit: 14, VIPs: l.way},
			Families: []plan.Family{plan.IPv4},
			Log:      slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
		if err != nil {
			return err
		}
		return l.backend.Sync(ctx, l.plan, plan.Everything())
	})
	return time.Since(begun), err
}

func (l *vipLab) measureProgramming(ctx context.Context, o options, r *vipResult) (err error) {
	slab, heap, err := memory()
	if err != nil {
		return err
	}
	if r.program, err = l.sync(ctx); err != nil {
		return err
	}
	if r.slab, r.heap, err = memory(); err != nil {
		return err
	}
	r.slab, r.heap = r.slab-slab, r.heap-heap
	held, err := virtualServers(l.Node.Netns)
	if err != nil {
		return err
	}
	if len(held) != o.vips {
		return fmt.Errorf("%d virtual servers for %d Services", len(held), o.vips)
	}
	r.again, err = l.sync(ctx)
	return err
}

// memory is what the kernel's slabs hold, and what this process has on its heap.
func memory() (slab, heap float64, err error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	held, err := machine.Kilobytes(string(b), "Slab")
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(held), float64(m.HeapAlloc), err
}

// measureChanges replaces all endpoints of some Services, one Service at a time.
func (l *vipLab) measureChanges(ctx context.Context, o options, r *vipResult) error {
	const count = 50
	var took []time.Duration
	for i := range count {
		sp := vipService(i*measure.Stride%o.vips, o.endpoints*o.vips+i, o.endpoints)
		l.plan.Set(sp)
		begun := time.Now()
		err := l.Node.Do(func() error { return l.backend.Sync(ctx, l.plan, plan.Only(plan.Keys{sp.Key: {}})) })
		if err != nil {
			return err
		}
		took = append(took, time.Since(begun))
	}
	r.change = measure.Percentile(took, 0.5)
	return nil
}

// measureList lists the node's addresses as people do.
func (l *vipLab) measureList(_ context.Context, _ options, r *vipResult) error {
	begun := time.Now()
	out, err := l.Node.Output("ip", "-o", "-4", "address", "show")
	r.list, r.addresses = time.Since(begun), strings.Count(out, "\n")
	return err
}

// measureRemoval removes the device. Meanwhile, nobody else can change a network interface or a route of the machine.
func (l *vipLab) measureRemoval(_ context.Context, _ options, r *vipResult) error {
	begun := time.Now()
	err := l.Node.Do(func() error { return host.RemoveDevice(names.Device) })
	r.remove = time.Since(begun)
	return err
}

// observePackets makes connections, and notes what becomes of them.
func (l *vipLab) observePackets(_ context.Context, o options, r *vipResult) error {
	service := netip.AddrPortFrom(vip(o.vips-1), measure.ServicePort)
	names := map[netip.Addr]string{l.Node.IP4: "the node's address", service.Addr(): "the Service's address"}
	for _, c := range []struct {
		from *harness.Netns
		to   netip.AddrPort
		into *string
	}{
		{l.Node.Netns, service, &r.source},
		{l.Client.Netns, netip.AddrPortFrom(service.Addr(), hostPort), &r.hostPort},
		{l.Node.Netns, netip.AddrPortFrom(service.Addr(), hostPort), &r.hostPortOwn},
		{l.Client.Netns, netip.AddrPortFrom(unusedVIP, measure.ServicePort), &r.unused},
	} {
		var a probe.Answer
		err := c.from.Do(func() (err error) {
			a, err = prober.Ask(c.to, harness.Patient)
			return err
		})
		if err != nil {
			return err
		}
		switch {
		case a.Refused:
			*c.into = "refused"
		case !a.Endpoint.IsValid():
			*c.into = "no answer"
		case c.into != &r.source:
			*c.into = "answers"
		case names[a.Client] != "":
			*c.into = names[a.Client]
		default:
			*c.into = a.Client.String()
		}
	}
	return nil
}

// observeARP asks for addresses from a neighbour.
func (l *vipLab) observeARP(_ context.Context, o options, r *vipResult) error {
	for _, c := range []struct {
		strict bool
		addr   netip.Addr
		into   *string
	}{{false, vip(o.vips - 1), &r.arp}, {true, vip(o.vips - 1), &r.strictARP}, {false, unusedVIP, &r.unusedARP}} {
		if err := l.setARP(c.strict); err != nil {
			return err
		}
		own, err := arping(l.neighbour, l.Node.IP4)
		if err != nil {
			return err
		}
		if !own {
			return errors.New("the node does not answer ARP for its own address")
		}
		answered, err := arping(l.neighbour, c.addr)
		if err != nil {
			return err
		}
		*c.into = "no answer"
		if answered {
			*c.into = "answers"
		}
	}
	return nil
}

// setARP makes the settings that --ipvs-strict-arp makes, or the kernel's own.
func (l *vipLab) setARP(strict bool) error {
	ignore, announce := "0", "0"
	if strict {
		ignore, announce = "1", "2"
	}
	return errors.Join(l.Node.Sysctl("net/ipv4/conf/all/arp_ignore", ignore),
		l.Node.Sysctl("net/ipv4/conf/all/arp_announce", announce))
}
