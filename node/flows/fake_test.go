package flows

import (
	"slices"

	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// staleFlows are n flows to a Service whose endpoint is another one by now.
func staleFlows(n int) []entry {
	e := entry{Dst: "10.96.0.10:53", From: "10.244.2.2:5353"}
	return fromPort(protoUDP, "10.244.1.9", slices.Repeat([]entry{e}, n), 1)
}

// fakeReconciler knows a UDP Service at 10.96.0.10:53, on a machine without addresses.
func fakeReconciler(k *conntracktest.Kernel, change func(*Config)) (*Reconciler, *plan.Plan) {
	r, p := reconciling(func(c *Config) {
		c.Families, c.Dial = []plan.Family{plan.IPv4}, k.Dial
		c.Local = func(plan.Family) (*host.Local, error) { return &host.Local{}, nil }
		if change != nil {
			change(c)
		}
	}, service("dns", plan.UDP, "10.96.0.10:53", "10.244.1.1:5353"))
	return r, p
}
