package proxier

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/plan"
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

// TestNodeFindings: what this node lacks for want of its Node, or of a field of it, is said as long as that is so.
func TestNodeFindings(t *testing.T) {
	t.Parallel()
	primary := plan.Settings{NodePortAddresses: plan.NodePortAddresses{Primary: true}}
	ranges := plan.Settings{NodePortAddresses: plan.NodePortAddresses{Primary: true,
		CIDRs: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/24")}}}
	nodeCIDR := plan.Settings{DetectLocal: plan.DetectLocal{Mode: plan.DetectNodeCIDR}}
	none, other := source.Batch{}, source.Batch{Nodes: map[string]*v1.Node{"other": {ObjectMeta: metav1.ObjectMeta{Name: "other"}}}}
	me := func(podCIDR string, addresses ...string) source.Batch {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "me"}, Spec: v1.NodeSpec{PodCIDR: podCIDR}}
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: a})
		}
		return source.Batch{Nodes: map[string]*v1.Node{"me": n}}
	}
	const (
		begin  = "Node me: no Node of this name is known; zone hints are ignored"
		end    = "; if the Node has another name, endpoints on it count as being elsewhere, and traffic with policy Local is dropped; create the Node, or give its name with --hostname-override"
		nobody = "; node ports answer at no address, as nodePortAddresses limits them to the Node's primary ones"
		pods   = "pods of this node are not told from other clients: what comes to cluster IPs from outside is masqueraded only with masqueradeAll, and externalTrafficPolicy Local applies to pods, too"
	)
	for name, tc := range map[string]struct {
		settings plan.Settings
		nodeIP   string
		has      source.Batch
		want     string
	}{
		"manifests without Nodes":        {plan.Settings{}, "", none, ""},
		"manifests with another Node":    {plan.Settings{}, "", other, begin + end},
		"a cluster without the Node":     {plan.Settings{}, "", source.Batch{NodeMissing: true}, begin + end},
		"node ports":                     {primary, "", none, begin + nobody + end},
		"node ports that no Service has": {primary, "", none, ""},
		"node ports in ranges":           {ranges, "", none, ""},
		"node ports, and an address":     {primary, "192.168.0.7", none, ""},
		"pods":                           {nodeCIDR, "", none, begin + "; detectLocalMode is NodeCIDR, and " + pods + end},
		"a Node that can't be read": {primary, "", source.Batch{NodeUnread: true}, "Node me: this Node has not been read; zone hints are ignored until then; " +
			"node ports answer at all addresses of the node, and not only at those that nodePortAddresses allows; see whether the API server answers, and " +
			"nodeproxy may get, list and watch nodes"},
		"a Node that can't be read, and an address": {primary, "192.168.0.7", source.Batch{NodeUnread: true}, "Node me: this Node has not been read; " +
			"zone hints are ignored until then; node ports answer at all addresses of the node, and not only at those that nodePortAddresses allows; see " +
			"whether the API server answers, and nodeproxy may get, list and watch nodes"}, // in the other family
		"a Node that can't be read, and no limit": {plan.Settings{}, "", source.Batch{NodeUnread: true}, "Node me: this Node has not been read; " +
			"zone hints are ignored until then; see whether the API server answers, and nodeproxy may get, list and watch nodes"},
		"manifests that can't be read": {primary, "", source.Batch{Extent: source.Partial}, "Node me: this Node has not been read; zone hints are ignored " +
			"until then; node ports answer at all addresses of the node, and not only at those that nodePortAddresses allows; correct the manifests that can't be read"},
		"a Node":                       {plan.Settings{}, "", me(""), ""},
		"a Node of one family":         {primary, "", me("", "192.168.0.1"), ""},
		"a Node with pod CIDRs":        {nodeCIDR, "", me("10.244.1.0/24"), ""},
		"a Node that nobody asked for": {plan.Settings{}, "", source.Batch{NodeMissing: true, Nodes: me("").Nodes}, ""},
		"a Node without addresses": {primary, "", me(""), "Node me: status.addresses: there is no InternalIP or ExternalIP; node ports answer at no address, as " +
			"nodePortAddresses limits them to the primary ones; see that the kubelet or the cloud controller manager sets an InternalIP, or set nodePortAddresses otherwise"},
		"a Node without pod CIDRs": {nodeCIDR, "", me(""), "Node me: spec.podCIDRs: there are none, and detectLocalMode is NodeCIDR; " + pods +
			"; have the controller manager allot pod CIDRs (--allocate-node-cidrs), or set detectLocalMode otherwise"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var said []string
			s := NewState("me", tc.settings, plan.Families[:], func(f source.Finding) { said = append(said, f.Severity.String()+": "+f.String()) })
			if tc.nodeIP != "" {
				s.setNodeIP(netip.MustParseAddr(tc.nodeIP))
			}
			if name != "node ports that no Service has" {
				b := batch("a", 80, false)
				for _, svc := range b.Services {
					svc.Spec.Type, svc.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, 30080
				}
				s.Apply(b)
			}
			s.Apply(tc.has)
			if i := slices.IndexFunc(said, func(text string) bool { return strings.Contains(text, "detectLocalMode") }); i >= 0 {
				t.Errorf("while pod CIDRs are waited for: %s", said[i])
			}
			s.Apply(source.Batch{Synced: true})
			s.Apply(none)
			s.Update()
			var want []string
			if tc.want != "" {
				want = []string{"problem: " + tc.want}
			}
			if !slices.Equal(said, want) || len(s.Findings()) != len(want) {
				t.Errorf("said %q, and there are %d findings; want %q", said, len(s.Findings()), want)
			}
			s.Apply(me("10.244.1.0/24", "192.168.0.1"))
			s.Apply(source.Batch{Nodes: map[string]*v1.Node{"me": nil}}) // What it said last is in force.
			if found := s.Findings(); len(found) != 1 || found[0].Detail != "the Node is deleted" {
				t.Errorf("with a Node that had all: %q", found)
			}
			s.Apply(me("10.244.1.0/24", "192.168.0.1"))
			if found := s.Findings(); len(found) > 0 {
				t.Errorf("with a Node that has all: %q", found)
			}
		})
	}
}

