package deploy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// webService is the Service that answers asks.
func webService() *v1.Service {
	return harness.Service("web", 1, func(s *v1.Service) { s.Spec.Type, s.Spec.ExternalIPs = v1.ServiceTypeNodePort, nil })
}

// createService makes these nodes, and the Service web with two endpoints.
func createService(ctx context.Context, cp *cluster.ControlPlane, w *harness.World, nodes ...*harness.Node) error {
	var errs []error
	for _, n := range nodes {
		_, err := cp.Admin.CoreV1().Nodes().Create(ctx, w.NodeObject(n, nil), metav1.CreateOptions{})
		errs = append(errs, err)
	}
	_, err := cp.Admin.CoreV1().Namespaces().Create(ctx,
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: harness.Namespace}}, metav1.CreateOptions{})
	errs = append(errs, err)
	svc := webService()
	_, err = cp.Admin.CoreV1().Services(svc.Namespace).Create(ctx, svc, metav1.CreateOptions{})
	errs = append(errs, err)
	for _, o := range harness.Slices(svc, w.Ready("n1a", "n2a")...) {
		slice := o.(*discovery.EndpointSlice)
		_, err := cp.Admin.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// answers checks that the Service answers at all of its frontends in both families, and from both endpoints.
func answers(w *harness.World, mode harness.Mode) error {
	a := harness.AddressesOf(1)
	type request struct {
		from *harness.Host
		to   netip.AddrPort
	}
	var requests []request
	if mode == harness.IPTables {
		requests = append(requests, request{w.Node1().Host, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), a.NodePort)})
	}
	for _, family := range []int{4, 6} {
		clusterIP := netip.AddrPortFrom(a.ClusterIP(family), harness.ServicePort)
		requests = append(requests, request{w.Pod("n1b").Host, clusterIP}, request{w.Node1().Host, clusterIP},
			request{w.Client, netip.AddrPortFrom(w.Node1().IP(family), a.NodePort)})
	}
	for _, network := range []string{"tcp", "udp"} {
		for _, r := range requests {
			seen := map[string]bool{}
			for i := 0; i < 60 && len(seen) < 2; i++ {
				answer := r.from.Ask(network, r.to, harness.Patient)
				if answer.Outcome != harness.Answered {
					return fmt.Errorf("%s from %s, %s: %v", r.to, r.from.Name, network, answer)
				}
				seen[answer.Server] = true
			}
			if !seen["n1a"] || !seen["n2a"] {
				return fmt.Errorf("%s from %s, %s: answers of %v, want n1a and n2a", r.to, r.from.Name, network, seen)
			}
		}
	}
	return nil
}

func eventually(timeout time.Duration, check func() error) error {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := check()
		if err == nil || time.Since(begun) > timeout {
			return err
		}
	}
}
