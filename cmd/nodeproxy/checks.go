package main

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/inspect"
	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/xtables"
	"nodeproxy/node/blocking"
	"nodeproxy/node/endpoints"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// reality is what commands learn about the node itself. Nothing in it waits for a sync, or makes one wait.
func (d *daemon) reality() *inspect.Reality {
	r := &inspect.Reality{Changed: d.drift.recent, Flows: countFlows, Listeners: d.monitor.listeners.Current, Watches: d.watches}
	r.Tracked = func() (inspect.TrackedFlows, error) {
		flows, most, err := conntrack.Tracked(d.cfg.SysctlDir)
		out := inspect.TrackedFlows{Flows: flows, Most: most}
		if wanted := d.cfg.Conntrack.TCPEstablishedTimeout; wanted > 0 {
			if s, failed := conntrack.Forgets(d.cfg.SysctlDir); failed == nil && time.Duration(s)*time.Second < wanted {
				out.Forgets = s
			}
		}
		return out, err
	}
	o := &observer{daemon: d, view: sync.OnceValue(func() *endpoints.View { return endpoints.See(d.cfg.SysctlDir) })}
	o.pods = sync.OnceValues(o.findPods)
	r.Blocking, r.Ways = o.blocking, o.ways
	r.Detour = func(from, to netip.Addr) string { return o.view().Detour(from, to) }
	r.Reverse = func(ctx context.Context, list []netip.Addr) (*reality.Reverse, error) {
		return o.view().LookBack(ctx, list)
	}
	r.Endpoints = func(ctx context.Context, ports []*plan.ServicePort) ([]reality.Listening, error) {
		return o.view().Look(ctx, ports)
	}
	r.Kernel = func(ctx context.Context, svc plan.Service) (int, []string, error) {
		things, found, err := d.backend.Verify(ctx, svc)
		var words []string
		for _, f := range found {
			words = append(words, f.String())
		}
		return things, words, err
	}
	if reader := d.monitor.traffic; reader != nil {
		r.Traffic = func(ctx context.Context) (map[plan.Key]plan.Traffic, error) {
			out := map[plan.Key]plan.Traffic{}
			for t, err := range reader.Traffic(ctx) {
				if err != nil {
					return nil, err
				}
				out[t.Key] = t
			}
			return out, nil
		}
	}
	return r
}

// observer looks at the node for one question. What several checks need is looked at once.
type observer struct {
	*daemon
	view func() *endpoints.View
	pods func() (like blocking.Node, one reality.Origin)
}

// blocking is Reality.Blocking.
func (o *observer) blocking(ctx context.Context, ports []*plan.ServicePort) (out []reality.Blocking, within bool, err error) {
	local, err := localAddresses()
	if err != nil {
		return nil, false, err
	}
	v := o.view()
	pods, _ := o.pods()
	node := blocking.Node{
		Local: local, IPVS: o.cfg.Mode == ipvsMode.name, Uplink: v.Uplink, By: v.By, Mark: 1 << o.cfg.MasqueradeBit, Variant: o.backend.variant,
		Bridges: v.Bridges(), Tunnels: v.Tunnels(ports), Pods: pods.Pods, PodsBy: pods.PodsBy,
		Near: func(a netip.Addr) bool { return endpoints.Near(a) && !o.announced(a) },
	}
	if node.NoNodePorts, err = o.noNodePorts(v); err != nil {
		return nil, false, err
	}
	if node.IPVS { // It marks what is for virtual servers of many addresses.
		node.Mark = ^uint32(0)
	}
	if out, err = blocking.Find(ctx, ports, node); err != nil {
		return out, false, err
	}
	within, err = v.Within(ctx, ports, func(its []*plan.ServicePort, listens func(plan.Protocol, uint16) bool) error {
		found, err := blocking.Find(ctx, its, blocking.Node{Inside: true, Local: func(netip.Addr) bool { return true }})
		for _, f := range found {
			taken := f.To == 0 || listens(plan.TCP, f.To) || listens(plan.UDP, f.To) // by a sidecar, such as one of a service mesh, or a virtual machine
			if f.Inside = true; !f.Diverted || !taken {
				out = append(out, f)
			}
		}
		return err
	})
	return out, within, err
}

// announced reports whether an address is one of a Service, for which something may answer in place of its interface.
func (d *daemon) announced(a netip.Addr) bool {
	for _, ports := range d.proxier.Snapshot().Services() {
		for _, sp := range ports {
			if slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return f.Addr == a }) {
				return true
			}
		}
	}
	return false
}

