package proxier

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/source"
)

func newTestState(report source.Report) *State {
	return NewState("me", plan.Settings{
		DetectLocal:  plan.DetectLocal{Mode: plan.DetectNodeCIDR},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
	}, plan.Families[:], report)
}

func dump(p *plan.Plan) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%+v %+v\n", p.Node, p.Settings)
	for _, f := range plan.Families {
		for _, sp := range p.Sorted(f) {
			fmt.Fprintf(&b, "%+v\n", *sp)
		}
	}
	return b.String()
}

// TestPlanFollowsFromObjectsAlone: whatever the order and grouping of events, and however often the plan was made
// meanwhile, it is the one that the final objects give; and the keys that Update names are those that differ.
func TestPlanFollowsFromObjectsAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, s := newCluster(), newTestState(nil)
		var before snapshot
		var pending source.Batch
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			pending.Merge(c.drawEvent(t))
			if rapid.Bool().Draw(t, "apply") {
				s.Apply(pending)
				pending = source.Batch{}
			}
			if rapid.IntRange(0, 3).Draw(t, "update") == 0 {
				before = checkChanged(t, s, before)
			}
		}
		s.Apply(pending)
		checkChanged(t, s, before)

		atOnce := newTestState(nil)
		atOnce.Apply(c.all())
		atOnce.Update()
		if got, want := dump(s.Plan()), dump(atOnce.Plan()); got != want {
			t.Fatalf("by events:\n%s\nat once:\n%s", got, want)
		}
		ordered := newTestState(nil)
		for _, b := range c.oneByOne(t) {
			ordered.Apply(b)
			if rapid.Bool().Draw(t, "update") {
				ordered.Update()
			}
		}
		ordered.Update()
		if got, want := dump(ordered.Plan()), dump(atOnce.Plan()); got != want {
			t.Fatalf("one by one:\n%s\nat once:\n%s", got, want)
		}
		for _, state := range []*State{s, atOnce, ordered} {
			if got := state.NodeEligible(); got != c.eligible() {
				t.Fatalf("the node is eligible: %t, want %t: gone %t, %+v", got, c.eligible(), c.nodeGone, c.node)
			}
		}
		// The same objects once more say nothing new.
		s.Apply(c.all())
		if _, change := s.Update(); !change.None() {
			t.Fatalf("changed by objects that are the same: %v", change)
		}
		checkOneOwner(t, s.Plan())
		checkForgets(t, c, s)
	})
}

// checkOneOwner: no two ServicePorts have a frontend in common, and what is shadowed has the owner that is named.
func checkOneOwner(t *rapid.T, p *plan.Plan) {
	owners := map[claim]plan.Key{}
	for _, sp := range p.Services {
		for _, f := range sp.Frontends {
			c := claimOf(f, sp.Key.Family)
			if other, taken := owners[c]; taken {
				t.Fatalf("%s is owned by %s and %s", f, other, sp.Key)
			}
			owners[c] = sp.Key
		}
	}
	for _, sp := range p.Services {
		for _, sh := range sp.Shadowed {
			if owner := owners[claimOf(sh.Frontend, sp.Key.Family)]; owner != sh.Owner || owner == sp.Key {
				t.Fatalf("%s: %s is said to be owned by %s; it is owned by %s", sp.Key, sh.Frontend, sh.Owner, owner)
			}
		}
	}
}

// checkForgets: nothing is kept of objects that are gone.
func checkForgets(t *rapid.T, c *cluster, s *State) {
	for id, svc := range s.services {
		if len(svc.slices) == 0 && c.services[types.NamespacedName(id)] == nil {
			t.Fatalf("%s is kept though nothing is left of it", id)
		}
	}
	gone := source.Batch{Services: map[types.NamespacedName]*v1.Service{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}, ServiceCIDRs: map[string]*networking.ServiceCIDR{}}
	for name := range c.services {
		gone.Services[name] = nil
	}
	for name := range c.slices {
		gone.EndpointSlices[name] = nil
	}
	for name := range c.cidrs {
		gone.ServiceCIDRs[name] = nil
	}
	s.Apply(gone)
	s.Update()
	if n := len(s.services) + len(s.claims.owners) + len(s.claims.others) + s.slices.Len() + len(s.plan.Services) + len(s.dirty) + len(s.cidrs); n > 0 {
		t.Fatalf("%d things are left when all objects are gone", n)
	}
	for object := range s.reported {
		if object != "Node me" {
			t.Fatalf("findings about %s, which is gone, are kept", object)
		}
	}
}

