package plantest

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/topology"
)

// draft is a ServicePort before it is known which of its frontends it gets.
type draft struct {
	sp        *plan.ServicePort
	wants     []plan.Frontend
	endpoints []topology.Endpoint
}

// drawServices draws the ServicePorts of a plan: a few with everything that there is, and at times many plain ones, so
// that a backend divides its dispatching.
func drawServices(t *rapid.T) []draft {
	var drafts []draft
	for i := range rapid.IntRange(0, 8).Draw(t, "services") {
		drafts = append(drafts, drawService(t, i)...)
	}
	plain := rapid.SampledFrom([]int{0, 0, 0, 0, 40, 150}).Draw(t, "plain services")
	for i := range plain {
		for _, f := range plan.Families {
			drafts = append(drafts, plainDraft(f, i))
		}
	}
	slices.SortFunc(drafts, func(a, b draft) int { return a.sp.Key.Compare(b.sp.Key) })
	assign(drafts)
	return drafts
}

// choose is the draft's ServicePort with the endpoints that its policies choose on a node.
func (d *draft) choose(node plan.Node) *plan.ServicePort {
	d.sp.Endpoints = topology.Select(d.endpoints, topology.Node{Name: node.Name, Zone: node.Zone},
		topology.UseOf(d.sp.InternalPolicy, d.sp.ExternalPolicy, slices.ContainsFunc(d.wants, isExternal)))
	return d.sp
}

func isExternal(f plan.Frontend) bool {
	return f.Kind != plan.ClusterIP && f.Kind != plan.HealthCheckNodePort
}

// assign gives each frontend to the first that asks for it, in order of kind and key, and notes the others' as shadowed.
func assign(drafts []draft) {
	type claim struct {
		family plan.Family
		plan.Address
	}
	type wish struct {
		frontend plan.Frontend
		sp       *plan.ServicePort
	}
	var wishes []wish
	for _, d := range drafts {
		for _, f := range d.wants {
			wishes = append(wishes, wish{f, d.sp})
		}
	}
	slices.SortStableFunc(wishes, func(a, b wish) int {
		return cmp.Or(cmp.Compare(a.frontend.Kind, b.frontend.Kind), a.sp.Key.Compare(b.sp.Key),
			a.frontend.Compare(b.frontend))
	})
	owner := map[claim]plan.Key{}
	for _, w := range wishes {
		c := claim{w.sp.Key.Family, plan.Address{Addr: w.frontend.Addr, Protocol: w.frontend.Protocol, Port: w.frontend.Port}}
		key, taken := owner[c]
		switch {
		case !taken:
			owner[c] = w.sp.Key
			w.sp.Frontends = append(w.sp.Frontends, w.frontend)
		case key != w.sp.Key: // Else the address is listed twice, as two kinds; the better one has it.
			w.sp.Shadowed = append(w.sp.Shadowed, plan.Shadowed{Frontend: w.frontend, Owner: key})
		}
	}
}

// drawService draws the ServicePorts of one Service.
func drawService(t *rapid.T, i int) []draft {
	name := func(what string) string { return fmt.Sprintf("service %d: %s", i, what) }
	svc := plan.Service{Namespace: rapid.SampledFrom([]string{"default", "kube-system"}).Draw(t, name("namespace")),
		Name: fmt.Sprintf("s%d", i)}
	policies := rapid.SampledFrom([]plan.Policy{plan.Cluster, plan.Local})
	internal, external := policies.Draw(t, name("internal policy")), policies.Draw(t, name("external policy"))
	affinity := rapid.SampledFrom([]time.Duration{0, 0, time.Second, 3 * time.Hour}).Draw(t, name("affinity"))
	scheduler := rapid.SampledFrom([]plan.Scheduler{
		{}, {}, {Name: "wrr"}, {Name: "lc"}, {Name: "dh"}, {Name: "sh", Fallback: true}, {Name: "mh", Ports: true},
	}).Draw(t, name("scheduler"))
	families := rapid.SampledFrom([][]plan.Family{plan.Families[:], plan.Families[:1], plan.Families[1:]}).
		Draw(t, name("families"))
	ports := rapid.SliceOfNDistinct(rapid.SampledFrom(protocols), 1, 2, rapid.ID).Draw(t, name("protocols"))
	sources := chance(t, 2, name("has source ranges"))
	health := external == plan.Local && chance(t, 3, name("has a health check node port"))
	hostBits := rapid.IntRange(1, 4).Draw(t, name("cluster IP block")) // few, so that blocks fill up
	var out []draft
	for _, f := range families {
		w := worlds[f]
		var ranges []netip.Prefix
		if sources {
			ranges = rapid.SliceOfNDistinct(rapid.SampledFrom(w.ranges), 1, 3, rapid.ID).Draw(t, name("source ranges"))
			ranges = plan.Canonical(ranges)
		}
		for n, proto := range ports {
			key := plan.Key{Service: svc, Protocol: proto, Family: f}
			if len(ports) > 1 {
				key.Port = proto.Lower()
			}
			label := func(what string) string { return fmt.Sprintf("%s: %s", key, what) }
			d := draft{
				sp: &plan.ServicePort{Key: key, InternalPolicy: internal, ExternalPolicy: external, Affinity: affinity,
					Scheduler: scheduler, SourceRanges: ranges, Critical: svc.Namespace == "kube-system"},
				wants:     drawFrontends(t, key, nth(w.cluster, hostBits<<4+i), label),
				endpoints: drawEndpoints(t, w, label),
			}
			if health && n == 0 {
				d.wants = append(d.wants, plan.Frontend{Kind: plan.HealthCheckNodePort, Protocol: plan.TCP,
					Port: rapid.SampledFrom(nodePorts).Draw(t, label("health check node port"))})
			}
			out = append(out, d)
		}
	}
	return out
}

