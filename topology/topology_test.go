package topology

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed"
	"nodeproxy/plan"
)

// ep makes a ready endpoint 10.0.0.N:80 on a node; its changes are applied in order.
func ep(n int, node string, changes ...func(*Endpoint)) Endpoint {
	e := Endpoint{Addr: at(n), Node: node, Ready: true, Serving: true}
	for _, c := range changes {
		c(&e)
	}
	return e
}

func at(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80)
}

func notReady(e *Endpoint)    { e.Ready, e.Serving = false, false }
func terminating(e *Endpoint) { e.Ready, e.Terminating = false, true }
func stopped(e *Endpoint)     { e.Ready, e.Serving, e.Terminating = false, false, true }
func zones(z ...string) func(*Endpoint) {
	return func(e *Endpoint) { e.ForZones = z }
}
func nodes(n ...string) func(*Endpoint) {
	return func(e *Endpoint) { e.ForNodes = n }
}

func list(eps []plan.Endpoint) string {
	out := ""
	for _, e := range eps {
		out += fmt.Sprintf("%d", e.Addr.Addr().As4()[3])
		if e.Terminating {
			out += "t"
		}
		if e.Local {
			out += "l"
		}
		out += " "
	}
	return out
}

func TestSelect(t *testing.T) {
	both := Use{Cluster: true, Local: true}
	for _, c := range []struct {
		name           string
		endpoints      []Endpoint
		use            Use
		zone           string
		unnamed        bool   // the node's name is not known
		cluster, local string // addresses' last numbers; t is terminating, l on this node
		any            bool
		excluded       map[string]plan.Reason // "policy number"
	}{
		{name: "no endpoints", use: both},
		{
			name: "ready ones anywhere, and those here", use: both,
			endpoints: []Endpoint{ep(2, "other"), ep(1, "me")},
			cluster:   "1l 2 ", local: "1l ", any: true,
			excluded: map[string]plan.Reason{"Local 2": plan.NotLocal},
		},
		{
			name: "policy Cluster alone", use: Use{Cluster: true},
			endpoints: []Endpoint{ep(1, "me"), ep(2, "other")},
			cluster:   "1l 2 ", any: true,
		},
		{
			name: "policy Local alone, none here, but elsewhere", use: Use{Local: true},
			endpoints: []Endpoint{ep(2, "other")}, any: true,
			excluded: map[string]plan.Reason{"Local 2": plan.NotLocal},
		},
		{
			name: "an endpoint on a node of unknown name is not local", use: both,
			endpoints: []Endpoint{ep(1, "")},
			cluster:   "1 ", any: true,
			excluded: map[string]plan.Reason{"Local 1": plan.NodeUnknown},
		},
		{
			name: "not ready", use: both,
			endpoints: []Endpoint{ep(1, "me", notReady), ep(2, "me")},
			cluster:   "2l ", local: "2l ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.NotReady, "Local 1": plan.NotReady},
		},
		{
			name: "only some that are not ready", use: both,
			endpoints: []Endpoint{ep(1, "me", notReady)},
			excluded:  map[string]plan.Reason{"Cluster 1": plan.NotReady, "Local 1": plan.NotReady},
		},
		{
			name: "serving but neither ready nor terminating is not a fallback", use: Use{Cluster: true},
			endpoints: []Endpoint{ep(1, "me", func(e *Endpoint) { e.Ready = false })},
			excluded:  map[string]plan.Reason{"Cluster 1": plan.NotReady},
		},
		{
			name: "terminating ones while no ready one is left", use: both,
			endpoints: []Endpoint{ep(1, "me", terminating), ep(2, "other", terminating), ep(3, "me", stopped)},
			cluster:   "1tl 2t ", local: "1tl ", any: true,
			excluded: map[string]plan.Reason{
				"Cluster 3": plan.TerminatingStopped, "Local 2": plan.NotLocal, "Local 3": plan.TerminatingStopped,
			},
		},
		{
			name: "the fallback is decided for each policy by itself", use: both,
			endpoints: []Endpoint{ep(1, "me", terminating), ep(2, "other")},
			cluster:   "2 ", local: "1tl ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.Terminating, "Local 2": plan.NotLocal},
		},
		{
			name: "ready and terminating, as publishNotReadyAddresses makes them, is ready", use: Use{Cluster: true},
			endpoints: []Endpoint{ep(1, "me", func(e *Endpoint) { e.Terminating = true })},
			cluster:   "1l ", any: true,
		},
		{
			name: "zone hints", use: both, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("b")), ep(2, "other", zones("a", "b"))},
			cluster:   "2 ", local: "1l ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.NotForThisZone, "Local 2": plan.NotLocal},
		},
		{
			name: "zone hints count only if every ready endpoint has them", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("b")), ep(2, "other", zones("a")), ep(3, "other")},
			cluster:   "1l 2 3 ", any: true,
		},
		{
			name: "an endpoint that is not ready need not have hints", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("b")), ep(2, "other", zones("a")), ep(3, "other", notReady)},
			cluster:   "2 ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.NotForThisZone, "Cluster 3": plan.NotReady},
		},
		{
			name: "zone hints for other zones only", use: Use{Cluster: true}, zone: "c",
			endpoints: []Endpoint{ep(1, "me", zones("b")), ep(2, "other", zones("a"))},
			cluster:   "1l 2 ", any: true,
		},
		{
			name: "a node without a zone takes all", use: Use{Cluster: true},
			endpoints: []Endpoint{ep(1, "me", zones("b")), ep(2, "other", zones("a"))},
			cluster:   "1l 2 ", any: true,
		},
		{
			name: "node hints come before zone hints", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "me", nodes("me"), zones("a")), ep(2, "other", nodes("other"), zones("a"))},
			cluster:   "1l ", any: true,
			excluded: map[string]plan.Reason{"Cluster 2": plan.NotForThisNode},
		},
		{
			name: "node hints for other nodes only: zone hints", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "x", nodes("x"), zones("a")), ep(2, "y", nodes("y"), zones("b"))},
			cluster:   "1 ", any: true,
			excluded: map[string]plan.Reason{"Cluster 2": plan.NotForThisZone},
		},
		{
			name: "one endpoint without a node hint: zone hints", use: Use{Cluster: true}, zone: "b",
			endpoints: []Endpoint{ep(1, "me", nodes("me"), zones("a")), ep(2, "y", zones("b"))},
			cluster:   "2 ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.NotForThisZone},
		},
		{
			name: "hints say nothing about policy Local", use: both, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("b"), nodes("other")), ep(2, "other", zones("a"), nodes("me"))},
			cluster:   "2 ", local: "1l ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.NotForThisNode, "Local 2": plan.NotLocal},
		},
		{
			name: "a terminating endpoint is no fallback while a ready one is hinted elsewhere", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("a"), terminating), ep(2, "other", zones("a")), ep(3, "x", zones("b"))},
			cluster:   "2 ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.Terminating, "Cluster 3": plan.NotForThisZone},
		},
		{
			name: "where only a terminating endpoint is hinted here, hints do not count", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("a"), terminating), ep(2, "other", zones("b"))},
			cluster:   "2 ", any: true,
			excluded: map[string]plan.Reason{"Cluster 1": plan.Terminating},
		},
		{
			name: "a node without a name has nothing local", use: both, unnamed: true,
			endpoints: []Endpoint{ep(1, ""), ep(2, "me")},
			cluster:   "1 2 ", any: true,
			excluded: map[string]plan.Reason{"Local 1": plan.NodeUnknown, "Local 2": plan.NotLocal},
		},
		{
			name: "all shutting down, some of them elsewhere: Local drops, Cluster goes on", use: both,
			endpoints: []Endpoint{ep(1, "me", stopped), ep(2, "other", terminating)},
			cluster:   "2t ", any: true,
			excluded: map[string]plan.Reason{
				"Cluster 1": plan.TerminatingStopped, "Local 1": plan.TerminatingStopped, "Local 2": plan.NotLocal,
			},
		},
		{
			name: "hints do not keep a terminating one from standing in", use: Use{Cluster: true}, zone: "a",
			endpoints: []Endpoint{ep(1, "me", zones("b"), terminating)},
			cluster:   "1tl ", any: true,
		},
		{
			name: "an address in two slices, terminating in one", use: Use{Cluster: true},
			endpoints: []Endpoint{ep(1, "other", terminating), ep(1, "me"), ep(1, "other", stopped)},
			cluster:   "1l ", any: true,
		},
		{
			name: "an address twice, terminating and merely not ready: the one that is there to stay", use: Use{Cluster: true},
			endpoints: []Endpoint{ep(1, "other", terminating), ep(1, "me", notReady)},
			excluded:  map[string]plan.Reason{"Cluster 1": plan.NotReady},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := Node{Name: "me", Zone: c.zone}
			if c.unnamed {
				node.Name = ""
			}
			got := Select(c.endpoints, node, c.use)
			if list(got.Cluster) != c.cluster || list(got.Local) != c.local || got.Any != c.any {
				t.Errorf("cluster %q, local %q, any %v; want %q, %q, %v",
					list(got.Cluster), list(got.Local), got.Any, c.cluster, c.local, c.any)
			}
			reasons := map[string]plan.Reason{}
			for _, x := range got.Excluded {
				reasons[fmt.Sprintf("%s %d", x.Policy, x.Addr.Addr().As4()[3])] = x.Reason
			}
			if fmt.Sprint(reasons) != fmt.Sprint(c.excluded) && len(reasons)+len(c.excluded) > 0 {
				t.Errorf("excluded %v; want %v", reasons, c.excluded)
			}
		})
	}
}

