package e2e

import (
	"testing"

	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/e2e/harness"
)

// TestEndpointWithoutNodeName: an endpoint whose EndpointSlice does not say on which node it runs reaches itself through its Service,
// as one does that people have written down, or a controller of their own.
func TestEndpointWithoutNodeName(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		objects := harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)
		for _, o := range objects {
			if slice, ok := o.(*discovery.EndpointSlice); ok {
				for i := range slice.Endpoints {
					slice.Endpoints[i].NodeName = nil
				}
			}
		}
		w.Write(t, "s.yaml", objects...)
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			for _, to := range frontends(w, 1, family) {
				for _, from := range []string{"n1a", "n1c"} {
					for _, network := range []string{"tcp", "udp"} {
						a := w.Pod(from).Ask(network, to, harness.Patient)
						if a.Outcome != harness.Answered || a.Server != "n1a" {
							t.Errorf("%s from %s to %s: %v", network, from, to, a)
						}
					}
				}
			}
		}
	})
}
