package iptables

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"nodeproxy/backend"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

var trafficKey = plan.Key{
	Service: plan.Service{Namespace: "ns", Name: "web"}, Port: "http", Protocol: plan.TCP, Family: plan.IPv4,
}

// trafficPlan has ns/web:http with a cluster IP, an external IP, a node port and source ranges, at an endpoint on loopback.
func trafficPlan(endpoint string) *plan.Plan {
	p := plan.New(plan.Node{Name: "me"}, plan.Settings{})
	p.Set(&plan.ServicePort{
		Key: trafficKey,
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: netip.MustParseAddr("10.96.0.1"), Protocol: plan.TCP, Port: 80},
			{Kind: plan.LoadBalancerIP, Addr: netip.MustParseAddr("192.0.2.9"), Protocol: plan.TCP, Port: 80},
			{Kind: plan.ExternalIP, Addr: netip.MustParseAddr("192.0.2.8"), Protocol: plan.TCP, Port: 80},
			{Kind: plan.NodePort, Protocol: plan.TCP, Port: 30080},
		},
		SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
		Endpoints:    plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.MustParseAddrPort(endpoint), Local: true}}},
	})
	return p
}

// connections reads once, by name of the Service.
func connections(ctx context.Context, r *TrafficReader) (map[string]int64, error) {
	out := map[string]int64{}
	var all error
	for t, err := range r.Traffic(ctx) {
		if err != nil {
			all = errors.Join(all, err)
			continue
		}
		if t.PacketsIn != plan.NotCounted || t.BytesIn != plan.NotCounted || t.PacketsOut != plan.NotCounted ||
			t.BytesOut != plan.NotCounted {
			all = errors.Join(all, errors.New("packets or bytes are told, which these rules do not count"))
		}
		out[t.Key.Service.Name] = t.Connections
	}
	return out, all
}

// TestConnectionsAreCounted makes connections through the real rules of both variants.
func TestConnectionsAreCounted(t *testing.T) {
	t.Parallel()
	inVariants(t, connectAndCount)
}

// listenAt gives the loopback addresses, and listens for connections at one of them.
func listenAt(at string, addresses ...string) (net.Listener, error) {
	lo, err := netlink.LinkByName("lo")
	for _, text := range addresses {
		if addr, _ := netlink.ParseAddr(text); err == nil {
			err = netlink.AddrAdd(lo, addr)
		}
	}
	if err != nil {
		return nil, err
	}
	return net.Listen("tcp", at)
}

func connectAndCount(t *testing.T, v xtables.Variant) {
	listener, err := listenAt("192.0.2.7:8080", "10.96.0.1/32", "192.0.2.7/32", "192.0.2.8/32", "192.0.2.9/32")
	if err != nil {
		t.Error(err)
		return
	}
	defer listener.Close()
	// Backend.Sync would do its work on other threads, which are in other namespaces.
	e := realEngine(t, v, plan.IPv4)
	b := &Backend{PerFamily: backend.PerFamily[*engine]{Engines: []*engine{e}}}
	if n, err := b.InvalidDropped(); n != 0 || err != nil {
		t.Errorf("before the first sync: %d packets dropped, %v", n, err)
	}
	p := trafficPlan("192.0.2.7:8080")
	r := b.Traffic()
	r.Update(p, plan.Everything())
	program(t, e, p, plan.Everything())
	want := int64(0)
	check := func(step string) {
		t.Helper()
		if got, err := connections(context.Background(), r); err != nil || len(got) != 1 || got["web"] != want {
			t.Errorf("%s: connections %v, %v; want %d of ns/web", step, got, err, want)
		}
	}
	check("without connections")
	for range 2 {
		for _, to := range []string{"10.96.0.1:80", "192.0.2.9:80", "192.0.2.8:80", "192.0.2.7:30080"} {
			c, err := net.DialTimeout("tcp", to, 20*time.Second)
			if err != nil {
				t.Errorf("%s: %v", to, err)
				return
			}
			_, _ = c.Write([]byte("a packet that is not the first\n"))
			c.Close()
			want++
		}
		check("after connections to four frontends")
	}
	before := p.Services[trafficKey]
	after := *before
	after.Affinity = time.Hour
	after.Frontends = after.Frontends[:3]
	p.Set(&after)
	r.Update(p, plan.Only(plan.Keys{trafficKey: {}}))
	program(t, e, p, plan.Only(plan.Keys{trafficKey: {}}))
	check("after a rule went")
	// Nothing is forwarded here that conntrack could not place, so the counter is set.
	set := exec.Command("iptables-"+string(v), "-R", names.Forward, "2", "-m", "conntrack", "--ctstate", "INVALID",
		"-c", "3", "156", "-j", "DROP")
	if out, err := set.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if n, err := b.InvalidDropped(); n != 3 || err != nil {
		t.Errorf("%d packets dropped, %v; want 3", n, err)
	}
}