// TestSameAddressTwice goes through every pair of conditions that one address can have in two slices: the entry that is not
// terminating counts, then the one that is ready, then the one that serves, in whatever order they come.
func TestSameAddressTwice(t *testing.T) {
	t.Parallel()
	best := []string{ // from the best description of what answers there now to the worst
		"ready serving", "ready", "serving", "", // not terminating
		"ready serving terminating", "ready terminating", "serving terminating", "terminating",
	}
	entry := func(conditions, node string) Endpoint {
		has := func(c string) bool { return slices.Contains(strings.Fields(conditions), c) }
		return Endpoint{Addr: at(1), Node: node, Ready: has("ready"), Serving: has("serving"),
			Terminating: has("terminating")}
	}
	for i := range best {
		for j := i + 1; j < len(best); j++ {
			better, worse := entry(best[i], "z"), entry(best[j], "a")
			for _, list := range [][]Endpoint{{better, worse}, {worse, better}, {worse, better, worse}} {
				got := Merge(list)
				if len(got) != 1 || got[0].Node != "z" {
					t.Errorf("of %q and %q, %+v was kept", best[i], best[j], got)
				}
			}
		}
	}
	equal := Merge([]Endpoint{entry("ready", "b"), entry("ready", "a")})
	if len(equal) != 1 || equal[0].Node != "a" {
		t.Errorf("of two equally good entries, the choice is %+v, want always that of the lower node name", equal)
	}
	if got := Merge([]Endpoint{{Addr: at(2)}, {Addr: at(1)}}); len(got) != 2 || got[0].Addr != at(1) {
		t.Errorf("two addresses became %+v", got)
	}
	samePod := netip.AddrPortFrom(at(1).Addr(), 81)
	if got := Merge([]Endpoint{{Addr: samePod}, {Addr: at(1)}}); len(got) != 2 {
		t.Errorf("two ports of one address became %+v", got)
	}
}