// snapshot is a plan as of an Update.
type snapshot struct {
	global   string // what all rules may depend on
	services map[plan.Key]*plan.ServicePort
}

// checkChanged updates the state and checks the keys that it names against what differs from before: all exactly those, or
// everything where the node or a setting has changed, be it back and forth.
func checkChanged(t *rapid.T, s *State, before snapshot) snapshot {
	p, change := s.Update()
	after := snapshot{fmt.Sprintf("%+v %+v", p.Node, p.Settings), maps.Clone(p.Services)}
	if !change.All() && before.global != after.global {
		t.Fatalf("keys are named though every rule may have changed:\n%s\n%s", before.global, after.global)
	}
	if change.All() {
		return after
	}
	differ := plan.Keys{}
	for k, sp := range after.services {
		if before.services[k] == nil || !before.services[k].Equal(sp) {
			differ.Add(k)
		}
	}
	for k := range before.services {
		if after.services[k] == nil {
			differ.Add(k)
		}
	}
	if !maps.Equal(differ, change.Keys()) {
		t.Fatalf("changed: %v; what differs: %v", change.Keys(), differ)
	}
	for k, sp := range after.services {
		if sp.Key != k || !slices.Contains(p.KeysOf(k.Service), k) {
			t.Fatalf("%s is not found under its Service", k)
		}
	}
	return after
}

// TestFindingsFollowFromObjects: after each change, what is reported is what is to be said of the objects now and was not
// before, each thing once.
func TestFindingsFollowFromObjects(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var reported []string
		c, s := newCluster(), newTestState(func(f source.Finding) { reported = append(reported, f.String()) })
		before := map[string]bool{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			var b source.Batch
			for range rapid.IntRange(1, 3).Draw(t, "events") {
				b.Merge(c.drawEvent(t))
			}
			reported, b.Synced = nil, true
			s.Apply(b)
			s.Update()
			after := toSay(c.all())
			var want []string
			for f := range after {
				if !before[f] {
					want = append(want, f)
				}
			}
			slices.Sort(reported)
			slices.Sort(want)
			if !slices.Equal(reported, want) {
				t.Fatalf("reported\n%s\nwant\n%s", strings.Join(reported, "\n"), strings.Join(want, "\n"))
			}
			before = after
		}
	})
}

// toSay is all that is to be said of some objects.
func toSay(b source.Batch) map[string]bool {
	out := map[string]bool{}
	s := newTestState(func(f source.Finding) { out[f.String()] = true })
	s.Apply(b)
	s.report = func(source.Finding) {} // what follows is read from the plan instead
	p, _ := s.Update()
	shadowed := map[plan.Service][]string{}
	examples := map[plan.Service][]string{}
	for _, key := range slices.SortedFunc(maps.Keys(p.Services), plan.Key.Compare) {
		for _, sh := range p.Services[key].Shadowed {
			shadowed[key.Service] = append(shadowed[key.Service], fmt.Sprintf(
				"Service %s: spec.ports[%s]: %s is also claimed by %s, which takes precedence; %s gets the traffic",
				key.Service, key.Port, sh.Frontend, sh.Owner, sh.Owner))
			examples[key.Service] = append(examples[key.Service], fmt.Sprintf("%s by %s", sh.Frontend, sh.Owner))
		}
	}
	for svc, list := range shadowed {
		if len(list) > 3 {
			list = []string{fmt.Sprintf(
				"Service %s: spec: %d frontends are also claimed by others, which take precedence, among them %s; the others get the traffic",
				svc, len(list), strings.Join(examples[svc][:3], ", "))}
		}
		for _, text := range list {
			out[text] = true
		}
	}
	return out
}

