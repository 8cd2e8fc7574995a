package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
	"nodeproxy/plan/plantest"
	"nodeproxy/proxier/portion"
)

// saved is what the kernel holds as iptables-save prints it.
func saved(k *xtablestest.Kernel) string {
	var out strings.Builder
	for _, tbl := range []names.Table{names.Filter, names.NAT} {
		out.WriteString("*" + string(tbl) + "\n")
		for name := range k.Tables[tbl] {
			out.WriteString(":" + name + " - [0:0]\n")
		}
		for name, rules := range k.Tables[tbl] {
			xtables.Chain{Table: tbl, Name: name, Rules: rules}.AppendTo(&out, "")
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

// TestTransitions: while a change of policies, endpoints, source ranges or affinity is being made, at once or in portions, or all
// rules take another form, whoever got to an endpoint before it and gets to one after it gets to one of these all the while.
func TestTransitions(t *testing.T) {
	t.Parallel()
	seen := 0
	rapid.Check(t, func(t *rapid.T) {
		// Every state in between is looked at: large plans are left to other tests.
		c := plantest.Clusters().Filter(func(c *plantest.Cluster) bool { return len(c.Plan.Services) <= 40 }).Draw(t, "cluster")
		next := c.Edited(t)
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f)
		e.MaxNames = rapid.SampledFrom([]int{0, 1, 5, 20}).Draw(t, "batch") // less than a plan takes, but for 0
		compact := rapid.SampledFrom([]int{0, 1, 10, 40})
		e.options.CompactAbove = compact.Draw(t, "compact above")
		queue := portion.New(rapid.SampledFrom([]int{0, 1, 5}).Draw(t, "most at once"))
		program := func(p *plan.Plan, change plan.Change) {
			p, change = queue.Next(p, change)
			program(t, e, p, change)
		}
		program(c.Plan, plan.Everything())
		packets := c.Transits(t, f, next)
		change := plan.Only(plantest.Differing(c.Plan, next))
		if rapid.Bool().Draw(t, "everything is compared") {
			change = plan.Everything()
			e.options.CompactAbove = compact.Draw(t, "compact above, then")
		}
		k.Restores = nil
		k.Changed = func() {
			text := saved(k)
			rs, err := restore.Parse(f, text)
			require.NoError(t, err)
			for _, p := range packets {
				outcomes, err := rs.Trace(p.Packet, packetsim.Node{Local: c.Local})
				if err == nil {
					err = packetsim.AgreeBetween(p.Before, p.After, p.Endpoints, p.Packet, outcomes)
				}
				if err != nil {
					t.Fatalf("packet %s: after %q, %v\nbefore: %s\nafter: %s\n%s", p.Packet, k.Restores, err, p.Before, p.After, text)
				}
				seen++
			}
		}
		for program(next, change); queue.Waiting() > 0; {
			program(next, plan.Only(nil))
		}
	})
	if seen == 0 {
		t.Error("no packet was sent")
	}
}

// TestFrontendPasses: an external IP that passes from a ServicePort of which traffic is refused in part to another one always leads to either.
func TestFrontendPasses(t *testing.T) {
	t.Parallel()
	external := plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("203.0.113.10"), Protocol: plan.TCP, Port: 80}
	planOf := func(owner int) *plan.Plan {
		p := plantest.Large(0, 0)
		for i := range 2 {
			sp := plantest.LargeService(i, 3*i, 3)
			if i == owner {
				sp.Frontends = append(sp.Frontends, external)
			}
			if i == 0 {
				sp.ExternalPolicy = plan.Local // without an endpoint here
			}
			p.Set(sp)
		}
		return p
	}
	e, k := fakeEngine(plan.IPv4)
	before, after := planOf(0), planOf(1)
	program(t, e, before, plan.Everything())
	states := 0
	k.Changed = func() {
		states++
		rules, err := restore.Parse(plan.IPv4, saved(k))
		require.NoError(t, err)
		pkt := plan.Packet{Src: netip.MustParseAddr("192.0.2.1"), SrcLocal: true, Output: true, Dst: external.Addr, Protocol: plan.TCP, DstPort: 80}
		outcomes, err := rules.Trace(pkt, packetsim.Node{Local: func(a netip.Addr) bool { return a == pkt.Src }})
		require.NoError(t, err)
		for _, o := range outcomes {
			if !o.DNAT {
				t.Errorf("after %d changes: %s gets to %s", states, pkt, o)
			}
		}
	}
	program(t, e, after, plan.Only(plantest.Differing(before, after)))
	if states < 2 {
		t.Errorf("all was written in %d steps", states)
	}
}

// TestFrontendPassesInFullSync: an external IP, one of many, passes in a sync of everything that takes several runs from a ServicePort that loses
// its last endpoint for it to one that gets its first. It leads to an endpoint all the while.
func TestFrontendPassesInFullSync(t *testing.T) {
	t.Parallel()
	external := func(i int) plan.Frontend {
		return plan.Frontend{Kind: plan.ExternalIP, Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i)}), Protocol: plan.TCP, Port: 80}
	}
	const services, passes = 40, 100
	planOf := func(owner, firstEndpoint int) *plan.Plan {
		p := plantest.Large(0, 0)
		for i := range services {
			sp := plantest.LargeService(i, 3*i+firstEndpoint, 3)
			sp.Frontends = append(sp.Frontends, external(i))
			switch {
			case i == owner:
				sp.Frontends = append(sp.Frontends, external(passes))
			case i < 2:
				sp.ExternalPolicy = plan.Local // without an endpoint here
			}
			p.Set(sp)
		}
		return p
	}
	e, k := fakeEngine(plan.IPv4)
	e.MaxNames = 30
	program(t, e, planOf(0, 0), plan.Everything())
	states := 0
	k.Changed = func() {
		states++
		rules, err := restore.Parse(plan.IPv4, saved(k))
		require.NoError(t, err)
		pkt := plan.Packet{Src: netip.MustParseAddr("198.51.100.7"), InInterface: "eth0", Dst: external(passes).Addr, Protocol: plan.TCP, DstPort: 80}
		outcomes, err := rules.Trace(pkt, packetsim.Node{Local: func(netip.Addr) bool { return false }})
		require.NoError(t, err)
		for _, o := range outcomes {
			if !o.DNAT {
				t.Errorf("after %d changes: %s gets to %s", states, pkt, o)
			}
		}
	}
	program(t, e, planOf(1, 1), plan.Everything())
	if states < 3 {
		t.Errorf("all was written in %d steps", states)
	}
}

