package cluster

import (
	"testing"

	"nodeproxy/e2e/harness"
)

// TestScenarios holds what happens to packets while the cluster changes, with a real API server and its controllers.
func TestScenarios(t *testing.T) {
	for _, variant := range harness.Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, variant)
			l.run(t, "service-before-endpoints", serviceBeforeEndpoints)
			l.run(t, "endpoints-before-service", endpointsBeforeService)
		})
	}
}

func serviceBeforeEndpoints(s *scenario) {
	svc := s.service()
	s.eventually("refused without endpoints", ends(s.Client, at(svc, 4), harness.Refused))
	s.pod("n1a", "n2a")
	s.eventually("endpoints", servers(s.Client, at(svc, 4), "n1a", "n2a"))
}

func endpointsBeforeService(s *scenario) {
	s.pod("n1a", "n2a")
	svc := s.service()
	s.eventually("service", servers(s.Client, at(svc, 4), "n1a", "n2a"))
}
