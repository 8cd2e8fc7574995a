package e2e

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// TestExternalIPsNotAllowed: with feature gate AllowServiceExternalIPs off, an address in spec.externalIPs is nothing to the node,
// in whichever way the gate is given; every other address of the Service answers.
func TestExternalIPsNotAllowed(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		d := w.Run(t, variant, clusterCIDR, "--feature-gates=AllowServiceExternalIPs=false")
		for _, family := range families {
			wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a")
			wantServers(t, w.Client, vip(1, family), "n1a", "n2a")
			if err := serversOf(w.Client, "tcp", externalIP(1, family), "n1a", "n2a"); err == nil {
				t.Errorf("the Service answers at %s", externalIP(1, family))
			}
		}
		assert.NoError(t, d.WaitFor(harness.Patient, "spec.externalIPs", "AllowServiceExternalIPs is false"))
		require.NoError(t, d.Stop())
		w.Run(t, variant, clusterCIDR, "--feature-gates=AllowServiceExternalIPs=true")
		for _, family := range families {
			wantServers(t, w.Client, externalIP(1, family), "n1a", "n2a")
		}
	})
}
