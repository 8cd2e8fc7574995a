package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"nodeproxy/plan"
	"nodeproxy/source/apiserver/apiservertest"
)

// happening is something that happens in a world. It returns words for what it has drawn.
type happening struct {
	name   string
	weight int
	do     func(*world, *rand.Rand) string
}

// Happenings that every mode has: to objects and the API server, and to nodeproxy. Scenarios have their names.
var (
	beforeRules = []happening{
		{"change-service", 8, (*world).changeService},
		{"delete-service", 2, func(w *world, r *rand.Rand) string { return w.remove("services", fmt.Sprint("s", r.IntN(services))) }},
		{"change-slice", 14, (*world).changeSlice},
		{"delete-slice", 3, func(w *world, r *rand.Rand) string { return w.remove("endpointslices", sliceName(r)) }},
		{"change-node", 1, (*world).changeNode},
		{"change-load-balancer", 5, (*world).changeLoadBalancer},
		{"api-ends-watches", 2, toServer(func(_ *world, s *apiservertest.CachingServer, _ *rand.Rand) string { s.End(); return "" })},
		{"api-restarts", 2, toServer(func(w *world, s *apiservertest.CachingServer, _ *rand.Rand) string { w.cluster.Restart(s); return "" })},
		{"api-forgets", 1, toServer(func(_ *world, s *apiservertest.CachingServer, _ *rand.Rand) string { s.Oldest = s.Seen; return "" })},
		{"api-lags", 2, toServer(func(_ *world, s *apiservertest.CachingServer, r *rand.Rand) string {
			s.Lag = time.Duration(r.Int64N(int64(5 * time.Second)))
			return s.Lag.String()
		})},
		{"api-ill", 2, toServer(func(w *world, s *apiservertest.CachingServer, r *rand.Rand) string {
			s.Ill = apiservertest.Trouble(r.IntN(apiservertest.Troubles))
			s.End()
			w.later(r, 10*time.Second, func() { s.Ill = apiservertest.None })
			return s.Ill.String()
		})},
		{"api-trouble", 3, toServer(func(w *world, _ *apiservertest.CachingServer, r *rand.Rand) string {
			what := apiservertest.Trouble(r.IntN(apiservertest.Troubles))
			w.cluster.Troubles = append(w.cluster.Troubles, what)
			w.later(r, 10*time.Second, func() { w.cluster.Troubles = nil })
			return what.String()
		})},
		{"api-slow", 1, toServer(func(w *world, _ *apiservertest.CachingServer, r *rand.Rand) string {
			w.pace = time.Duration(r.Int64N(int64(time.Second)))
			return w.pace.String()
		})},
		{"api-streams", 1, toServer(func(w *world, s *apiservertest.CachingServer, r *rand.Rand) string {
			s.Streams = apiservertest.Support(r.IntN(4))
			w.silent = w.silent || s.Streams == apiservertest.Endless
			return fmt.Sprint("support ", s.Streams)
		})},
		{"api-back-in-time", 1, toServer(func(w *world, _ *apiservertest.CachingServer, r *rand.Rand) string {
			if r.IntN(4) > 0 {
				return "not this time"
			}
			w.silent = true
			w.cluster.Restore()
			return ""
		})},
		{"api-loses-event", 1, toServer(func(w *world, _ *apiservertest.CachingServer, r *rand.Rand) string {
			after, most := w.cluster.Version, 1+r.IntN(12)
			w.cluster.Lose = func(o apiservertest.Change) bool {
				loses := o.Version > after && o.Version <= after+most
				if loses {
					w.lost[strings.TrimPrefix(o.Name.String(), "/")] = true
				}
				return loses
			}
			return fmt.Sprint("within ", most, " versions")
		})},
		{"flows-trouble", 2, (*world).troubleFlows},
		{"tables-trouble", 5, func(w *world, r *rand.Rand) string {
			w.troubled = true
			return w.rules.suffer(r)
		}},
	}
	afterRules = []happening{
		{"kill", 3, func(w *world, r *rand.Rand) string {
			all := r.IntN(2) == 0
			w.kill(all)
			time.Sleep(time.Duration(r.Int64N(int64(20 * time.Millisecond)))) // in simulated time
			w.start()
			return fmt.Sprint("with its children: ", all)
		}},
		{"verify", 3, func(w *world, _ *rand.Rand) string { // as /readyz?verify
			if d := w.front.daemon.Load(); d != nil {
				go d.verification(context.Background())
			}
			return ""
		}},
		{"stop", 1, func(w *world, r *rand.Rand) string {
			w.stop()
			long := time.Duration(r.Int64N(int64(2 * time.Second)))
			time.Sleep(long) // in simulated time
			w.start()
			return "for " + long.String()
		}},
		{"new-flags", 2, func(w *world, r *rand.Rand) string {
			args := append(drawFlags(w.cfg.Mode, r), "--proxy-mode="+w.cfg.Mode)
			w.restart(r, args...)
			return strings.Join(args, " ")
		}},
		{"reload", 2, (*world).reload},
		{"change-all-slices", 2, func(w *world, r *rand.Rand) string {
			var words []string
			for i := range services {
				for k := range slicesOf {
					words = append(words, w.changeSliceNamed(fmt.Sprintf("s%d-%d", i, k), r))
				}
			}
			return strings.Join(words, "; ")
		}},
		{"api-all-restart", 3, func(w *world, r *rand.Rand) string { // and their caches, which are full of watches then, send slowly
			w.cluster.Lock()
			defer w.cluster.Unlock()
			for _, s := range w.cluster.Servers {
				w.cluster.Restart(s)
			}
			w.pace = time.Duration(r.Int64N(int64(300 * time.Millisecond)))
			return w.pace.String()
		}},
	}
)

