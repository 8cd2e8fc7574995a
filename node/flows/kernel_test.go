package flows

import (
	"log/slog"
	"net/netip"
	"os/exec"
	"testing"

	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/plan"
)

// entry describes a flow.
type entry = conntracktest.Entry

// wantPresent checks which of the entries are left, by their sources.
func wantPresent(t testing.TB, entries []entry, want ...string) {
	t.Helper()
	got := conntracktest.Present(t, entries)
	for _, w := range want {
		if !got[w] {
			t.Errorf("the flow from %s was removed, but should have stayed", w)
		}
		delete(got, w)
	}
	for s := range got {
		t.Errorf("the flow from %s is still there", s)
	}
}

func newReconciler(change func(*Config)) *Reconciler {
	cfg := Config{Families: plan.Families[:], Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	return New(cfg)
}

// reconciling returns a Reconciler of a plan of these ServicePorts, and the plan.
func reconciling(change func(*Config), list ...*plan.ServicePort) (*Reconciler, *plan.Plan) {
	r, p := newReconciler(change), plan.New(plan.Node{}, plan.Settings{})
	for _, sp := range list {
		p.Set(sp)
	}
	r.Update(p, plan.Everything())
	return r, p
}

// mustPass does one pass.
func mustPass(t testing.TB, r *Reconciler) {
	t.Helper()
	if _, err := r.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// set puts ServicePorts into a plan, and tells r, for which that is a change.
func set(r *Reconciler, p *plan.Plan, list ...*plan.ServicePort) {
	changed := plan.Keys{}
	for _, sp := range list {
		p.Set(sp)
		changed.Add(sp.Key)
	}
	r.Update(p, plan.Only(changed))
}

func sh(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

// service makes a ServicePort with a cluster IP and endpoints in use.
func service(name string, protocol plan.Protocol, clusterIP string, endpoints ...string) *plan.ServicePort {
	at := netip.MustParseAddrPort(clusterIP)
	sp := &plan.ServicePort{
		Key: plan.Key{Service: plan.Service{Namespace: "default", Name: name}, Protocol: protocol,
			Family: plan.FamilyOf(at.Addr())},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: at.Addr(), Protocol: protocol, Port: at.Port()},
		},
	}
	for _, e := range endpoints {
		sp.Cluster = append(sp.Cluster, plan.Endpoint{Addr: netip.MustParseAddrPort(e)})
	}
	sp.Any = len(endpoints) > 0
	return sp
}

func withNodePort(sp *plan.ServicePort, port uint16) *plan.ServicePort {
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: sp.Key.Protocol, Port: port})
	return sp
}