// TestNodePortsWhileNodeIsUnread: node ports that are limited to the Node's addresses answer everywhere, but at loopback addresses, while it is not
// known whether there is a Node, and nowhere where there is none.
func TestNodePortsWhileNodeIsUnread(t *testing.T) {
	t.Parallel()
	at := func(s *State, text string) bool {
		s.Update()
		return s.Plan().Settings.NodePortsAnswer(s.Plan().Node, netip.MustParseAddr(text))
	}
	settings := plan.Settings{NodePortAddresses: plan.NodePortAddresses{Primary: true}, LocalhostNodePorts: true}
	me := source.Batch{Nodes: map[string]*v1.Node{"me": {ObjectMeta: metav1.ObjectMeta{Name: "me"}, Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
		{Type: v1.NodeInternalIP, Address: "192.168.0.1"}}}}}}
	for name, unread := range map[string]source.Batch{"API server": {NodeUnread: true, Synced: true}, "manifests": {Extent: source.Partial, Synced: true}} {
		for later, batch := range map[string]source.Batch{"a Node": me, "none": {NodeMissing: true}} {
			s := NewState("me", settings, plan.Families[:], nil)
			s.Apply(unread)
			if !at(s, "192.168.0.1") || !at(s, "2001:db8::1") || at(s, "127.0.0.1") {
				t.Errorf("%s: node ports do not answer at all addresses but the loopback ones while the Node is not read", name)
			}
			s.Apply(batch)
			if is := at(s, "192.168.0.1"); is != (later == "a Node") || at(s, "192.168.0.2") || at(s, "127.0.0.1") || at(s, "2001:db8::1") {
				t.Errorf("%s, then %s: node ports answer at 192.168.0.1: %t, or at another address", name, later, is)
			}
			if got := s.Plan().Settings; !slices.Equal(got.NodePortAddresses.CIDRs, settings.NodePortAddresses.CIDRs) || !got.LocalhostNodePorts {
				t.Errorf("%s, then %s: the settings are %+v", name, later, got)
			}
		}
	}
	s := NewState("me", settings, plan.Families[:], nil)
	s.setNodeIP(netip.MustParseAddr("192.168.0.1"))
	s.Apply(source.Batch{NodeUnread: true, Synced: true})
	if !at(s, "192.168.0.1") || at(s, "192.168.0.2") {
		t.Error("node ports do not answer at the address that is given, or at another one")
	}
}

// TestDescribeUnreadNode: a Service is described with what to do where the Node has not been read, as long as that is so.
func TestDescribeUnreadNode(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		has  source.Batch
		want string
	}{
		"API server": {source.Batch{NodeUnread: true, Synced: true}, "see whether the API server answers, and nodeproxy may get, list and watch nodes"},
		"manifests":  {source.Batch{Extent: source.Partial, Synced: true}, "correct the manifests that can't be read"},
		"no Node":    {source.Batch{NodeMissing: true, Synced: true}, ""},
	} {
		s := NewState("me", plan.Settings{}, plan.Families[:], nil)
		s.Apply(batch("a", 80, false))
		s.Apply(tc.has)
		s.Update()
		for _, later := range []source.Batch{{}, {Nodes: map[string]*v1.Node{"me": {ObjectMeta: metav1.ObjectMeta{Name: "me"}}}}} {
			s.Apply(later)
			want := tc.want
			if later.Nodes != nil {
				want = ""
			}
			for id := range s.services {
				if d, is := s.Describe(id); !is || d.NodeUnread != want {
					t.Errorf("%s: %q, want %q", name, d.NodeUnread, want)
				}
			}
			if len(s.services) == 0 {
				t.Error("there is no Service")
			}
		}
	}
}