// TestMergeLeavesItsInput: callers share what they pass in.
func TestMergeLeavesItsInput(t *testing.T) {
	t.Parallel()
	list := []Endpoint{ep(2, "me"), ep(1, "me"), ep(1, "other", terminating)}
	before := slices.Clone(list)
	Select(list, Node{Name: "me"}, Use{Cluster: true, Local: true})
	if fmt.Sprint(list) != fmt.Sprint(before) {
		t.Errorf("the endpoints given have become %v", list)
	}
}

// TestWeight: an endpoint's weight is handed on, and of two entries for one address that are equally good otherwise the one
// that has a weight counts.
func TestWeight(t *testing.T) {
	t.Parallel()
	with := func(e Endpoint, weight uint16) Endpoint { e.Weight = weight; return e }
	for _, list := range [][]Endpoint{
		{with(ep(1, "me"), 3), ep(1, "me"), ep(2, "me")},
		{ep(2, "me"), ep(1, "me"), with(ep(1, "me"), 3)},
		{with(ep(1, "me"), 3), with(ep(1, "me", terminating), 9), ep(2, "me")},
	} {
		got := Select(list, Node{Name: "me"}, Use{Cluster: true, Local: true})
		for _, chosen := range [][]plan.Endpoint{got.Cluster, got.Local} {
			if len(chosen) != 2 || chosen[0].Weight != 3 || chosen[1].Weight != 0 {
				t.Errorf("of %v: %v, want weights 3 and 0", list, chosen)
			}
		}
	}
}

func TestUseOf(t *testing.T) {
	for _, c := range []struct {
		internal, external plan.Policy
		hasExternal        bool
		want               Use
	}{
		{plan.Cluster, plan.Cluster, false, Use{Cluster: true}},
		{plan.Cluster, plan.Local, false, Use{Cluster: true}},
		{plan.Local, plan.Cluster, false, Use{Local: true}},
		{plan.Local, plan.Cluster, true, Use{Cluster: true, Local: true}},
		{plan.Cluster, plan.Local, true, Use{Cluster: true, Local: true}},
		{plan.Local, plan.Local, true, Use{Cluster: true, Local: true}},
	} {
		if got := UseOf(c.internal, c.external, c.hasExternal); got != c.want {
			t.Errorf("internal %s, external %s, external frontends %v: %v, want %v",
				c.internal, c.external, c.hasExternal, got, c.want)
		}
	}
}

