package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/iptables/tracer"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

// transit is a packet that gets to an endpoint both before and after a change.
type transit struct {
	packet        plan.Packet
	before, after plan.Verdict
	endpoints     []plan.Endpoint // all that its ServicePort has, before or after
}

// transits are packets of a few sources to every frontend that has endpoints for them before and after.
func transits(t *rapid.T, c *plantest.Cluster, f plan.Family, after *plan.Plan) []transit {
	sources := rapid.SliceOfN(c.Packets(f), 4, 4).Draw(t, "sources")
	was, is := plan.NewEvaluator(c.Plan), plan.NewEvaluator(after)
	var out []transit
	for _, sp := range c.Plan.Sorted(f) {
		if sp.Equal(after.Services[sp.Key]) {
			continue
		}
		for _, fe := range sp.Frontends {
			for _, pkt := range sources {
				pkt.Dst, pkt.Protocol, pkt.DstPort = fe.Addr, fe.Protocol, fe.Port
				if !fe.Addr.IsValid() {
					pkt.Dst = c.LocalAddrs[slices.IndexFunc(c.LocalAddrs, func(a netip.Addr) bool { return plan.FamilyOf(a) == f })]
				}
				pkt.DstLocal = c.Local(pkt.Dst)
				p := transit{packet: pkt, before: was.Verdict(pkt), after: is.Verdict(pkt)}
				if p.before.Action == plan.Forward && p.after.Action == plan.Forward && !pkt.Src.IsLoopback() {
					p.endpoints = slices.Concat(c.Plan.Services[p.before.ServicePort].All(), after.Services[p.after.ServicePort].All())
					out = append(out, p)
				}
			}
		}
	}
	const most = 60
	return out[:min(len(out), most)]
}

// gets says what is wrong with where a packet gets: it must be to an endpoint of the ServicePort, masqueraded unless one of the
// verdicts has it reach that one with its source.
func (p transit) gets(outcomes []tracer.Outcome) error {
	for _, o := range outcomes {
		keeps := func(v plan.Verdict) bool { return slices.Contains(v.Targets, plan.Target{Addr: o.Dst}) }
		known := slices.ContainsFunc(p.endpoints, func(ep plan.Endpoint) bool { return ep.Addr == o.Dst })
		leaves := p.packet.Output || !o.Delivered
		switch {
		case !known || !o.DNAT || o.Action != tracer.Accept:
			return fmt.Errorf("it gets to %s", o)
		case leaves && !o.Masquerade && !keeps(p.before) && !keeps(p.after) && o.Dst.Addr() != p.packet.Src:
			return fmt.Errorf("it gets to %s and is not masqueraded", o)
		}
	}
	return nil
}

// TestTransitions: while a change of policies, endpoints, source ranges or affinity is being made, whoever got to an endpoint
// before it and gets to one after it gets to one of these all the while.
func TestTransitions(t *testing.T) {
	t.Parallel()
	seen := 0
	rapid.Check(t, func(t *rapid.T) {
		// Every state in between is looked at: large plans are left to other tests.
		c := plantest.Clusters().Filter(func(c *plantest.Cluster) bool { return len(c.Plan.Services) <= 40 }).Draw(t, "cluster")
		c.Plan.Settings.LocalhostNodePorts = false
		next := c.Edited(t)
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		for _, a := range c.LocalAddrs {
			k.hostAddrs[a] = struct{}{}
		}
		must(t, e.sync(context.Background(), c.Plan, nil))
		packets := transits(t, c, f, next)
		changed := plantest.Differing(c.Plan, next)
		if rapid.Bool().Draw(t, "everything is compared") {
			changed = nil
		}
		k.calls = nil
		k.before = func() {
			text := k.render()
			rs, err := tracer.ParseSections(f, text)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range packets {
				if rs.Added(p.packet.Src) && !p.packet.Output || slices.ContainsFunc(
					slices.Concat(p.before.Targets, p.after.Targets), func(t plan.Target) bool { return rs.Added(t.Addr.Addr()) }) {
					continue // Addresses of Services that are somebody's own too: see TestRenderVerdicts.
				}
				outcomes, err := rs.Trace(p.packet, tracer.Node{Local: c.Local})
				if err == nil {
					err = p.gets(outcomes)
				}
				if err != nil {
					t.Fatalf("packet %s: after %q, %v\nbefore: %s\nafter: %s\n%s", p.packet, k.calls[:len(k.calls)-1], err, p.before,
						p.after, text)
				}
				seen++
			}
		}
		must(t, e.sync(context.Background(), next, changed))
	})
	if seen == 0 {
		t.Error("no packet was sent")
	}
}