// TestTakesOverAndLosesEndpoints: a ServicePort without endpoints that takes over an address from one of which traffic is refused in part is
// always sent on or refused, by its cluster IP, whether that is its own or the one that it takes over.
func TestTakesOverAndLosesEndpoints(t *testing.T) {
	t.Parallel()
	external := plan.Frontend{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("203.0.113.10"), Protocol: plan.TCP, Port: 80}
	partly := plantest.LargeService(0, 0, 3)
	partly.Frontends, partly.ExternalPolicy = append(partly.Frontends, external), plan.Local // without an endpoint here
	without := plantest.LargeService(0, 0, 3)
	taker := plantest.LargeService(1, 3, 0)
	taker.Frontends = append(taker.Frontends, external)
	heir := plantest.LargeService(1, 3, 0)
	heir.Frontends = partly.Frontends[:1]
	for name, c := range map[string]struct{ before, after []*plan.ServicePort }{
		"its own":         {[]*plan.ServicePort{partly, plantest.LargeService(1, 3, 3)}, []*plan.ServicePort{without, taker}},
		"that of another": {[]*plan.ServicePort{partly}, []*plan.ServicePort{heir}},
	} {
		t.Run(name, func(t *testing.T) {
			before, after := plantest.Large(0, 0), plantest.Large(0, 0)
			for _, sp := range c.before {
				before.Set(sp)
			}
			for _, sp := range c.after {
				after.Set(sp)
			}
			e, k := fakeEngine(plan.IPv4)
			program(t, e, before, plan.Everything())
			states, dst := 0, c.after[len(c.after)-1].Frontends[0]
			k.Changed = func() {
				states++
				rules, err := restore.Parse(plan.IPv4, saved(k))
				require.NoError(t, err)
				pkt := plan.Packet{Src: netip.MustParseAddr("192.0.2.1"), SrcLocal: true, Output: true, Dst: dst.Addr, Protocol: plan.TCP, DstPort: dst.Port}
				outcomes, err := rules.Trace(pkt, packetsim.Node{Local: func(a netip.Addr) bool { return a == pkt.Src }})
				require.NoError(t, err)
				for _, o := range outcomes {
					if !o.DNAT && o.Action != packetsim.Reject {
						t.Errorf("after %d changes: %s gets to %s", states, pkt, o)
					}
				}
			}
			program(t, e, after, plan.Only(plantest.Differing(before, after)))
			if states < 2 {
				t.Errorf("all was written in %d steps", states)
			}
		})
	}
}

