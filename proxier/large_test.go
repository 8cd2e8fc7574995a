package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestFrontendsAreEachOnce: the frontends of a port are those that the Service lists, each address once, of the kind that comes first.
func TestFrontendsAreEachOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		list := func(label string) []netip.Addr {
			return rapid.SliceOfN(rapid.Map(rapid.IntRange(0, 9), func(i int) netip.Addr {
				return netip.MustParseAddr([]string{"192.0.2.", "2001:db8::"}[i%2] + fmt.Sprint(i))
			}), 0, 12).Draw(t, label)
		}
		addrs := addresses{
			cluster:      map[plan.Family]netip.Addr{plan.IPv4: netip.MustParseAddr("192.0.2.0"), plan.IPv6: netip.MustParseAddr("2001:db8::1")},
			loadBalancer: list("load balancer IPs"), external: list("external IPs"),
		}
		svc := makeService(ofType("LoadBalancer"), externalLocal)
		svc.Spec.HealthCheckNodePort = rapid.SampledFrom([]int32{0, 30000}).Draw(t, "health check node port")
		port := v1.ServicePort{Protocol: "TCP", Port: 30000, NodePort: rapid.SampledFrom([]int32{0, 30000}).Draw(t, "node port")}
		for _, f := range plan.Families {
			var want []plan.Frontend
			add := func(kind plan.FrontendKind, a netip.Addr) {
				if !slices.ContainsFunc(want, func(o plan.Frontend) bool { return o.Addr == a }) && (!a.IsValid() || plan.FamilyOf(a) == f) {
					want = append(want, plan.Frontend{Kind: kind, Addr: a, Protocol: plan.TCP, Port: 30000})
				}
			}
			add(plan.ClusterIP, addrs.cluster[f])
			for _, a := range addrs.loadBalancer {
				add(plan.LoadBalancerIP, a)
			}
			for _, a := range addrs.external {
				add(plan.ExternalIP, a)
			}
			if port.NodePort != 0 {
				add(plan.NodePort, netip.Addr{})
			}
			if svc.Spec.HealthCheckNodePort != 0 {
				add(plan.HealthCheckNodePort, netip.Addr{})
			}
			slices.SortFunc(want, plan.Frontend.Compare)
			if got := frontends(svc, addrs, port, f, true); !slices.Equal(got, want) {
				t.Fatalf("%s: got %s, want %s", f, got, want)
			}
		}
	})
}

// largeService has external IPs from 198.18.0.0 on, and ports from 1 on.
func largeService(name string, ips, ports int) *v1.Service {
	svc := named(name, "10.96.0.1")
	svc.Spec.Ports = nil
	for i := range ips {
		svc.Spec.ExternalIPs = append(svc.Spec.ExternalIPs, netip.AddrFrom4([4]byte{198, 18 + byte(i>>16), byte(i >> 8), byte(i)}).String())
	}
	for i := range ports {
		svc.Spec.Ports = append(svc.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)})
	}
	return svc
}

// largeSlice has an endpoint for each of so many ports.
func largeSlice(service string, ports int, address string) *discovery.EndpointSlice {
	es := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: service,
		Labels: map[string]string{discovery.LabelServiceName: service}}, AddressType: discovery.AddressTypeIPv4,
		Endpoints: []discovery.Endpoint{{Addresses: []string{address}}}}
	for i := range ports {
		es.Ports = append(es.Ports, discovery.EndpointPort{Name: new(fmt.Sprint("p", i)), Port: new(int32(i + 1))})
	}
	return es
}

// processorTime is what this process has used.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLargeService is the processor time that one large Service takes for each of its frontends: read with its endpoints, another endpoint, and its
// removal. What several Services ask for costs the second of them more. It does not depend on how large they are.
func BenchmarkLargeService(b *testing.B) {
	for _, size := range []struct{ services, ips, ports int }{
		{1, 1000, 20}, {1, 20_000, 20}, {1, 1, 1000}, {1, 1, 20_000}, {2, 1000, 10}, {2, 20_000, 10},
	} {
		b.Run(fmt.Sprintf("%dservices/%dx%d", size.services, size.ips, size.ports), func(b *testing.B) {
			var took [3]time.Duration
			reported := 0
			for b.Loop() {
				s := NewState("me", plan.Settings{}, plan.Families[:1], func(source.Finding) { reported++ })
				apply := func(step int, of func(name string) source.Batch) {
					begin := processorTime(b)
					for i := range size.services {
						s.Apply(of(fmt.Sprint("s", i)))
					}
					s.Update()
					took[step] += processorTime(b) - begin
				}
				apply(0, func(name string) source.Batch {
					b := ofService(largeService(name, size.ips, size.ports))
					b.Merge(ofSlice(largeSlice(name, size.ports, "10.0.0.1")))
					return b
				})
				apply(1, func(name string) source.Batch { return ofSlice(largeSlice(name, size.ports, "10.0.0.2")) })
				apply(2, noService)
			}
			frontends := float64(b.N * size.services * (size.ips + 1) * size.ports)
			for i, name := range []string{"first", "flap", "removal"} {
				b.ReportMetric(float64(took[i].Nanoseconds())/frontends, name+"-ns/frontend")
			}
			b.ReportMetric(float64(reported)/float64(b.N), "findings")
			b.ReportMetric(0, "ns/op")
		})
	}
}
