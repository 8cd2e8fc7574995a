package inspect

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/inspect/reality"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// aStatus returns the status of a Node with Services of two endpoints each that are programmed, and of which self says this.
func aStatus(t *testing.T, self Self, do func(*Node)) *Status {
	t.Helper()
	n, _ := manyServices(t, 3)
	var published plan.Publisher
	n.View(func(s *proxier.State) { published.Publish(s.Plan(), plan.Everything()) })
	n.Programmed, n.Mode, n.History = published.Latest, "iptables", &History{}
	self.Program, self.Variant, self.Families, self.Started = "nodeproxy/v1", "nft", plan.Families[:1], time.Now().Add(-time.Hour)
	n.Self = func() Self { return self }
	h := aSync(0, 3, proxier.Start)
	h.Took = Stages{Plan: 0.001, Write: 0.002}
	n.History.Add(h)
	if do != nil {
		do(n)
	}
	return n.Status(t.Context())
}

func (s *Status) text(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, WriteStatus(&b, s))
	return b.String()
}

// TestStatusFine pins the status of a node on which nothing is wrong.
func TestStatusFine(t *testing.T) { synctest.Test(t, testStatusFine) }

func testStatusFine(t *testing.T) {
	s := aStatus(t, Self{From: "the API server", Watches: []source.Watch{{Resource: "services", Synced: true, Age: 3 * time.Second}, {Resource: "nodes", Synced: true, Age: time.Minute}}}, nil)
	want := `Program      nodeproxy/v1, up for 60m
Node         node1
Mode         iptables (nft), IPv4
Ready        yes
In sync      for 0s
Objects      3 Services, 3 ServicePorts, 6 endpoints in use
Source       the API server, connected, last event 3s ago
Syncs        1 of the last 0s changed something, median 3ms, 99 % within 3ms
Last sync    0s ago, took 3ms, why: start
Findings     0 problems, 0 notes
Refused      none
Neighbours   none seen

Nothing is wrong.
`
	if got := s.text(t); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestStatusWrong: whatever is wrong is named, with what to do.
func TestStatusWrong(t *testing.T) { synctest.Test(t, testStatusWrong) }

func testStatusWrong(t *testing.T) {
	away := []source.Watch{{Resource: "services", Synced: true, Age: 10 * time.Minute, Failure: "connection refused"}, {Resource: "nodes", Synced: true, Age: time.Second}}
	for name, tc := range map[string]struct {
		self Self
		do   func(*Node)
		want []string
	}{
		"not ready": {Self{Missing: []Missing{{"fresh", "services: nothing has come"}, {"fresh", "nodes: nothing has come"}, {"synced", "no objects"}}}, nil,
			[]string{"Ready        no: fresh, synced missing", "- It is not ready (synced): no objects.",
				"- It is not ready (fresh): services: nothing has come; nor is it for 1 more kind of objects. Look at the API server,"}},
		"away": {Self{From: "the API server", Watches: away}, nil, []string{"Source       the API server, away for 10m",
			"- Nothing has come from the API server for 10m, so that changes of Services are not known; what was known last stays in force (services: connection refused). Look at"}},
		"never connected": {Self{From: "the API server", Watches: []source.Watch{{Resource: "services", Age: -1, Failure: "no route"}}}, nil, []string{"the API server, never connected", "(services: no route)"}},
		"failing": {Self{}, func(n *Node) {
			n.History.Add(NewSync(plan.Everything(), proxier.Result{Err: errors.New("no memory"), Reasons: []proxier.Reason{proxier.Arrived}}, nil))
		}, []string{"In sync      no", "1 failed", "- The last sync failed, and is tried again: no memory."}},
		"refused": {Self{}, func(n *Node) {
			n.Refused = func() []plan.Refusal {
				return []plan.Refusal{{Key: plan.Key{Service: plan.Service{Namespace: "default", Name: "s-1"}, Protocol: plan.TCP, Family: plan.IPv4}}}
			}
		}, []string{"Refused      default/s-1/TCP/IPv4", "- The kernel refuses 1 ServicePort: default/s-1/TCP/IPv4. \"nodeproxy explain\" says why.", "Findings     1 problem, 0 notes"}},
		"findings": {Self{}, func(n *Node) {
			n.Findings = func() []source.Finding {
				return []source.Finding{{Severity: source.Problem, Detail: "a"}, {Severity: source.Problem, Detail: "b"}, {Severity: source.Note, Detail: "c"}}
			}
		}, []string{"2 problems, 1 note\n", "- There are 2 problems with objects or with the node; \"nodeproxy get findings\" lists them."}},
		"neighbours": {Self{Neighbours: []Neighbour{{"proxy", "kube-proxy (process 7) runs\x1b[2J", true}, {"leftovers", "rules were removed", false}}}, nil,
			[]string{"Neighbours   kube-proxy (process 7) runs\\x1b[2J\n             rules were removed\n", "- kube-proxy (process 7) runs\\x1b[2J.\n"}},
		"kube-proxy's DaemonSet": {Self{Neighbours: []Neighbour{{DaemonSet, "it wants this node", true}}}, func(n *Node) {
			n.Findings = func() []source.Finding {
				return []source.Finding{{Severity: source.Problem, Detail: "it wants this node"}, {Severity: source.Problem, Detail: "b"}}
			}
		}, []string{"2 problems, 0 notes\n", "- it wants this node.\n  - There is a problem with objects or with the node;"}},
		"answers that rp_filter drops": {Self{}, func(n *Node) {
			n.Reality = &Reality{Reverse: reverse(reality.Reverse{Filtered: []reality.Filtered{{Addr: netip.MustParseAddr("10.244.0.1"), By: "eth1", Back: "eth0"}}})}
		}, []string{"- The kernel drops the answers of endpoint 10.244.0.1: packets to it leave by eth1, where rp_filter is strict, but by the routes that hold for its answers " +
			"they should come by eth0. To do: have the same routes hold for answers (ip rule), or set net.ipv4.conf.eth1.rp_filter to 2"}},
		"no forwarding": {Self{}, func(n *Node) {
			n.Reality = &Reality{Ways: ways(reality.Ways{NotForwarded: []plan.Family{plan.IPv4}})}
		}, []string{"- This node does not forward packets of IPv4 (net.ipv4.ip_forward is 0): of the connections to endpoints elsewhere, or from elsewhere to Pods, only its own get there. " +
			"To do: set net.ipv4.ip_forward to 1, and see what has cleared it"}},
		"an endpoint that refuses": {Self{}, func(n *Node) {
			at := netip.MustParseAddrPort
			n.Reality = &Reality{Endpoints: listeners(reality.Listening{Addr: at("10.244.0.1:8080"), Protocol: plan.TCP, Pod: true},
				reality.Listening{Addr: at("10.244.0.2:8080"), Protocol: plan.TCP, Pod: true, Listens: true})}
		}, []string{"- Nothing listens at 1 endpoint of this node, which gets traffic all the same: 10.244.0.1:8080 of Service default/s-0. \"nodeproxy explain\" says more."}},
		"config":   {Self{Rejected: "line 3: no"}, nil, []string{"- The configuration file is not used, and the former configuration stays in force: line 3: no."}},
		"unserved": {Self{Unserved: plan.Families[1:]}, nil, []string{"- Services of IPv6 are not proxied"}},
		"full": {Self{}, func(n *Node) {
			n.Reality = &Reality{Tracked: tracked(TrackedFlows{Flows: 1000, Most: 1000})}
		},
			[]string{"Tracking     1000 of at most 1000 flows\n", "- The kernel may drop new connections of any kind: it tracks 1000 flows, and no more than 1000. To do: raise"}},
		"waiting": {Self{Waited: 2 * time.Second}, nil, []string{"In sync      for 0s, a change has waited for 2s", "Nothing is wrong."}},
	} {
		s := aStatus(t, tc.self, tc.do)
		got := s.text(t)
		for _, want := range tc.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: got\n%swant %q", name, got, want)
			}
		}
		if wrong := name != "waiting"; (len(s.Wrong) > 0) != wrong || strings.Contains(got, "Nothing is wrong.") == wrong {
			t.Errorf("%s: wrong is %q", name, s.Wrong)
		}
		if strings.Contains(got, "rules were removed.") {
			t.Errorf("%s: what is no problem is wrong:\n%s", name, got)
		}
	}
}

// BenchmarkStatus is what a status costs with 10,000 Services.
func BenchmarkStatus(b *testing.B) {
	n, _ := manyServices(b, 10000)
	var published plan.Publisher
	n.View(func(s *proxier.State) { published.Publish(s.Plan(), plan.Everything()) })
	n.Programmed, n.History, n.Self = published.Latest, &History{}, func() Self { return Self{} }
	for b.Loop() {
		if s := n.Status(b.Context()); s.Services != 10000 {
			b.Fatal(s.Services)
		}
	}
}