// drawFlags draws flags that change the rules that nodeproxy writes in a mode.
func drawFlags(mode string, r *rand.Rand) (args []string) {
	maybe := func(flag string, values ...string) {
		if i := r.IntN(2 * len(values)); i < len(values) {
			args = append(args, "--"+flag+"="+values[i])
		}
	}
	maybe("masquerade-all", "true")
	maybe("nodeport-addresses", "primary", "192.0.2.0/24,2001:db8::/64")
	switch mode {
	case "nftables":
		maybe("nftables-masquerade-bit", "15")
		maybe("nftables-min-sync-period", "1s")
	case "ipvs":
		maybe("iptables-masquerade-bit", "15")
		maybe("ipvs-scheduler", "lc", "wrr")
		maybe("ipvs-vips", "addresses")
		maybe("ipvs-min-sync-period", "1s")
	default:
		maybe("iptables-masquerade-bit", "15")
		maybe("iptables-min-sync-period", "1s")
	}
	return args
}

// toServer returns what happens to an API server.
func toServer(do func(*world, *apiservertest.CachingServer, *rand.Rand) string) func(*world, *rand.Rand) string {
	return func(w *world, r *rand.Rand) string {
		w.cluster.Lock()
		defer w.cluster.Unlock()
		i := r.IntN(len(w.cluster.Servers))
		return fmt.Sprintf("server %d %s", i, do(w, w.cluster.Servers[i], r))
	}
}

// later does something to the cluster after at most a time.
func (w *world) later(r *rand.Rand, most time.Duration, do func()) {
	time.AfterFunc(time.Duration(r.Int64N(int64(most))), func() {
		w.cluster.Lock()
		defer w.cluster.Unlock()
		do()
	})
}

// calm ends all trouble.
func (w *world) calm() {
	w.rules.calm()
	w.calmFlows()
	w.cluster.Lock()
	defer w.cluster.Unlock()
	w.cluster.Troubles, w.cluster.Lose, w.pace = nil, nil, 0
	for _, s := range w.cluster.Servers {
		s.Lag, s.Ill = 0, apiservertest.None
		if s.Streams == apiservertest.Endless {
			s.Streams = apiservertest.Supported
		}
		s.See(w.cluster.Version)
	}
}

