package e2e

import (
	"testing"

	"nodeproxy/e2e/harness"
)

// TestExternalIPsNotAllowed: with feature gate AllowServiceExternalIPs off, an address in spec.externalIPs is nothing to the node,
// in whichever way the gate is given; every other address of the Service answers.
func TestExternalIPsNotAllowed(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		d := w.Run(t, variant, clusterCIDR, "--feature-gates=AllowServiceExternalIPs=false")
		for _, family := range families {
			wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a")
			wantServers(t, w.Client, vip(1, family), "n1a", "n2a")
			if err := serversOf(w.Client, "tcp", externalIP(1, family), "n1a", "n2a"); err == nil {
				t.Errorf("the Service answers at %s", externalIP(1, family))
			}
		}
		if err := d.WaitFor(harness.Patient, "spec.externalIPs", "AllowServiceExternalIPs is false"); err != nil {
			t.Error(err)
		}
		if err := d.Stop(); err != nil {
			t.Fatal(err)
		}
		w.Run(t, variant, clusterCIDR, "--feature-gates=AllowServiceExternalIPs=true")
		for _, family := range families {
			wantServers(t, w.Client, externalIP(1, family), "n1a", "n2a")
		}
	})
}
