package e2e

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// TestAPIServerAddress: an external IP that is the API server's address, with its port, takes nothing from it: neither what
// the node sends there nor what pods do.
func TestAPIServerAddress(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		const port = 6443
		w := harness.New(t, harness.Options{})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		server := w.Nodes[1]
		require.NoError(t, w.ServeTCP(server.Netns, "api", netip.AddrPortFrom(netip.IPv6Unspecified(), port)))
		api := harness.Service("kubernetes", 2, harness.ClusterOnly, func(s *v1.Service) {
			s.Namespace = "default"
			s.Spec.Ports = []v1.ServicePort{{Name: "https", Port: 443, Protocol: v1.ProtocolTCP}}
		})
		slice := func(name string, kind discovery.AddressType, addr netip.Addr) *discovery.EndpointSlice {
			return &discovery.EndpointSlice{
				TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
					Labels: map[string]string{discovery.LabelServiceName: "kubernetes"}},
				AddressType: kind,
				Ports:       []discovery.EndpointPort{{Name: ptr.To("https"), Port: ptr.To[int32](port)}},
				Endpoints:   []discovery.Endpoint{{Addresses: []string{addr.String()}}},
			}
		}
		w.Write(t, "kubernetes.yaml", api, slice("kubernetes", discovery.AddressTypeIPv4, server.IP4),
			slice("kubernetes-6", discovery.AddressTypeIPv6, server.IP6))
		evil := harness.Service("evil", 1, func(s *v1.Service) {
			s.Spec.ExternalIPs = []string{server.IP4.String(), server.IP6.String()}
			s.Spec.Ports = s.Spec.Ports[:1]
			s.Spec.Ports[0].Port = port
		})
		w.Write(t, "evil.yaml", harness.Objects(evil, w.Ready("n1a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		assert.NoError(t, d.WaitFor(harness.Limit, "is the address and port of the API server itself"))
		for _, family := range families {
			for _, client := range []*harness.Host{w.Pod("n1c").Host, w.Node1().Host} {
				for to, answers := range map[netip.AddrPort]string{
					netip.AddrPortFrom(server.IP(family), port):                        "api",
					netip.AddrPortFrom(harness.AddressesOf(2).ClusterIP(family), 443):  "api",
					netip.AddrPortFrom(harness.AddressesOf(1).ClusterIP(family), port): "n1a",
				} {
					assert.NoError(t, serversOf(client, "tcp", to, answers))
				}
			}
		}
	})
}