// TestConnectionsOfWrittenChains has counters that grow, begin anew, vanish, and can't be read.
func TestConnectionsOfWrittenChains(t *testing.T) {
	t.Parallel()
	hash := serviceChain("", trafficKey)
	text := ""
	var failure error
	list := func(_ context.Context, each func(string)) error {
		for line := range strings.Lines(text) {
			each(strings.TrimSuffix(line, "\n"))
		}
		return failure
	}
	r := newTrafficReader([]counterTable{{plan.IPv4, list}})
	p := trafficPlan("192.0.2.7:8080")
	r.Update(p, plan.Everything())
	cluster := `-d 10.96.0.1/32 -p tcp -m comment --comment "ns/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-` + hash
	external := `-d 192.0.2.8/32 -p tcp -m comment --comment "ns/web:http external IP" -m tcp --dport 80 -j KUBE-EXT-` + hash
	for _, step := range []struct {
		name, text string
		want       int64
	}{
		{"begin", "[10:600] -A KUBE-SERVICES " + cluster + "\n[5:300] -A KUBE-SERVICES " + external + "\n", 15},
		{"within", "[10:600] -A KUBE-SERVICES " + cluster + "\n[5:300] -A KUBE-SERVICES " + external + "\n" +
			"[9:9] -A KUBE-EXT-" + hash + " -j KUBE-SVC-" + hash + "\n[9:9] -A KUBE-SVC-" + hash + " -j KUBE-SEP-AAAAAAAAAAAAAAAA\n", 15},
		{"grow", "[11:660] -A KUBE-SERVICES " + cluster + "\n[5:300] -A KUBE-SERVICES " + external + "\n", 16},
		{"one chain written anew", "[2:120] -A KUBE-SVC-10.96.0.0/24 " + cluster + "\n[5:300] -A KUBE-SERVICES " + external + "\n", 18},
		{"one gone", "[5:300] -A KUBE-SERVICES " + external + "\n", 18},
		{"and back", "[1:60] -A KUBE-SERVICES " + cluster + "\n[5:300] -A KUBE-SERVICES " + external + "\n", 19},
		{"another Service's", "[7:7] -A KUBE-SERVICES -d 10.96.0.2/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA\nCOMMIT\n# end\n", 19},
	} {
		text = step.text
		if got, err := connections(context.Background(), r); err != nil || got["web"] != step.want {
			t.Errorf("%s: %v, %v; want %d", step.name, got, err, step.want)
		}
	}
	text, failure = "[4:240] -A KUBE-SERVICES "+cluster+"\n", errors.New("no counters today")
	for range 2 {
		if got, err := connections(context.Background(), r); !errors.Is(err, failure) || got["web"] != 23 {
			t.Errorf("with a failure: %v, %v; want 23 and the error", got, err)
		}
	}
	failure = nil
	p.Delete(trafficKey)
	r.Update(p, plan.Only(plan.Keys{trafficKey: {}}))
	if got, err := connections(context.Background(), r); err != nil || len(got) != 0 || len(r.total) != 0 {
		t.Errorf("without the Service: %v, %v; %d sums are kept", got, err, len(r.total))
	}
}

// BenchmarkTraffic reads the counters of 10,000 services with two endpoints each.
func BenchmarkTraffic(b *testing.B) {
	inVariants(b, func(b *testing.B, v xtables.Variant) {
		p := plantest.Large(10000, 2)
		e := realEngine(b, v, plan.IPv4)
		program(b, e, p, plan.Everything())
		backend := &Backend{PerFamily: backend.PerFamily[*engine]{Engines: []*engine{e}}}
		r := backend.Traffic()
		r.Update(p, plan.Everything())
		for b.Loop() {
			if got, err := connections(context.Background(), r); err != nil || len(got) != 10000 {
				b.Errorf("%d ServicePorts, %v", len(got), err)
			}
		}
		start := time.Now()
		if _, err := backend.InvalidDropped(); err != nil {
			b.Error(err)
		}
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/invalid")
		start = time.Now()
		if _, err := backend.LocalhostNodePorts()(); err != nil {
			b.Error(err)
		}
		b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/localhost")
	})
}
