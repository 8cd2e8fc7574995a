package cluster

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// storm: clients change EndpointSlices as fast as the API server takes it. Load on a Service that stays meets no failure, the last
// state of each slice is in force soon after, and memory does not grow.
func storm(s *scenario) {
	s.loadedService("n1a", "n2a")
	const services, clients, length = 40, 8, 6 * time.Second
	pods := []string{"n1a", "n2a", "n3a"}
	slices := s.cp.Admin.DiscoveryV1().EndpointSlices(s.namespace)
	endpoint := func(pod string) []discovery.Endpoint {
		p := s.World.Pod(pod)
		return []discovery.Endpoint{{Addresses: []string{p.IP4.String()}, NodeName: ptr.To(p.Node.Name),
			Conditions: discovery.EndpointConditions{Ready: ptr.To(true)}}}
	}
	var all [services]*v1.Service
	for i := range all {
		all[i] = s.serviceNamed(fmt.Sprintf("storm-%d", i), withoutSelector)
		_, err := slices.Create(s.Context(), &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: all[i].Name, Namespace: s.namespace, Labels: map[string]string{
				discovery.LabelServiceName: all[i].Name}},
			AddressType: discovery.AddressTypeIPv4, Endpoints: endpoint("n1a"),
			Ports: []discovery.EndpointPort{{Name: ptr.To(""), Port: ptr.To(int32(8080)), Protocol: ptr.To(v1.ProtocolTCP)}},
		}, metav1.CreateOptions{})
		s.must(err)
	}
	s.eventually("Services", servers(s.Client, at(all[services-1], 4), "n1a"))
	var patches [3][]byte
	for i, pod := range pods {
		var err error
		patches[i], err = json.Marshal(map[string]any{"endpoints": endpoint(pod)})
		s.must(err)
	}
	before := s.resident()
	begin := time.Now()
	var events atomic.Int64
	var running sync.WaitGroup
	var errs [clients]error
	for c := range clients {
		running.Go(func() { // Each has slices of its own, so that the last one is known.
			for round := 1; time.Since(begin) < length && errs[c] == nil; round++ {
				for i := c; i < services && errs[c] == nil; i += clients {
					_, errs[c] = slices.Patch(s.Context(), all[i].Name, types.MergePatchType, patches[round%len(pods)], metav1.PatchOptions{})
					events.Add(1)
				}
			}
			for i := c; i < services && errs[c] == nil; i += clients {
				_, errs[c] = slices.Patch(s.Context(), all[i].Name, types.MergePatchType, patches[i%len(pods)], metav1.PatchOptions{})
			}
		})
	}
	running.Wait()
	took := time.Since(begin)
	for _, err := range errs {
		s.must(err)
	}
	end := time.Now()
	for i, svc := range all {
		s.eventually("the last state of a slice", servers(s.Client, at(svc, 4), pods[i%len(pods)]))
	}
	after := s.resident()
	s.Logf("%d changes at %.0f a second; the last ones in force after %v; %d KiB resident before, %d after",
		events.Load(), float64(events.Load())/took.Seconds(), time.Since(end).Round(10*time.Millisecond), before, after)
	if after > before+before/4+16<<10 {
		s.Errorf("memory has grown from %d to %d KiB", before, after)
	}
	s.endLoads()
}

var residentSize = regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB$`)

// resident is how much memory the daemon has, in KiB.
func (s *scenario) resident() int {
	s.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.daemon.PID()))
	s.must(err)
	m := residentSize.FindSubmatch(status)
	if m == nil {
		s.Fatalf("no size in %s", status)
	}
	n, err := strconv.Atoi(string(m[1]))
	s.must(err)
	return n
}
