package packetsim_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

func TestAgree(t *testing.T) {
	t.Parallel()
	one, two := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80")
	forward := plan.Verdict{Action: plan.Forward, Targets: []plan.Target{{Addr: one}, {Addr: two, Masquerade: true}}}
	at := func(dst netip.AddrPort, masquerade bool, probability float64) packetsim.Outcome {
		return packetsim.Outcome{Action: packetsim.Accept, Dst: dst, DNAT: true, Masquerade: masquerade,
			Probability: probability}
	}
	delivered := at(two, false, 0.5)
	delivered.Delivered = true
	for _, tc := range []struct {
		name     string
		verdict  plan.Verdict
		output   bool
		outcomes []packetsim.Outcome
		want     string // in the error; empty for none
	}{
		{name: "forward", verdict: forward, outcomes: []packetsim.Outcome{at(one, false, 0.5), at(two, true, 0.5)}},
		{name: "nearly fair", verdict: forward, outcomes: []packetsim.Outcome{at(one, false, 0.50001), at(two, true,
			0.49999)}},
		{"not fair", forward, false, []packetsim.Outcome{at(one, false, 0.501), at(two, true, 0.499)},
			"must have probability 0.500000"},
		{"missing", forward, false, []packetsim.Outcome{at(one, false, 0.5)}, "10.0.0.2:80 is never reached"},
		{"other", forward, false, []packetsim.Outcome{at(one, false, 0.5), at(netip.MustParseAddrPort("10.0.0.2:81"),
			true, 0.5)},
			"10.0.0.2:81 must not be reached"},
		{"masquerade", forward, false, []packetsim.Outcome{at(one, true, 0.5), at(two, true, 0.5)},
			"at 10.0.0.1:80, masquerading must be false"},
		{"no masquerade", forward, false, []packetsim.Outcome{at(one, false, 0.5), at(two, false, 0.5)},
			"masquerading must be true"},
		{name: "it stays here", verdict: forward, outcomes: []packetsim.Outcome{at(one, false, 0.5), delivered}},
		{"it stays here, but passed masquerading", forward, true, []packetsim.Outcome{at(one, false, 0.5), delivered},
			"must be true"},
		{"dropped", forward, false, []packetsim.Outcome{{Action: packetsim.Drop, Dst: one, DNAT: true, Probability: 1}},
			"it must be forwarded"},
		{"not forwarded", forward, false, []packetsim.Outcome{{Action: packetsim.Accept, Dst: one, Probability: 1}},
			"it must be forwarded"},
		{name: "pass", outcomes: []packetsim.Outcome{{Action: packetsim.Accept, Dst: one, Probability: 1}}},
		{"pass changed", plan.Verdict{}, false, []packetsim.Outcome{at(one, false, 1)}, "must not change to 10.0.0.1:80"},
		{"pass masqueraded", plan.Verdict{}, false, []packetsim.Outcome{{Action: packetsim.Accept, Masquerade: true,
			Probability: 1}},
			"source must not change"},
		{"pass dropped", plan.Verdict{}, false, []packetsim.Outcome{{Action: packetsim.Drop, Probability: 1}}, "must not be"},
		{name: "reject", verdict: plan.Verdict{Action: plan.Reject},
			outcomes: []packetsim.Outcome{{Action: packetsim.Reject, Probability: 1}}},
		{"reject by chance", plan.Verdict{Action: plan.Reject}, false,
			[]packetsim.Outcome{{Action: packetsim.Reject, Probability: 0.9}, {Action: packetsim.Accept, Probability: 0.1}},
			"must not be"},
		{"reject dropped", plan.Verdict{Action: plan.Reject}, false, []packetsim.Outcome{{Action: packetsim.Drop,
			Probability: 1}}, "must not be"},
		{name: "drop", verdict: plan.Verdict{Action: plan.Drop}, outcomes: []packetsim.Outcome{{Action: packetsim.Drop,
			Probability: 1}}},
		{"drop changed", plan.Verdict{Action: plan.Drop}, false,
			[]packetsim.Outcome{{Action: packetsim.Drop, DNAT: true, Dst: one, Probability: 1}}, "must not change"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := packetsim.Agree(tc.verdict, plan.Packet{Output: tc.output}, tc.outcomes)
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("they do not agree: %v", err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
}

// TestAgreeBetween: during a change a packet reaches an endpoint of before or after, masqueraded if the verdicts that know the endpoint
// say so.
func TestAgreeBetween(t *testing.T) {
	t.Parallel()
	at := func(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }
	old, kept, added, other := at("10.0.0.1:80"), at("10.0.0.2:80"), at("10.0.0.3:80"), at("10.0.0.4:80")
	verdict := func(masquerade bool, targets ...netip.AddrPort) plan.Verdict {
		v := plan.Verdict{Action: plan.Forward}
		for _, a := range targets {
			v.Targets = append(v.Targets, plan.Target{Addr: a, Masquerade: masquerade})
		}
		return v
	}
	endpoints := []plan.Endpoint{{Addr: old}, {Addr: kept}, {Addr: added}}
	outcome := func(dst netip.AddrPort, masquerade bool) packetsim.Outcome {
		return packetsim.Outcome{Action: packetsim.Accept, Dst: dst, DNAT: true, Masquerade: masquerade, Probability: 1}
	}
	delivered, dropped, passed := outcome(kept, false), outcome(kept, true), outcome(kept, true)
	delivered.Delivered, dropped.Action, passed.DNAT = true, packetsim.Drop, false
	hairpin := to(vip, 80)
	hairpin.Src = kept.Addr()
	sent := to(vip, 80)
	sent.Output = true
	for _, tc := range []struct {
		name          string
		before, after plan.Verdict
		packet        plan.Packet
		outcome       packetsim.Outcome
		want          string // in the error; empty for none
	}{
		{"endpoint of before", verdict(false, old, kept), verdict(false, kept, added), to(vip, 80), outcome(old, false), ""},
		{"endpoint of after", verdict(false, old, kept), verdict(false, kept, added), to(vip, 80), outcome(added, false), ""},
		{"no endpoint", verdict(false, old, kept), verdict(false, kept, added), to(vip, 80), outcome(other, false), "it gets to"},
		{"dropped", verdict(false, kept), verdict(false, kept), to(vip, 80), dropped, "it gets to drop"},
		{"past the Service", verdict(false, kept), verdict(false, kept), to(vip, 80), passed, "it gets to accept"},
		{"not masqueraded", verdict(true, kept), verdict(true, kept), to(vip, 80), outcome(kept, false), "not masqueraded"},
		{"masqueraded only before", verdict(true, kept), verdict(false, kept), to(vip, 80), outcome(kept, false), ""},
		{"masqueraded only by the verdict that knows it", verdict(true, old), verdict(false, kept), to(vip, 80), outcome(old, false),
			"not masqueraded"},
		{"it stays here", verdict(true, kept), verdict(true, kept), to(vip, 80), delivered, ""},
		{"it stays here, but passed masquerading", verdict(true, kept), verdict(true, kept), sent, delivered, "not masqueraded"},
		{"an endpoint to itself", verdict(true, kept), verdict(true, kept), hairpin, outcome(kept, false), ""},
	} {
		err := packetsim.AgreeBetween(tc.before, tc.after, endpoints, tc.packet, []packetsim.Outcome{tc.outcome})
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: error is %v, want one with %q", tc.name, err, tc.want)
		}
	}
}

// TestCompare compares a plan with hand-written rules, right and wrong.
func TestCompare(t *testing.T) {
	t.Parallel()
	p := plan.New(plan.Node{Name: "n"}, plan.Settings{})
	p.Set(&plan.ServicePort{
		Key:       plan.Key{Service: plan.Service{Namespace: "a", Name: "b"}, Protocol: plan.TCP, Family: plan.IPv4},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Addr: vip, Protocol: plan.TCP, Port: 80}},
		Endpoints: plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.0.0.1:8080")}}},
	})
	e := plan.NewEvaluator(p)
	node := packetsim.Node{Local: local}
	right := packetsim.New(plan.IPv4)
	right.Attach("nat", &packetsim.Chain{Name: "c", Rules: []packetsim.Rule{testRule(func(p *packetsim.Packet) []packetsim.Effect {
		if p.Dst != vip || p.Port != 80 {
			return nil
		}
		return []packetsim.Effect{dnat(p, "10.0.0.1:8080", 1)}
	})}}, packetsim.PreRouting, -100, true)
	for _, pkt := range []plan.Packet{to(vip, 80), to(vip, 81)} {
		assert.NoError(t, packetsim.Compare(e, right, pkt, node))
	}
	wrong := packetsim.New(plan.IPv4)
	err := packetsim.Compare(e, wrong, to(vip, 80), node)
	for _, part := range []string{"TCP from 203.0.113.1 to 10.96.0.1:80", "forward to 10.0.0.1:8080",
		"cluster IP 10.96.0.1:80/TCP of a/b",
		"10.0.0.1:8080 is never reached"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error is %v, want one with %q", err, part)
		}
	}
	pkt := to(nodeIP, 80)
	if err := packetsim.Compare(e, wrong, pkt, node); err == nil {
		t.Error("a packet to a local address that does not say so was compared")
	}
}
