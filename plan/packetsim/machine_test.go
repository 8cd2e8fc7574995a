package packetsim_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

var (
	nodeIP = netip.MustParseAddr("192.168.1.10")
	client = netip.MustParseAddr("203.0.113.1")
	vip    = netip.MustParseAddr("10.96.0.1")
)

func local(a netip.Addr) bool { return a == nodeIP || a.IsLoopback() }

// to is a packet from the client, which comes in by eth0.
func to(dst netip.Addr, port uint16) plan.Packet {
	return plan.Packet{Src: client, Dst: dst, Protocol: plan.TCP, DstPort: port, InInterface: "eth0"}
}

// testRule is a rule of a front end that has no syntax.
type testRule func(*packetsim.Packet) []packetsim.Effect

func (r testRule) Eval(p *packetsim.Packet, effects []packetsim.Effect) ([]packetsim.Effect, error) {
	return append(effects, r(p)...), nil
}
func (testRule) String() string { return "a rule" }

// dnat changes a packet's destination.
func dnat(p *packetsim.Packet, dst string, probability float64) packetsim.Effect {
	e := packetsim.Effect{Probability: probability, Packet: *p, End: packetsim.Accept}
	e.Packet.DNAT = true
	e.Packet.Translate(netip.MustParseAddrPort(dst))
	return e
}

func always(e packetsim.Effect) testRule {
	return func(p *packetsim.Packet) []packetsim.Effect {
		e.Probability, e.Packet = 1, *p
		return []packetsim.Effect{e}
	}
}

// checkTrace traces a packet to the address of a Service.
func checkTrace(t *testing.T, m *packetsim.Machine, want ...string) {
	t.Helper()
	outcomes, err := m.Trace(to(vip, 80), packetsim.Node{Local: local})
	require.NoError(t, err)
	var got []string
	for _, o := range outcomes {
		got = append(got, o.String())
	}
	if !slices.Equal(got, want) {
		t.Errorf("outcomes are %q, want %q", got, want)
	}
}

func chainOf(rules ...packetsim.Rule) *packetsim.Chain {
	return &packetsim.Chain{Name: "c", Rules: rules}
}

// TestEffects: a rule may have any number of effects, and what their probabilities lack to 1 passes it by.
func TestEffects(t *testing.T) {
	t.Parallel()
	m := packetsim.New(plan.IPv4)
	m.Attach("a", chainOf(testRule(func(p *packetsim.Packet) []packetsim.Effect {
		return []packetsim.Effect{dnat(p, "10.0.0.1:80", 0.5), dnat(p, "10.0.0.2:80", 0.25), dnat(p, "10.0.0.3:80", 0.125)}
	}), always(packetsim.Effect{End: packetsim.Drop})), packetsim.PreRouting, -100, true)
	checkTrace(t, m, "accept at 10.0.0.1:80 with probability 0.500000", "accept at 10.0.0.2:80 with probability 0.250000",
		"accept at 10.0.0.3:80 with probability 0.125000", "drop with probability 0.125000")
	// Ten tenths add up to a little less than 1. What they lack is no way of its own.
	tenths := packetsim.New(plan.IPv4)
	tenths.Attach("a", chainOf(testRule(func(p *packetsim.Packet) []packetsim.Effect {
		var out []packetsim.Effect
		for i := range 10 {
			out = append(out, dnat(p, fmt.Sprintf("10.0.0.%d:80", i), 0.1))
		}
		return out
	}), always(packetsim.Effect{End: packetsim.Drop})), packetsim.PreRouting, -100, true)
	outcomes, err := tenths.Trace(to(vip, 80), packetsim.Node{Local: local})
	if err != nil || len(outcomes) != 10 {
		t.Errorf("outcomes are %v, %v, want 10", outcomes, err)
	}
}

// TestPriorities: base chains of several tables at one hook are walked in the order of their priorities, whatever the order in which
// they were attached.
func TestPriorities(t *testing.T) {
	t.Parallel()
	mark := func(from, to uint32) packetsim.Rule {
		return testRule(func(p *packetsim.Packet) []packetsim.Effect {
			if p.Mark != from {
				return nil
			}
			e := packetsim.Effect{Probability: 1, Packet: *p}
			e.Packet.Mark = to
			return []packetsim.Effect{e}
		})
	}
	m := packetsim.New(plan.IPv4)
	drop := testRule(func(p *packetsim.Packet) []packetsim.Effect {
		if p.Mark != 3 {
			return nil
		}
		return []packetsim.Effect{{Probability: 1, Packet: *p, End: packetsim.Drop}}
	})
	m.Attach("late", chainOf(drop), packetsim.PreRouting, 1000, false)
	m.Attach("early", chainOf(mark(0, 1), always(packetsim.Effect{End: packetsim.Accept}), mark(1, 7)), packetsim.PreRouting, -300, false)
	m.Attach("second", chainOf(mark(2, 3)), packetsim.PreRouting, 0, false)
	m.Attach("first", chainOf(mark(1, 2)), packetsim.PreRouting, -1, false)
	checkTrace(t, m, "drop with probability 1.000000")
}

// TestTranslatesOnce: chains that translate destinations are walked until one does, and not again at a later hook.
func TestTranslatesOnce(t *testing.T) {
	t.Parallel()
	translate := func(dst string) *packetsim.Chain {
		return chainOf(testRule(func(p *packetsim.Packet) []packetsim.Effect { return []packetsim.Effect{dnat(p, dst, 1)} }))
	}
	m := packetsim.New(plan.IPv4)
	m.Attach("none", chainOf(always(packetsim.Effect{End: packetsim.Accept})), packetsim.PreRouting, -110, true)
	m.Attach("a", translate("10.0.0.1:80"), packetsim.PreRouting, -100, true)
	m.Attach("b", translate("10.0.0.2:80"), packetsim.PreRouting, -90, true)
	checkTrace(t, m, "accept at 10.0.0.1:80 with probability 1.000000")
	// A packet that the node sends to itself comes in again, but its destination was decided.
	m = packetsim.New(plan.IPv4)
	m.Attach("out", chainOf(always(packetsim.Effect{End: packetsim.Accept})), packetsim.Output, -100, true)
	m.Attach("in", translate("10.0.0.1:80"), packetsim.PreRouting, -100, true)
	outcomes, err := m.Trace(plan.Packet{Src: nodeIP, Dst: nodeIP, Protocol: plan.TCP, DstPort: 80, Output: true}, packetsim.Node{Local: local})
	if err != nil || len(outcomes) != 1 || outcomes[0].DNAT {
		t.Errorf("outcomes are %v, %v", outcomes, err)
	}
}

// TestNoChain: a rule that leads to a chain that does not exist is an error, not the end of the walk.
func TestNoChain(t *testing.T) {
	t.Parallel()
	m := packetsim.New(plan.IPv4)
	m.Attach("a", chainOf(always(packetsim.Effect{Next: packetsim.Goto, Chain: "d"})), packetsim.PreRouting, 0, false)
	if _, err := m.Trace(to(vip, 80), packetsim.Node{Local: local}); err == nil || !strings.Contains(err.Error(), "there is no chain d") {
		t.Errorf("error is %v", err)
	}
}