// ways is Reality.Ways.
func (o *observer) ways(ctx context.Context, to reality.Places) (*reality.Ways, error) {
	v := o.view()
	var from []reality.Origin
	if outside, known := v.Outside(); known {
		masqueraded := outside
		masqueraded.Mark = 1 << o.cfg.MasqueradeBit
		from = append(from, outside, masqueraded)
	}
	if _, pod := o.pods(); pod.Addr.IsValid() {
		from = append(from, pod)
	}
	if settings, _ := o.settings(); settings.DetectLocal.Mode == plan.DetectClusterCIDR {
		to.Pods = settings.DetectLocal.CIDR(plan.IPv4)
	}
	found, err := v.LookOut(ctx, to, from)
	if err != nil {
		return nil, err
	}
	answer := o.nodePortsAnswer()
	found.Unserved, err = v.Outward(func(a netip.Addr) bool { return !answer(a) })
	return found, err
}

// noNodePorts returns the families in which an interface has addresses, and node ports answer at none of them.
func (d *daemon) noNodePorts(v *endpoints.View) (map[plan.Family]bool, error) {
	served, unserved := false, false
	answer := d.nodePortsAnswer()
	list, err := v.Outward(func(netip.Addr) bool { return true })
	for a, by := range list {
		served, unserved = served || by == v.Uplink && answer(a), unserved || by == v.Uplink && !answer(a)
	}
	return map[plan.Family]bool{plan.IPv4: unserved && !served}, err // Those of IPv6 are not looked at.
}

// nodePortsAnswer returns what reports whether node ports answer at an address.
func (d *daemon) nodePortsAnswer() func(netip.Addr) bool {
	settings, own := d.settings()
	return func(a netip.Addr) bool { return settings.NodePortsAnswer(own, a) }
}

// settings returns those of the plan, and what it has of this node.
func (d *daemon) settings() (settings plan.Settings, own plan.Node) {
	d.proxier.View(func(s *proxier.State) { settings, own = s.Plan().Settings, s.Plan().Node })
	return settings, own
}

// findPods says what packets of this node's Pods are like, where Pods are recognised by their addresses, and where those of one come from that
// is an endpoint. Its address is invalid if there is none.
func (o *observer) findPods() (like blocking.Node, one reality.Origin) {
	const most, mostSeen = 32, 10000 // that are tried, and that are looked at
	here := map[plan.Family][]netip.Addr{}
	settings, _ := o.settings()
	detect := settings.DetectLocal
	if !detect.ByCIDR() || settings.MasqueradeAll {
		return like, one
	}
	seen := 0
	for _, ports := range o.proxier.Snapshot().Services() {
		for _, sp := range ports {
			f := sp.Key.Family
			for _, ep := range sp.Endpoints.Cluster {
				seen++
				if a := ep.Addr.Addr(); ep.Local && detect.Matches(a, "") && len(here[f]) < most && !slices.Contains(here[f], a) {
					here[f] = append(here[f], a)
				}
			}
		}
		if seen >= mostSeen {
			break
		}
	}
	v := o.view()
	like.Pods = map[plan.Family]netip.Prefix{}
	for _, f := range plan.Families {
		r := detect.CIDR(f)
		if !r.IsValid() {
			continue
		}
		pods, all := v.PodsHere(r, here[f])
		if !pods.IsValid() {
			continue
		}
		if like.Pods[f] = pods; len(like.Pods) == 1 {
			like.PodsBy = all
		} else if like.PodsBy != all {
			like.PodsBy = ""
		}
	}
	for _, a := range slices.Concat(here[plan.IPv4], here[plan.IPv6]) {
		if by := v.By(a); by != "" {
			return like, reality.Origin{Name: "Pods of this node", By: by, Addr: a}
		}
	}
	return like, one
}