// services is how many there are at most, and slicesOf how many slices each has.
const services, slicesOf = 5, 3

// The addresses of Services: each has its own, whenever it is there.
func clusterIP(service int, f plan.Family) netip.Addr {
	return address(f, "10.96.0.%d", "fd96::%x", 10+service)
}
func externalIP(service int, f plan.Family) netip.Addr {
	return address(f, "203.0.113.%d", "2001:db8:113::%x", 10+service)
}

// loadBalancerIP is an address that a load balancer may give to a Service.
func loadBalancerIP(service int, f plan.Family) netip.Addr {
	return address(f, "203.0.113.%d", "2001:db8:113::%x", 110+service)
}

func nodeAddress(f plan.Family) netip.Addr { return address(f, "192.0.2.%d", "2001:db8::%x", 11) }

// fromPods reports whether an address is one of pods.
func fromPods(a netip.Addr) bool {
	return netip.MustParsePrefix("10.244.0.0/16").Contains(a) || netip.MustParsePrefix("fd44::/32").Contains(a)
}

// frontends are where a port of a Service may be reached.
func frontends(service, port int, f plan.Family) []netip.AddrPort {
	number := uint16(80 + port)
	return []netip.AddrPort{netip.AddrPortFrom(clusterIP(service, f), number), netip.AddrPortFrom(nodeAddress(f), nodePort(service, port)),
		netip.AddrPortFrom(externalIP(service, f), number), netip.AddrPortFrom(externalIP((service+1)%services, f), number),
		netip.AddrPortFrom(loadBalancerIP(service, f), number), netip.AddrPortFrom(loadBalancerIP((service+1)%services, f), number)}
}

func nodePort(service, port int) uint16 { return uint16(30000 + 10*service + port) }

func address(f plan.Family, four, six string, n int) netip.Addr {
	if f == plan.IPv4 {
		return netip.MustParseAddr(fmt.Sprintf(four, n))
	}
	return netip.MustParseAddr(fmt.Sprintf(six, n))
}

var familyOf = map[v1.IPFamily]plan.Family{v1.IPv4Protocol: plan.IPv4, v1.IPv6Protocol: plan.IPv6}

// The ports that Services may have: their names, and the protocols, which the last digit of a frontend's port tells.
var (
	portNames = []string{"a", "b"}
	protocols = []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}
)

func protocolOf(frontend uint16) plan.Protocol { return plan.Protocol(protocols[frontend%10]) }

func (w *world) changeService(r *rand.Rand) string {
	i := r.IntN(services)
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("s", i)}}
	s.Spec.Type = []v1.ServiceType{v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer}[r.IntN(3)]
	families := [][]v1.IPFamily{{v1.IPv4Protocol}, {v1.IPv6Protocol}, {v1.IPv4Protocol, v1.IPv6Protocol}}[r.IntN(3)]
	s.Spec.IPFamilies = families
	external := r.IntN(2) == 0
	for _, f := range families {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, clusterIP(i, familyOf[f]).String())
		if external {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, externalIP(i, familyOf[f]).String())
		}
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	for p, name := range portNames[:1+r.IntN(2)] {
		port := v1.ServicePort{Name: name, Port: int32(80 + p), Protocol: protocols[p], TargetPort: intstr.FromInt(8080)}
		if s.Spec.Type != v1.ServiceTypeClusterIP {
			port.NodePort = int32(nodePort(i, p))
		}
		s.Spec.Ports = append(s.Spec.Ports, port)
	}
	policies := []v1.ServiceExternalTrafficPolicy{v1.ServiceExternalTrafficPolicyCluster, v1.ServiceExternalTrafficPolicyLocal}
	s.Spec.ExternalTrafficPolicy, s.Spec.InternalTrafficPolicy = policies[r.IntN(2)], ptr.To(v1.ServiceInternalTrafficPolicy(policies[r.IntN(4)/3]))
	if s.Spec.SessionAffinity = v1.ServiceAffinityNone; r.IntN(4) == 0 {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](10800)}}
	}
	if r.IntN(4) == 0 { // It asks for an address of another one, too.
		for _, f := range families {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, externalIP((i+1)%services, familyOf[f]).String())
		}
	}
	w.put("services", s)
	return fmt.Sprintf("%s %s %v ports %d external IPs %v internal %s external %s affinity %s", s.Name, s.Spec.Type, families, len(s.Spec.Ports),
		s.Spec.ExternalIPs, *s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy, s.Spec.SessionAffinity)
}

