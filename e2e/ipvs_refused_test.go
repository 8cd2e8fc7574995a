package e2e

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// TestIPVSRefusedEndpoint: the kernel refuses a real server at the broadcast address of the node's network, which the API server
// takes for an endpoint. That costs its Service this endpoint alone: probes take the node for healthy, other Services change, and
// it is reported once, until the endpoint has gone.
func TestIPVSRefusedEndpoint(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "kernel refuses one endpoint", "an EndpointSlice has the broadcast address of the node's network")
		f.start()
		const number = 8
		s := harness.Service("refused", number, harness.ClusterOnly)
		objects := harness.Objects(s, f.Ready("n1a", "n2a")...)
		for _, o := range objects {
			if slice, ok := o.(*discovery.EndpointSlice); ok && slice.AddressType == discovery.AddressTypeIPv4 {
				at := f.Node1().IP4.As4()
				at[3] = 255
				slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
					Addresses: []string{netip.AddrFrom4(at).String()}, NodeName: ptr.To(f.Nodes[1].Name),
					Conditions: discovery.EndpointConditions{Ready: ptr.To(true)},
				})
			}
		}
		line := len(f.daemon.Log())
		f.Write(t, "refused.yaml", objects...)
		f.log(line, "the kernel refuses", "Service e2e/refused")
		f.healthyAll()
		f.change("n2a")
		f.inForce("n2a")
		for _, family := range families {
			assert.NoError(t, serversOf(f.Client, "tcp", clusterIP(number, family), "n1a", "n2a"), "the other endpoints of the Service")
		}
		f.breakRules() // A comparison of everything follows.
		f.change("n1a")
		f.inForce("n1a")
		f.healthyAll()
		if code, body, err := f.Node1().Get(harness.MetricsAddr, "/metrics"); err != nil || code != http.StatusOK ||
			!strings.Contains(body, `nodeproxy_findings_total{kind="Service"`) {
			t.Errorf("metrics: %d, %v, and no finding of a Service", code, err)
		}
		if n := count(f.daemon.Log(), "sync failed"); n > 0 {
			t.Errorf("%d syncs failed", n)
		}
		if n := count(f.daemon.Log(), "the kernel refuses"); n != 2 { // a port of each protocol
			t.Errorf("it is reported %d times, want 2", n)
		}
		end := time.Now()
		f.Write(t, "refused.yaml", harness.Objects(s, f.Ready("n3a")...)...)
		for _, family := range families {
			eventually(t, "the Service without the endpoint", func() error {
				return serversOf(f.Client, "tcp", clusterIP(number, family), "n3a")
			})
		}
		f.repairs = append(f.repairs, time.Since(end))
		f.finish()
	})
}