// countFlows returns the connections to the frontends of ServicePorts that the kernel tracks and that have not ended, by endpoint.
func countFlows(ctx context.Context, ports []*plan.ServicePort) (map[netip.AddrPort]inspect.Flows, error) {
	const mostClients = 4
	var table conntrack.Table
	session, err := table.Open()
	if err != nil {
		return nil, err
	}
	defer session.Close()
	local, err := localAddresses()
	if err != nil {
		return nil, err
	}
	type kind struct {
		family   plan.Family
		protocol plan.Protocol
	}
	at := map[kind]map[netip.AddrPort]bool{} // frontends, of which node ports have no address
	for _, sp := range ports {
		for _, f := range sp.Frontends {
			if f.Kind == plan.HealthCheckNodePort {
				continue
			}
			k := kind{sp.Key.Family, f.Protocol}
			if at[k] == nil {
				at[k] = map[netip.AddrPort]bool{}
			}
			at[k][netip.AddrPortFrom(f.Addr, f.Port)] = true
		}
	}
	out := map[netip.AddrPort]inspect.Flows{}
	for k, frontends := range at {
		filter := conntrack.Filter{Family: k.family, Protocol: netlink.Protocol(k.protocol)}
		if len(frontends) == 1 { // The kernel selects them.
			for f := range frontends {
				filter.Dst = conntrack.End{Addr: f.Addr(), Port: f.Port()}
			}
		}
		err := session.Each(ctx, filter, func(flow *conntrack.Flow) {
			nodePort := frontends[netip.AddrPortFrom(netip.Addr{}, flow.Dst.Port())] && local(flow.Dst.Addr())
			endpoint := flow.From
			if !flow.Translated() {
				endpoint = netip.AddrPort{}
			}
			switch {
			case flow.Ended, !frontends[flow.Dst] && !nodePort:
				return
			case !frontends[flow.Dst] && !endpoint.IsValid(): // A node port is that of any other program, unless it is translated.
				return
			}
			of := out[endpoint]
			of.Open++
			if !flow.Replied && k.protocol == plan.TCP {
				of.Unanswered++
				if from := flow.Src.Addr(); len(of.Clients) < mostClients && !slices.Contains(of.Clients, from) {
					of.Clients = append(of.Clients, from)
				}
			}
			out[endpoint] = of
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// standing holds values that are true at present, by their subject. The zero value is empty.
type standing[T any] struct {
	mu   sync.Mutex
	list map[string]T
}

// set replaces what is known of something; nil removes it.
func (s *standing[T]) set(about string, v *T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v == nil {
		delete(s.list, about)
		return
	}
	if s.list == nil {
		s.list = map[string]T{}
	}
	s.list[about] = *v
}

// all returns all values, ordered by their subject.
func (s *standing[T]) all() []T {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []T
	for _, about := range slices.Sorted(maps.Keys(s.list)) {
		out = append(out, s.list[about])
	}
	return out
}

// keep makes a report that keeps findings which hold as long as this daemon runs.
func (d *daemon) keep(report source.Report) source.Report {
	return func(f source.Finding) {
		d.lasting.set(f.String(), &f)
		report(f)
	}
}

// keepNative keeps what is known of native rules in a table.
func (d *daemon) keepNative(n xtables.NativeRules, f *source.Finding) {
	d.lasting.set("native "+n.Table+" "+n.Family.String(), f)
}

// pods returns what reads the Pods of manifests; nil if Pods can't be read.
func (d *daemon) pods() func(string) ([]*v1.Pod, error) {
	if d.files == nil {
		return nil
	}
	pods := d.files.Pods()
	if len(pods) == 0 { // Then EndpointSlices stand for them.
		return nil
	}
	return func(string) ([]*v1.Pod, error) { return pods, nil }
}

// otherFindings returns what is wrong besides what the proxier knows of objects.
func (d *daemon) otherFindings() []source.Finding {
	out := slices.Concat(d.cfg.Findings, d.lasting.all(), d.monitor.listeners.Current())
	if why := d.rejected.Load(); why != nil {
		out = append(out, source.Finding{Severity: source.Problem, Field: "--config", Detail: *why, Effect: "the former configuration stays in force"})
	}
	for _, server := range d.servers {
		failing := server.Failing()
		for _, addr := range slices.SortedFunc(maps.Keys(failing), netip.AddrPort.Compare) {
			out = append(out, source.Finding{Severity: source.Problem, Object: "server " + server.Name(), Detail: failing[addr], Effect: "requests to it are not answered, and it is retried"})
		}
	}
	if d.files != nil {
		out = append(out, d.files.Findings()...)
	}
	for _, w := range d.watches() {
		if w.Age >= inspect.StaleAfter {
			out = append(out, source.Finding{Severity: source.Problem, Object: w.Resource,
				Detail: "the API server has sent nothing for " + w.Age.Round(time.Second).String(), Effect: "what was known last stays in force"})
		}
	}
	return out
}