// TestManyShadowed: a Service that asks for much that another one has is reported in a few words, in what is told to its owner, in the
// log and in the list of findings, however much it is. It is reported again when the number changes, and not for another endpoint.
func TestManyShadowed(t *testing.T) {
	t.Parallel()
	var said []string
	s := newTestState(func(f source.Finding) { said = append(said, f.String()) })
	update := func(b source.Batch) []string {
		said = nil
		s.Apply(b)
		s.Update()
		return said
	}
	service := func(name string, ips, ports int) source.Batch {
		svc := largeService(name, ips, ports)
		svc.Spec.ClusterIP = "10.96.0." + name[1:]
		return ofService(svc)
	}
	text := func(count int) string {
		return fmt.Sprintf("Service ns/s2: spec: %d frontends are also claimed by others, which take precedence, among them "+
			"external IP 198.18.0.0:1/TCP by ns/s1:p0/TCP/IPv4, external IP 198.18.0.1:1/TCP by ns/s1:p0/TCP/IPv4, "+
			"external IP 198.18.0.2:1/TCP by ns/s1:p0/TCP/IPv4; the others get the traffic", count)
	}
	if got := update(service("s1", 200, 10)); len(got) != 0 {
		t.Errorf("of the first: %q", got)
	}
	for _, step := range []struct {
		name string
		b    source.Batch
		want []string
	}{
		{"much", service("s2", 200, 10), []string{text(2000)}},
		{"the same", service("s2", 200, 10), nil},
		{"less", service("s2", 199, 10), []string{text(1990)}},
		{"an endpoint", ofSlice(largeSlice("s2", 10, "10.0.0.1")), nil},
		{"a few", service("s2", 3, 1), []string{
			"Service ns/s2: spec.ports[p0]: external IP 198.18.0.0:1/TCP is also claimed by ns/s1:p0/TCP/IPv4, which takes precedence; ns/s1:p0/TCP/IPv4 gets the traffic",
			"Service ns/s2: spec.ports[p0]: external IP 198.18.0.1:1/TCP is also claimed by ns/s1:p0/TCP/IPv4, which takes precedence; ns/s1:p0/TCP/IPv4 gets the traffic",
			"Service ns/s2: spec.ports[p0]: external IP 198.18.0.2:1/TCP is also claimed by ns/s1:p0/TCP/IPv4, which takes precedence; ns/s1:p0/TCP/IPv4 gets the traffic",
		}},
	} {
		got := update(step.b)
		if !slices.Equal(got, step.want) {
			t.Errorf("%s: said %d things, the first %q; want %q", step.name, len(got), got[:min(len(got), 4)], step.want)
		}
	}
	if got := len(s.Findings()); got != 3 {
		t.Errorf("%d findings", got)
	}
	if got := update(service("s2", 0, 1)); len(got) != 0 || len(s.Findings()) != 0 {
		t.Errorf("of nothing: %q, and %d findings", got, len(s.Findings()))
	}
}

// TestFindingsAreReportedOnce: what is wrong with an object is reported when it appears and when it changes, and not again.
func TestFindingsAreReportedOnce(t *testing.T) {
	var said []string
	s := newTestState(func(f source.Finding) { said = append(said, f.String()) })
	apply := func(svc *v1.Service) []string {
		said = nil
		s.Apply(ofService(svc))
		s.Update()
		return said
	}
	svc := makeService(externalIPs("127.0.0.1"))
	want := "Service ns/a: spec.externalIPs[0]: 127.0.0.1 is a loopback address; this external IP is not proxied"
	if got := apply(svc); !slices.Equal(got, []string{want}) {
		t.Errorf("at first: %q", got)
	}
	changed := svc.DeepCopy()
	changed.Spec.Ports[0].Port = 81
	if got := apply(changed); len(got) != 0 {
		t.Errorf("another field changed: %q", got)
	}
	mended := changed.DeepCopy()
	mended.Spec.ExternalIPs = nil
	apply(mended)
	if got := apply(svc); !slices.Equal(got, []string{want}) {
		t.Errorf("wrong again after it was right: %q", got)
	}
}