// TestEndpointsPassInFullSync: while a sync of everything takes the last endpoint from some ServicePorts and gives others their first, every packet
// to any of them is sent on or refused at all times, however much is written at once, and also where kube-proxy has written what refuses.
func TestEndpointsPassInFullSync(t *testing.T) {
	t.Parallel()
	const few = 10 // Few entries stand in a dispatcher's own chain, many in others below it.
	first := func(i int) bool { return i < few }
	others := func(i int) bool { return i >= few }
	for _, c := range []struct {
		services, most int
		before, after  func(int) bool
		kubeProxy      bool
	}{
		{40, 0, first, others, false}, {40, 5, first, others, false}, {40, 20, others, first, false}, {40, 21, first, others, false},
		{15, 0, first, others, true},
	} {
		name := fmt.Sprintf("%d Services, at most %d names at once, rules of kube-proxy %t", c.services, c.most, c.kubeProxy)
		e, k := fakeEngine(plan.IPv4)
		e.MaxNames = c.most
		after := partlyServed(c.services, c.after)
		program(t, e, partlyServed(c.services, c.before), plan.Everything())
		if filter := k.Tables[names.Filter]; c.kubeProxy {
			filter[names.ExternalServices] = append(slices.DeleteFunc(filter[names.ExternalServices], func(rule string) bool {
				return xtables.Target(rule) == names.ExternalNodePorts
			}), filter[names.ExternalNodePorts]...)
			delete(filter, names.ExternalNodePorts)
		}
		states := 0
		k.Changed = func() {
			states++
			rules, err := restore.Parse(plan.IPv4, saved(k))
			require.NoError(t, err)
			neverLeft(t, after, rules, fmt.Sprintf("%s: after %d changes", name, states))
		}
		program(t, e, after, plan.Everything())
		if states < 3 {
			t.Errorf("%s: all was written in %d steps", name, states)
		}
		k.Changed = nil
		same(t, name, textOfKernel(k), wantText(after, plan.IPv4))
	}
}

// partlyServed is a plan of ServicePorts of which some have endpoints.
func partlyServed(services int, served func(i int) bool) *plan.Plan {
	p := plantest.Large(0, 0)
	for i := range services {
		endpoints := 0
		if served(i) {
			endpoints = 3
		}
		sp := plantest.LargeService(i, 3*i, endpoints)
		sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}),
			Protocol: plan.TCP, Port: 80}, plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: uint16(30000 + i)})
		p.Set(sp)
	}
	return p
}

// neverLeft fails if rules neither send on nor refuse a packet to a ServicePort.
func neverLeft(t *testing.T, p *plan.Plan, rules *packetsim.Machine, when string) {
	t.Helper()
	node := netip.MustParseAddr("192.0.2.1")
	local := packetsim.Node{Local: func(a netip.Addr) bool { return a == node }}
	for _, sp := range p.Sorted(plan.IPv4) {
		for _, f := range sp.Frontends {
			pkt := plan.Packet{Src: netip.MustParseAddr("198.51.100.7"), InInterface: "eth0", Dst: f.Addr, Protocol: plan.TCP, DstPort: f.Port}
			if f.Kind == plan.NodePort {
				pkt.Dst, pkt.DstLocal = node, true
			}
			outcomes, err := rules.Trace(pkt, local)
			require.NoError(t, err)
			for _, o := range outcomes {
				if !o.DNAT && o.Action != packetsim.Reject {
					t.Fatalf("%s, %s gets to %s", when, pkt, o)
				}
			}
		}
	}
}

// TestInternalPolicyOfMany: while a comparison of everything changes the internal policy of more ServicePorts than are written at once,
// what comes from outside is masqueraded all the while, whichever the policy was.
func TestInternalPolicyOfMany(t *testing.T) {
	t.Parallel()
	const services = 150
	planOf := func(policy plan.Policy) *plan.Plan {
		p := plantest.Large(services, 3)
		for i := range services {
			sp := plantest.LargeService(i, 3*i, 3)
			sp.InternalPolicy = policy
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: uint16(30000 + i)})
			sp.Local = sp.Cluster[:1]
			p.Set(sp)
		}
		return p
	}
	other := map[plan.Policy]plan.Policy{plan.Cluster: plan.Local, plan.Local: plan.Cluster}
	for before, after := range other {
		e, k := fakeEngine(plan.IPv4)
		e.MaxNames = xtables.MaxNames
		program(t, e, planOf(before), plan.Everything())
		next := planOf(after)
		states := 0
		k.Changed = func() {
			rs, err := restore.Parse(plan.IPv4, saved(k))
			require.NoError(t, err)
			for _, sp := range next.Sorted(plan.IPv4) {
				pkt := plan.Packet{Src: netip.MustParseAddr("203.0.113.7"), Dst: sp.Frontends[0].Addr, Protocol: plan.TCP, DstPort: 80,
					InInterface: "eth0"}
				outcomes, err := rs.Trace(pkt, packetsim.Node{Local: func(netip.Addr) bool { return false }})
				require.NoError(t, err)
				for _, o := range outcomes {
					if !o.DNAT || !o.Masquerade {
						t.Fatalf("from %v to %v, after %d writes: %s gets to %s", before, after, len(k.Restores), pkt, o)
					}
				}
			}
			states++
		}
		k.Restores = nil
		program(t, e, next, plan.Everything())
		if states < 3 {
			t.Errorf("from %v to %v: all was written in %d steps", before, after, states)
		}
		k.Changed = nil
		same(t, fmt.Sprintf("from %v to %v", before, after), textOfKernel(k), wantText(next, plan.IPv4))
	}
}