func drawEndpoint(t *rapid.T) Endpoint {
	name := rapid.SampledFrom([]string{"", "me", "other"})
	hints := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "me"}), 0, 2)
	return Endpoint{
		Addr:  at(rapid.IntRange(1, 6).Draw(t, "address")),
		Node:  name.Draw(t, "node"),
		Ready: rapid.Bool().Draw(t, "ready"), Serving: rapid.Bool().Draw(t, "serving"),
		Terminating: rapid.Bool().Draw(t, "terminating"),
		ForZones:    hints.Draw(t, "zones"), ForNodes: hints.Draw(t, "nodes"),
		Weight: rapid.SampledFrom([]uint16{0, 1, 3}).Draw(t, "weight"),
	}
}

// TestSelectAccountsForEveryEndpoint: whatever the endpoints and their order, each address is either chosen or left out
// with a reason, for each policy in use.
func TestSelectAccountsForEveryEndpoint(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		endpoints := rapid.SliceOfN(rapid.Custom(drawEndpoint), 0, 8).Draw(t, "endpoints")
		node := Node{Name: "me", Zone: rapid.SampledFrom([]string{"", "a", "c"}).Draw(t, "zone")}
		use := Use{Cluster: rapid.Bool().Draw(t, "cluster"), Local: rapid.Bool().Draw(t, "local")}
		got := Select(endpoints, node, use)
		again := Select(rapid.Permutation(endpoints).Draw(t, "order"), node, use)
		if fmt.Sprint(got) != fmt.Sprint(again) {
			t.Fatalf("another order, another choice:\n%v\n%v", got, again)
		}
		merged := map[netip.AddrPort]Endpoint{}
		for _, e := range Merge(endpoints) {
			merged[e.Addr] = e
		}
		checkAccount(t, plan.Cluster, use.Cluster, got.Cluster, got.Excluded, merged)
		checkAccount(t, plan.Local, use.Local, got.Local, got.Excluded, merged)
		usable := false
		for _, e := range merged {
			usable = usable || e.Ready || e.Serving && e.Terminating
		}
		if got.Any != usable {
			t.Fatalf("any is %v, want %v", got.Any, usable)
		}
		if use.Cluster && usable && len(got.Cluster) == 0 {
			t.Fatal("endpoints are usable, but policy Cluster has none")
		}
		inOrder := func(a, b plan.Exclusion) int { return cmp.Or(cmp.Compare(a.Policy, b.Policy), a.Addr.Compare(b.Addr)) }
		if !slices.IsSortedFunc(got.Excluded, inOrder) {
			t.Fatalf("what is left out is not in order: %v", got.Excluded)
		}
	})
}

// checkAccount checks that a policy in use chooses or leaves out each address exactly once, and one that is not in use says
// nothing; and what is said of each.
func checkAccount(t *rapid.T, policy plan.Policy, inUse bool, chosen []plan.Endpoint, excluded []plan.Exclusion,
	all map[netip.AddrPort]Endpoint) {
	count := map[netip.AddrPort]int{}
	for _, e := range chosen {
		count[e.Addr]++
		from := all[e.Addr]
		if e.Local != (from.Node == "me") || policy == plan.Local && !e.Local {
			t.Fatalf("policy %s: %+v was made of %+v", policy, e, from)
		}
		if e.Terminating == from.Ready || !from.Ready && !(from.Serving && from.Terminating) {
			t.Fatalf("policy %s: %+v, which is %+v, is chosen", policy, e, from)
		}
		if e.Terminating != chosen[0].Terminating {
			t.Fatalf("policy %s: ready and terminating endpoints are chosen together: %v", policy, chosen)
		}
	}
	for _, x := range excluded {
		if x.Policy != policy {
			continue
		}
		count[x.Addr]++
		if x.Reason == "" {
			t.Fatalf("policy %s: %s is left out without a reason", policy, x.Addr)
		}
	}
	want := 0
	if inUse {
		want = 1
	}
	for addr := range all {
		if count[addr] != want {
			t.Fatalf("policy %s: %s is accounted for %d times, want %d", policy, addr, count[addr], want)
		}
		delete(count, addr)
	}
	if len(count) > 0 {
		t.Fatalf("policy %s: nobody gave %v", policy, count)
	}
}
