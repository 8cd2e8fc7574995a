package proxier

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/source"
)

// TestNodeGone: what was known of this node stays in force when its object goes, and other nodes do not matter.
func TestNodeGone(t *testing.T) {
	t.Parallel()
	s := newTestState(nil)
	me := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "me", Labels: map[string]string{v1.LabelTopologyZone: "a"}},
		Spec: v1.NodeSpec{PodCIDRs: []string{"10.244.1.0/24"}}}
	s.Apply(source.Batch{Nodes: map[string]*v1.Node{"me": me}})
	if _, change := s.Update(); !change.All() {
		t.Errorf("keys are named at first: %v", change)
	}
	before := dump(s.Plan())
	other := me.DeepCopy()
	other.Name, other.Labels = "other", nil
	for _, b := range []map[string]*v1.Node{{"me": nil}, {"other": other}, {"other": nil}} {
		s.Apply(source.Batch{Nodes: b})
		if p, change := s.Update(); !change.None() || dump(p) != before {
			t.Errorf("%v: changed %v:\n%s\nbefore:\n%s", b, change, dump(p), before)
		}
	}
}

// TestNodeEligible: load balancers are to leave out a node that is about to go, and no rule depends on it.
func TestNodeEligible(t *testing.T) {
	t.Parallel()
	me := func(change func(*v1.Node)) *v1.Node {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "me", Labels: map[string]string{v1.LabelTopologyZone: "a"}}}
		change(n)
		return n
	}
	ok := me(func(n *v1.Node) { n.Spec.Taints = []v1.Taint{{Key: "node.kubernetes.io/not-ready"}} })
	s := newTestState(nil)
	if !s.NodeEligible() {
		t.Error("not eligible before anything is known")
	}
	s.Apply(source.Batch{Nodes: map[string]*v1.Node{"me": ok}})
	s.Update()
	for name, leaving := range map[string]*v1.Node{
		"being deleted": me(func(n *v1.Node) { n.DeletionTimestamp = &metav1.Time{} }),
		"tainted": me(func(n *v1.Node) {
			n.Spec.Taints = []v1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: v1.TaintEffectNoSchedule}}
		}),
		"gone": nil,
	} {
		for _, step := range []struct {
			node *v1.Node
			want bool
		}{{leaving, false}, {ok, true}} {
			s.Apply(source.Batch{Nodes: map[string]*v1.Node{"me": step.node, "other": nil}})
			if p, change := s.Update(); s.NodeEligible() != step.want || change.All() || p.Node.Zone != "a" {
				t.Errorf("%s: eligible %t, want %t; changed %v, zone %q", name, s.NodeEligible(), step.want, change, p.Node.Zone)
			}
		}
	}
	s.Apply(source.Batch{Nodes: map[string]*v1.Node{"other": nil}})
	if !s.NodeEligible() {
		t.Error("not eligible since another node is gone")
	}
}

// TestNodeChangedAndGoneAtOnce: what a Node said last is in force, though it is gone before anybody has looked.
func TestNodeChangedAndGoneAtOnce(t *testing.T) {
	t.Parallel()
	zone := func(zone string) map[string]*v1.Node {
		return map[string]*v1.Node{"me": {ObjectMeta: metav1.ObjectMeta{Name: "me", Labels: map[string]string{v1.LabelTopologyZone: zone}}}}
	}
	gone := map[string]*v1.Node{"me": nil}
	s := newTestState(nil)
	s.Apply(source.Batch{Nodes: zone("a")})
	second := zone("b")
	var b source.Batch
	for _, nodes := range []map[string]*v1.Node{gone, second, gone, gone} {
		b.Merge(source.Batch{Nodes: nodes})
	}
	s.Apply(b)
	if p, _ := s.Update(); p.Node.Zone != "b" || s.NodeEligible() {
		t.Errorf("zone %q, eligible %t, want b, false", p.Node.Zone, s.NodeEligible())
	}
	if second["me"].DeletionTimestamp != nil {
		t.Error("the object, which belongs to others too, was changed")
	}
	b.Merge(source.Batch{Nodes: zone("c")})
	s.Apply(b)
	if p, _ := s.Update(); p.Node.Zone != "c" || !s.NodeEligible() {
		t.Errorf("created anew: zone %q, eligible %t, want c, true", p.Node.Zone, s.NodeEligible())
	}
}