// sourceRanges are source ranges: those of a client outside, of pods, of the node, and of nobody who sends anything.
var sourceRanges = [][]string{{"198.51.100.0/24", "2001:db8:51::/48"}, {"10.244.0.0/16", "fd44::/32"}, {"192.0.2.0/24", "2001:db8::/64"},
	{"203.0.113.0/25", "2001:db8:113::/64"}}

// changeLoadBalancer does what a load balancer controller does, and what the owner of a Service does: it makes the Service one of type LoadBalancer,
// and sets or removes its addresses and source ranges.
func (w *world) changeLoadBalancer(r *rand.Rand) string {
	i := r.IntN(services)
	w.cluster.Lock()
	o := apiservertest.Objects(w.cluster.Log, "services", w.cluster.Version)[types.NamespacedName{Namespace: "default", Name: fmt.Sprint("s", i)}]
	w.cluster.Unlock()
	if o.Object == nil {
		return fmt.Sprintf("s%d is not there", i)
	}
	s := o.Object.DeepCopyObject().(*v1.Service)
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	for p := range s.Spec.Ports {
		s.Spec.Ports[p].NodePort = int32(nodePort(i, p))
	}
	s.Status.LoadBalancer.Ingress, s.Spec.LoadBalancerSourceRanges = nil, nil
	of := []int{i}
	switch r.IntN(6) {
	case 0:
		of = nil
	case 1: // It shares that of another one, or takes it over.
		of = append(of, (i+1)%services)
	}
	mode := ptr.To(v1.LoadBalancerIPModeVIP)
	if r.IntN(8) == 0 {
		mode = ptr.To(v1.LoadBalancerIPModeProxy)
	}
	for _, n := range of {
		for _, f := range s.Spec.IPFamilies {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress,
				v1.LoadBalancerIngress{IP: loadBalancerIP(n, familyOf[f]).String(), IPMode: mode})
		}
	}
	if r.IntN(2) == 0 {
		for n := range 1 + r.IntN(2) {
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, sourceRanges[(r.IntN(len(sourceRanges))+n)%len(sourceRanges)]...)
		}
	}
	w.rules.Lock()
	w.balanced = true
	w.rules.Unlock()
	w.put("services", s)
	return fmt.Sprintf("s%d has those of %v mode %s source ranges %v", i, of, *mode, s.Spec.LoadBalancerSourceRanges)
}

func sliceName(r *rand.Rand) string { return fmt.Sprintf("s%d-%d", r.IntN(services), r.IntN(slicesOf)) }

func (w *world) changeSlice(r *rand.Rand) string { return w.changeSliceNamed(sliceName(r), r) }

