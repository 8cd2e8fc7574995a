package iptables

import (
	"strings"
	"testing"

	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestRefusalByReset has Services without endpoints that ask for resets, and others, on the real kernel of both variants.
func TestRefusalByReset(t *testing.T) {
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		for _, protocol := range []plan.Protocol{plan.TCP, plan.UDP} {
			for _, reset := range []bool{false, true} {
				sp := *plantest.LargeService(0, 0, 0)
				sp.Key.Protocol, sp.ResetTCP = protocol, reset
				sp.Frontends = []plan.Frontend{sp.Frontends[0], {Kind: plan.NodePort, Protocol: protocol, Port: 30080}}
				sp.Frontends[0].Protocol = protocol
				p := plan.New(plan.Node{Name: "me"}, plan.Settings{})
				p.Set(&sp)
				want := "REJECT --reject-with icmp-port-unreachable"
				if reset && protocol == plan.TCP {
					want = "REJECT --reject-with tcp-reset"
				}
				e := realEngine(t, v, plan.IPv4)
				program(t, e, p, plan.Everything())
				if held := ours(t, e.Kernel); strings.Count(held, want) != 2 || strings.Count(held, "REJECT") != 2 {
					t.Errorf("%s, reset %t: want %q twice in\n%s", protocol, reset, want, held)
				}
			}
		}
	})
}
