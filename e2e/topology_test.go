package e2e

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// hinted gives endpoints the hint to be used from these zones or, where their name says so, nodes.
func hinted(endpoints []harness.Endpoint, zones, nodes []string) []harness.Endpoint {
	for i := range endpoints {
		h := &discovery.EndpointHints{}
		for _, z := range zones {
			h.ForZones = append(h.ForZones, discovery.ForZone{Name: z})
		}
		for _, n := range nodes {
			h.ForNodes = append(h.ForNodes, discovery.ForNode{Name: n})
		}
		endpoints[i].Hints = h
	}
	return endpoints
}

func distribution(value string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.TrafficDistribution = ptr.To(value) }
}

func zoneLabel(zone string) map[string]string { return map[string]string{v1.LabelTopologyZone: zone} }

// hintCase is a Service with hints, and the endpoints that answer on a node in zone east, in zone west, and elsewhere.
type hintCase struct {
	name                      string
	changes                   func(*v1.Service)
	endpoints                 []harness.Endpoint
	inEast, inWest, elsewhere []string
}

func hintCases(w *harness.World) []hintCase {
	east, west := []string{"east"}, []string{"west"}
	return []hintCase{
		{
			name:      "zones",
			changes:   distribution("PreferSameZone"),
			endpoints: append(hinted(w.Ready("n1a", "n2a"), east, nil), hinted(w.Ready("n2b", "n3a"), west, nil)...),
			inEast:    []string{"n1a", "n2a"},
			inWest:    []string{"n2b", "n3a"},
			elsewhere: []string{"n1a", "n2a", "n2b", "n3a"}, // no endpoint for this zone: hints don't count
		},
		{
			name:      "one-without-hint", // hints don't count unless every ready endpoint has them
			changes:   distribution("PreferClose"),
			endpoints: append(hinted(w.Ready("n1a", "n2a"), east, nil), w.Ready("n3a")...),
			inEast:    []string{"n1a", "n2a", "n3a"},
			inWest:    []string{"n1a", "n2a", "n3a"},
			elsewhere: []string{"n1a", "n2a", "n3a"},
		},
		{
			name:      "both-zones", // an endpoint may serve several zones
			changes:   func(*v1.Service) {},
			endpoints: append(hinted(w.Ready("n1a"), []string{"east", "west"}, nil), hinted(w.Ready("n3a"), west, nil)...),
			inEast:    []string{"n1a"},
			inWest:    []string{"n1a", "n3a"},
			elsewhere: []string{"n1a", "n3a"},
		},
		{
			name:    "same-node", // hints for this node go before those for its zone
			changes: distribution("PreferSameNode"),
			endpoints: append(hinted(w.Ready("n1a"), east, []string{"node1"}),
				append(hinted(w.Ready("n2a"), east, []string{"node2"}), hinted(w.Ready("n3a"), west, []string{"node3"})...)...),
			inEast:    []string{"n1a"},
			inWest:    []string{"n1a"},
			elsewhere: []string{"n1a"},
		},
		{
			name:    "same-node-none-here", // no endpoint is meant for this node: the zone decides
			changes: distribution("PreferSameNode"),
			endpoints: append(hinted(w.Ready("n2a", "n2b"), east, []string{"node2"}),
				hinted(w.Ready("n3a"), west, []string{"node3"})...),
			inEast:    []string{"n2a", "n2b"},
			inWest:    []string{"n3a"},
			elsewhere: []string{"n2a", "n2b", "n3a"},
		},
		{
			name:    "local-policy", // internalTrafficPolicy Local doesn't ask for hints
			changes: harness.Policies("Local", "Cluster"),
			endpoints: append(hinted(w.Ready("n1a"), west, nil),
				append(hinted(w.Ready("n1b"), east, nil), hinted(w.Ready("n2a"), east, nil)...)...),
			inEast:    []string{"n1a", "n1b"},
			inWest:    []string{"n1a", "n1b"},
			elsewhere: []string{"n1a", "n1b"},
		},
	}
}

// TestTopologyHints: which endpoints answer under hints (KEP-2433, KEP-3015), on a node in zone east, and after its
// label moves it to zone west and to a zone that no hint names.
func TestTopologyHints(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		node := func(zone string) { w.Write(t, "node1.yaml", w.NodeObject(w.Node1(), zoneLabel(zone))) }
		node("east")
		w.Write(t, "others.yaml", w.NodeObjects()[1:]...)
		cases := hintCases(w)
		for i, c := range cases {
			w.Write(t, c.name+".yaml", harness.Objects(harness.Service(c.name, i+1, c.changes), c.endpoints...)...)
		}
		w.Run(t, variant, clusterCIDR)
		check := func(want func(int) []string) {
			t.Helper()
			for i, c := range cases {
				for _, family := range families {
					eventually(t, c.name, func() error {
						return serversOf(w.Pod("n1c").Host, "tcp", clusterIP(i+1, family), want(i)...)
					})
				}
			}
		}
		check(func(i int) []string { return cases[i].inEast })
		node("west")
		check(func(i int) []string { return cases[i].inWest })
		node("moon")
		check(func(i int) []string { return cases[i].elsewhere })
		node("east")
		check(func(i int) []string { return cases[i].inEast })
	})
}