func (w *world) changeSliceNamed(name string, r *rand.Rand) string {
	i, k := int(name[1]-'0'), int(name[3]-'0')
	f := plan.Families[(i+k)%2]
	s := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discovery.LabelServiceName: name[:2]}},
		AddressType: map[plan.Family]discovery.AddressType{plan.IPv4: discovery.AddressTypeIPv4, plan.IPv6: discovery.AddressTypeIPv6}[f]}
	ports := []int32{8080, 8080, 9090}
	for p, name := range portNames[:1+r.IntN(2)] {
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Protocol: &protocols[p], Port: ptr.To(ports[r.IntN(3)] + int32(p))})
	}
	var words []string
	for n := range r.IntN(4) {
		node, ready, terminating := 1+r.IntN(2), r.IntN(4) > 0, r.IntN(5) == 0
		a := address(f, fmt.Sprintf("10.244.%d.%%d", node), fmt.Sprintf("fd44::%d:%%x", node), 20*i+n+1)
		e := discovery.Endpoint{Addresses: []string{a.String()}, NodeName: ptr.To(fmt.Sprint("n", node)), Zone: ptr.To([]string{"x", "y"}[node-1]),
			Conditions: discovery.EndpointConditions{Ready: ptr.To(ready && !terminating), Serving: &ready, Terminating: &terminating}}
		if r.IntN(3) == 0 {
			e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: []string{"x", "y"}[r.IntN(2)]}}}
		}
		s.Endpoints = append(s.Endpoints, e)
		words = append(words, fmt.Sprintf("%s ready %t terminating %t hints %t", a, ready, terminating, e.Hints != nil))
	}
	if r.IntN(8) == 0 { // It passes to another Service.
		i = r.IntN(services)
		s.Labels[discovery.LabelServiceName] = fmt.Sprint("s", i)
	}
	w.rules.Lock()
	for _, p := range s.Ports {
		for _, e := range s.Endpoints {
			to := netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port))
			for _, at := range frontends(i, slices.Index(portNames, *p.Name), f) {
				if w.ever[at] == nil {
					w.ever[at] = map[netip.AddrPort]bool{}
				}
				w.ever[at][to] = true
			}
		}
	}
	w.rules.Unlock()
	w.put("endpointslices", s)
	return fmt.Sprintf("%s of s%d ports %d: %s", name, i, len(s.Ports), strings.Join(words, ", "))
}

func (w *world) changeNode(r *rand.Rand) string {
	zone := []string{"x", "y"}[r.IntN(2)]
	w.put("nodes", &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{v1.LabelTopologyZone: zone}},
		Status: v1.NodeStatus{Addresses: []v1.NodeAddress{
			{Type: v1.NodeInternalIP, Address: nodeAddress(plan.IPv4).String()}, {Type: v1.NodeInternalIP, Address: nodeAddress(plan.IPv6).String()}}}})
	return "zone " + zone
}

func (w *world) put(resource string, o apiservertest.Object) {
	w.cluster.Lock()
	defer w.cluster.Unlock()
	w.cluster.Put(resource, o)
}

func (w *world) remove(resource, name string) string {
	w.cluster.Lock()
	defer w.cluster.Unlock()
	w.cluster.Delete(resource, types.NamespacedName{Namespace: "default", Name: name})
	return name
}

// probes returns packets of a family to Services.
func (w *world) probes(f plan.Family) func(yield func(probe) bool) {
	pod, outside, node := address(f, "10.244.1.%d", "fd44::1:%x", 200), address(f, "198.51.100.%d", "2001:db8:51::%x", 7), nodeAddress(f)
	return func(yield func(probe) bool) {
		for i := range services {
			for p := range portNames {
				to := frontends(i, p, f)
				if w.ever[to[0]] == nil {
					continue
				}
				list := []probe{{pod, "veth1", to[0]}, {node, "", to[0]}, {node, "", to[1]}, {outside, "eth0", to[1]}, {pod, "veth1", to[2]},
					{outside, "eth0", to[2]}}
				if w.balanced {
					list = append(list, probe{pod, "veth1", to[4]}, probe{outside, "eth0", to[4]}, probe{node, "", to[4]})
				}
				for _, q := range list {
					if !yield(q) {
						return
					}
				}
			}
		}
	}
}
