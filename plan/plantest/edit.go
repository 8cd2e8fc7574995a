package plantest

import (
	"fmt"
	"slices"
	"time"

	"pgregory.net/rapid"

	"nodeproxy/plan"
)

// Edited draws the cluster's plan after some of its Services were edited, and some of their endpoints have come or gone. The
// frontends are the same, and so are the node and the settings.
func (c *Cluster) Edited(t *rapid.T) *plan.Plan {
	out := plan.New(c.Plan.Node, c.Plan.Settings)
	for i, d := range c.drafts {
		if i < mostEdits && rapid.Bool().Draw(t, fmt.Sprintf("%s is edited", d.sp.Key)) {
			d = d.edited(t)
		}
		out.Set(d.choose(c.Plan.Node))
	}
	return out
}

// mostEdits is how many ServicePorts of a large plan may be edited: the plain ones, which come last, are all alike.
const mostEdits = 20

func (d draft) edited(t *rapid.T) draft {
	label := func(what string) string { return fmt.Sprintf("%s, edited: %s", d.sp.Key, what) }
	sp := *d.sp
	policies := rapid.SampledFrom([]plan.Policy{plan.Cluster, plan.Local})
	sp.InternalPolicy, sp.ExternalPolicy = policies.Draw(t, label("internal policy")), policies.Draw(t, label("external policy"))
	sp.Affinity = rapid.SampledFrom([]time.Duration{sp.Affinity, 0, time.Hour}).Draw(t, label("affinity"))
	w := worlds[sp.Key.Family]
	if chance(t, 3, label("other source ranges")) {
		sp.SourceRanges = rapid.SliceOfNDistinct(rapid.SampledFrom(w.ranges), 0, 3, rapid.ID).Draw(t, label("source ranges"))
		sp.SourceRanges = plan.Canonical(sp.SourceRanges)
	}
	switch rapid.SampledFrom([]string{"same", "one fewer", "more", "others"}).Draw(t, label("endpoints")) {
	case "one fewer":
		d.endpoints = d.endpoints[min(1, len(d.endpoints)):]
	case "more":
		d.endpoints = append(slices.Clone(d.endpoints), drawEndpoints(t, w, label)...)
	case "others":
		d.endpoints = drawEndpoints(t, w, label)
	}
	d.sp = &sp
	return d
}

// Transit is a packet that gets to an endpoint both before and after a change.
type Transit struct {
	Packet        plan.Packet
	Before, After plan.Verdict
	Endpoints     []plan.Endpoint // all that its ServicePort has, before or after
}

// Transits draws packets of a few sources to the frontends that change from the cluster's plan to the next one, as far as there are
// endpoints for them before and after. None has a loopback address as its source.
func (c *Cluster) Transits(t *rapid.T, f plan.Family, next *plan.Plan) []Transit {
	sources := rapid.SliceOfN(c.Packets(f), 4, 4).Draw(t, "sources")
	was, is := plan.NewEvaluator(c.Plan), plan.NewEvaluator(next)
	var out []Transit
	for _, sp := range c.Plan.Sorted(f) {
		if sp.Equal(next.Services[sp.Key]) {
			continue
		}
		for _, fe := range sp.Frontends {
			for _, pkt := range sources {
				pkt.Dst, pkt.Protocol, pkt.DstPort = fe.Addr, fe.Protocol, fe.Port
				if !fe.Addr.IsValid() {
					pkt.Dst = c.localOf(f)[0]
				}
				pkt.DstLocal = c.Local(pkt.Dst)
				x := Transit{Packet: pkt, Before: was.Verdict(pkt), After: is.Verdict(pkt)}
				if x.Before.Action == plan.Forward && x.After.Action == plan.Forward && !pkt.Src.IsLoopback() {
					x.Endpoints = slices.Concat(c.Plan.Services[x.Before.ServicePort].All(), next.Services[x.After.ServicePort].All())
					out = append(out, x)
				}
			}
		}
	}
	const most = 60
	return out[:min(len(out), most)]
}

// Differing are the keys by which two plans differ.
func Differing(a, b *plan.Plan) plan.Keys {
	out := plan.Keys{}
	for k, sp := range a.Services {
		if o := b.Services[k]; o == nil || !o.Equal(sp) {
			out.Add(k)
		}
	}
	for k := range b.Services {
		if a.Services[k] == nil {
			out.Add(k)
		}
	}
	return out
}
