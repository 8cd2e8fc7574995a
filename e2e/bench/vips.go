package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/ipvs"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/topology"
)

// cost is one thing that a value of --ipvs-vips costs.
type cost struct {
	what string
	took time.Duration // or else:
	text string
}

// vipLab is a node on which package ipvs works without a control plane, and what was measured.
type vipLab struct {
	*harness.Node
	way                 ipvs.VIPs
	services, endpoints int
	plan                *plan.Plan
	backend             *ipvs.Backend
	costs               []cost
}

// compareVIPs programs many Services on a node of their own for each value of --ipvs-vips, and prints how they differ. Each is measured
// three times, and the best time counts: what makes one longer has other causes.
func compareVIPs(ctx context.Context, o *options) {
	measureVIPs(ctx, min(o.vips, 100), o.endpoints, ipvs.Routes) // The first run of every program takes longer.
	var results [2][]cost
	for range 3 {
		for i, way := range []ipvs.VIPs{ipvs.Routes, ipvs.Addresses} {
			costs := measureVIPs(ctx, o.vips, o.endpoints, way)
			o.progress("--ipvs-vips=%s: %d Services programmed in %s, again in %s", way, o.vips, duration(costs[0].took), duration(costs[1].took))
			for j, was := range results[i] {
				costs[j].took = min(costs[j].took, was.took)
			}
			results[i] = costs
		}
	}
	t := newTable(os.Stdout)
	t.markdown = o.markdown
	fmt.Println()
	t.head(fmt.Sprintf("%d Services x %d endpoints, IPv4", o.vips, o.endpoints), "routes", "addresses")
	for i, c := range results[0] {
		t.line(c.what, c.String(), results[1][i].String())
	}
	check(t.Flush())
}

func (c cost) String() string {
	if c.text != "" {
		return c.text
	}
	return duration(c.took)
}

func measureVIPs(ctx context.Context, services, endpoints int, way ipvs.VIPs) []cost {
	w := must(harness.Build(harness.Options{Pods: []int{0}, Ports: []uint16{}}))
	defer func() { check(errors.Join(caught(recover()), w.Close()), "--ipvs-vips="+string(way)) }()
	l := &vipLab{Node: w.Node1(), way: way, services: services, endpoints: endpoints}
	l.plan = plan.New(plan.Node{Name: "node1", IPs: []netip.Addr{l.IP4}}, plan.Settings{
		DetectLocal:  plan.DetectLocal{Mode: plan.DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix(podRange)}},
		ServiceCIDRs: []netip.Prefix{harness.ServiceCIDR4},
	})
	for i := range services {
		l.plan.Set(l.service(i, i*endpoints))
	}
	l.program(ctx)
	l.changeSome(ctx)
	l.list()
	// Meanwhile, nobody else can change a network interface or a route of the machine.
	l.timed("removing kube-ipvs0", func() error { return host.RemoveDevice(names.Device) })
	return l.costs
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
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: nth(harness.ServiceCIDR4, 10+i), Protocol: plan.TCP, Port: servicePort}},
		Endpoints: topology.Select(list, topology.Node{Name: "node1"}, topology.UseOf(plan.Cluster, plan.Cluster, false)),
	}
}

// timed does something in the node's namespace, and adds what it took.
func (l *vipLab) timed(what string, fn func() error) {
	begun := time.Now()
	check(l.Do(fn))
	l.took(what, time.Since(begun))
}

func (l *vipLab) took(what string, took time.Duration) {
	l.costs = append(l.costs, cost{what: what, took: took})
}

func (l *vipLab) note(what, text string) { l.costs = append(l.costs, cost{what: what, text: text}) }

// program programs everything with a Backend that knows nothing of the kernel, as after a start, twice.
func (l *vipLab) program(ctx context.Context) {
	slab, heap := memoryHeld()
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
	l.timed("programming all", sync)
	slabNow, heapNow := memoryHeld()
	if held := must(virtualServers(l.Netns)); len(held) != l.services {
		check(fmt.Errorf("%d virtual servers for %d Services", len(held), l.services))
	}
	l.timed("starting anew over what is there", sync)
	l.note("memory of the kernel", mebibytes(slabNow-slab))
	l.note("memory of the process (heap)", mebibytes(heapNow-heap))
}

// memoryHeld is what the kernel's slabs hold, and what this process has on its heap.
func memoryHeld() (slab, heap float64) {
	held := must(machine.Slab())
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(held), float64(m.HeapAlloc)
}

// changeSome replaces all endpoints of some Services, one Service at a time.
func (l *vipLab) changeSome(ctx context.Context) {
	var took []time.Duration
	for i := range 50 {
		sp := l.service(i*stride%l.services, l.endpoints*l.services+i)
		l.plan.Set(sp)
		begun := time.Now()
		check(l.Do(func() error { return l.backend.Sync(ctx, l.plan, plan.Only(plan.Keys{sp.Key: {}})) }))
		took = append(took, time.Since(begun))
	}
	l.took("one endpoint changed, p50", percentile(took, 0.5))
}

// list lists the node's addresses as people do.
func (l *vipLab) list() {
	begun := time.Now()
	out := must(l.Output("ip", "-o", "-4", "address", "show"))
	l.took("ip -o address show", time.Since(begun))
	l.note("addresses of the node", fmt.Sprint(strings.Count(out, "\n")))
}