func drawFrontends(t *rapid.T, key plan.Key, clusterIP netip.Addr, label func(string) string) []plan.Frontend {
	w := worlds[key.Family]
	port := rapid.SampledFrom(servicePorts).Draw(t, label("port"))
	out := []plan.Frontend{{Kind: plan.ClusterIP, Addr: clusterIP, Protocol: key.Protocol, Port: port}}
	several := func(kind plan.FrontendKind, from []netip.Addr) {
		list := rapid.SliceOfNDistinct(rapid.SampledFrom(from), 0, 2, rapid.ID).Draw(t, label(kind.String()))
		for _, a := range list {
			out = append(out, plan.Frontend{Kind: kind, Addr: a, Protocol: key.Protocol, Port: port})
		}
	}
	several(plan.LoadBalancerIP, w.balancer)
	several(plan.ExternalIP, slices.Concat(w.external, []netip.Addr{w.node, w.other, w.balancer[0], w.nodes[0]}))
	if rapid.Bool().Draw(t, label("has a node port")) {
		out = append(out, plan.Frontend{Kind: plan.NodePort, Protocol: key.Protocol,
			Port: rapid.SampledFrom(nodePorts).Draw(t, label("node port"))})
	}
	slices.SortFunc(out, plan.Frontend.Compare)
	return out
}

// drawEndpoints draws a few endpoints in any condition, and at times very many, so that a backend divides its choice.
func drawEndpoints(t *rapid.T, w world, label func(string) string) []topology.Endpoint {
	var out []topology.Endpoint
	hints := rapid.SampledFrom([]string{"", "", "zones", "nodes"}).Draw(t, label("hints"))
	conditions := rapid.SampledFrom([]string{"ready", "ready", "mixed", "terminating", "far"}).Draw(t,
		label("conditions"))
	for i := range rapid.IntRange(0, 5).Draw(t, label("endpoints")) {
		label := func(what string) string { return label(fmt.Sprintf("endpoint %d %s", i, what)) }
		local := conditions != "far" && rapid.Bool().Draw(t, label("is on this node"))
		ep := topology.Endpoint{Ready: true, Serving: true, Node: "node-2"}
		from := slices.Concat(w.farPods, w.nodes)
		if local {
			ep.Node = nodeName
			from = append(slices.Clone(w.pods), w.node)
		}
		if chance(t, 6, label("has no node name")) {
			ep.Node = ""
		}
		ep.Addr = netip.AddrPortFrom(rapid.SampledFrom(from).Draw(t, label("address")),
			rapid.SampledFrom(targetPorts).Draw(t, label("port")))
		switch {
		case conditions == "terminating", conditions == "mixed" && chance(t, 3, label("terminates")):
			ep.Ready, ep.Terminating = false, true
			ep.Serving = !chance(t, 3, label("has stopped"))
		case conditions == "mixed" && chance(t, 4, label("is not ready")):
			ep.Ready, ep.Serving = false, false
		}
		switch hints {
		case "zones":
			ep.ForZones = []string{rapid.SampledFrom([]string{"zone-a", "zone-b"}).Draw(t, label("zone hint"))}
		case "nodes":
			ep.ForNodes = []string{rapid.SampledFrom([]string{nodeName, "node-2"}).Draw(t, label("node hint"))}
		}
		out = append(out, ep)
	}
	if chance(t, 12, label("has many endpoints")) {
		out = append(out, serving(w.podRange, 5<<8, rapid.IntRange(20, 200).Draw(t, label("many endpoints")), 3)...)
	}
	return out
}

// serving are endpoints at addresses of a range, in order from the first-th on. Those of which the number is a multiple of oneIn are on
// this node; none if that is 0.
func serving(within netip.Prefix, first, count, oneIn int) []topology.Endpoint {
	out := make([]topology.Endpoint, count)
	for i := range out {
		out[i] = topology.Endpoint{Addr: netip.AddrPortFrom(nth(within, (first+i)%(1<<18)), 8080), Ready: true, Serving: true, Node: "node-2"}
		if oneIn > 0 && (first+i)%oneIn == 0 {
			out[i].Node = nodeName
		}
	}
	return out
}

const plainNamespace = "plain"

// plainDraft is the i-th of many Services: a cluster IP, a node port for every other, two endpoints.
func plainDraft(f plan.Family, i int) draft {
	w := worlds[f]
	key := plan.Key{Service: plan.Service{Namespace: plainNamespace, Name: fmt.Sprintf("p%d", i)}, Protocol: plan.TCP,
		Family: f}
	d := draft{sp: &plan.ServicePort{Key: key}}
	d.wants = []plan.Frontend{{Kind: plan.ClusterIP, Addr: nth(w.cluster, 16<<8+i*7), Protocol: plan.TCP, Port: 80}}
	if i%2 == 0 {
		d.wants = append(d.wants, plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: uint16(30100 + i)})
	}
	d.endpoints = serving(w.podRange, 6<<8+2*i, 2, 0)
	return d
}

// nth is the n-th address of a range.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().AsSlice()
	for i := len(b) - 1; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
