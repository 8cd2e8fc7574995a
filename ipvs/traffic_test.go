package ipvs

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// trafficPlan has ns/web with a cluster IP and a node port, and ns/idle with a cluster IP only.
func trafficPlan() *plan.Plan {
	p := plan.New(plan.Node{Name: "me"}, plan.Settings{})
	for i, name := range []string{"web", "idle"} {
		service := plan.Service{Namespace: "ns", Name: name}
		sp := &plan.ServicePort{Key: plan.Key{Service: service, Protocol: plan.TCP, Family: plan.IPv4}}
		sp.Frontends = []plan.Frontend{{
			Kind: plan.ClusterIP, Addr: netip.AddrFrom4([4]byte{10, 96, 0, byte(i + 1)}), Protocol: plan.TCP, Port: 80,
		}}
		if name == "web" {
			sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: 30080})
		}
		sp.Any = true
		sp.Endpoints.Cluster = []plan.Endpoint{{Addr: netip.MustParseAddrPort("10.244.1.5:8080")}}
		p.Set(sp)
	}
	return p
}

// counters are those of a kernel.
type counters struct {
	traffic map[ipvs.ServerID]ipvs.Traffic
	hidden  ipvs.ServerID
	err     error
}

// stats leaves out the server that is hidden, as a dump may do while others change theirs.
func (c *counters) stats(each func(ipvs.ServerID, ipvs.Traffic)) error {
	for id, t := range c.traffic {
		if id != c.hidden {
			each(id, t)
		}
	}
	return c.err
}

// readTraffic reads once, by name of the Service.
func readTraffic(ctx context.Context, r *TrafficReader) (map[string]plan.Traffic, error) {
	out := map[string]plan.Traffic{}
	var all error
	for t, err := range r.Traffic(ctx) {
		if err != nil {
			all = errors.Join(all, err)
			continue
		}
		out[t.Key.Service.Name] = t
	}
	return out, all
}

func TestTrafficOfServicePorts(t *testing.T) {
	t.Parallel()
	p := trafficPlan()
	e := &engine{family: plan.IPv4, log: slog.New(slog.DiscardHandler)}
	e.desired = full(p, plan.IPv4, Options{MasqueradeBit: 14, Scheduler: "rr"})
	key := plan.Key{Service: plan.Service{Namespace: "ns", Name: "web"}, Protocol: plan.TCP, Family: plan.IPv4}
	servers := e.desired.build(e.desired.servicePort(key)).servers
	if len(servers) != 2 {
		t.Fatalf("ns/web has %d virtual servers, want 2", len(servers))
	}
	cluster, node := servers[0].id, servers[1].id
	k := &counters{traffic: map[ipvs.ServerID]ipvs.Traffic{
		cluster: {Connections: 10, PacketsIn: 100, PacketsOut: 90, BytesIn: 1000, BytesOut: 9000},
		node:    {Connections: 1, PacketsIn: 5, PacketsOut: 4, BytesIn: 50, BytesOut: 40},
		// Somebody else's.
		{Family: plan.IPv4, Protocol: plan.TCP, Addr: netip.MustParseAddr("192.0.2.1"), Port: 1}: {Connections: 1000},
	}}
	r := newTrafficReader([]*engine{e}, k.stats)
	check := func(step string, want plan.Traffic) {
		t.Helper()
		got, err := readTraffic(context.Background(), r)
		want.Key = key
		if err != nil || len(got) != 2 || got["web"] != want {
			t.Errorf("%s: %+v, %v; want %+v of ns/web", step, got, err, want)
		}
		if idle := got["idle"]; idle.Connections != 0 || idle.BytesIn != 0 {
			t.Errorf("%s: ns/idle has %+v", step, idle)
		}
	}
	check("at first",
		plan.Traffic{Connections: 11, PacketsIn: 105, PacketsOut: 94, BytesIn: 1050, BytesOut: 9040})
	check("again",
		plan.Traffic{Connections: 11, PacketsIn: 105, PacketsOut: 94, BytesIn: 1050, BytesOut: 9040})
	k.traffic[node] = ipvs.Traffic{Connections: 2, PacketsIn: 6, PacketsOut: 5, BytesIn: 60, BytesOut: 50}
	check("after one more",
		plan.Traffic{Connections: 12, PacketsIn: 106, PacketsOut: 95, BytesIn: 1060, BytesOut: 9050})
	k.traffic[node] = ipvs.Traffic{Connections: 1, PacketsIn: 1, PacketsOut: 1, BytesIn: 1, BytesOut: 1}
	check("after a server was made anew",
		plan.Traffic{Connections: 13, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})
	k.hidden = cluster
	check("with a server that is missing from the list",
		plan.Traffic{Connections: 13, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})
	k.hidden = ipvs.ServerID{}
	check("with all again",
		plan.Traffic{Connections: 13, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})
	delete(k.traffic, cluster)
	check("after a server went",
		plan.Traffic{Connections: 13, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})
	k.traffic[cluster] = ipvs.Traffic{Connections: 20}
	check("after it came again",
		plan.Traffic{Connections: 33, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})

	sp := p.Services[key]
	local := *sp
	local.Frontends = local.Frontends[:1]
	p.Set(&local)
	e.desired.update(p, plan.Keys{key: {}}, 0)
	check("without the node port, whose server is left to its connections",
		plan.Traffic{Connections: 33, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})
	p.Set(sp)
	e.desired.update(p, plan.Keys{key: {}}, 0)
	check("with the node port and the same server again",
		plan.Traffic{Connections: 33, PacketsIn: 107, PacketsOut: 96, BytesIn: 1061, BytesOut: 9051})

	p.Delete(key)
	e.desired.update(p, plan.Keys{key: {}}, 0)
	clear(k.traffic)
	if got, err := readTraffic(context.Background(), r); err != nil || len(got) != 1 || len(r.sums)+len(r.servers) != 0 {
		t.Errorf("without ns/web: %v, %v; %d sums and %d servers are kept", got, err, len(r.sums), len(r.servers))
	}
	p.Set(sp)
	e.desired.update(p, plan.Keys{key: {}}, 0)
	k.traffic[cluster], k.traffic[node] = ipvs.Traffic{Connections: 1}, ipvs.Traffic{}
	check("as a new Service", plan.Traffic{Connections: 1})
}

func TestTrafficThatCannotBeRead(t *testing.T) {
	t.Parallel()
	e := &engine{family: plan.IPv4, log: slog.New(slog.DiscardHandler)}
	k := &counters{traffic: map[ipvs.ServerID]ipvs.Traffic{}}
	r := newTrafficReader([]*engine{e}, k.stats)
	if got, err := readTraffic(context.Background(), r); err == nil || len(got) != 0 {
		t.Errorf("before any sync: %v, %v; want an error", got, err)
	}
	e.desired = full(trafficPlan(), plan.IPv4, Options{MasqueradeBit: 14, Scheduler: "rr"})
	k.err = errors.New("no counters today")
	if got, err := readTraffic(context.Background(), r); !errors.Is(err, k.err) || len(got) != 0 {
		t.Errorf("%v, %v; want the kernel's error", got, err)
	}
	k.err = nil
	e.mu.Lock()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if got, err := readTraffic(ctx, r); !errors.Is(err, context.DeadlineExceeded) || len(got) != 0 {
		t.Errorf("during a sync: %v, %v; want an error when time is up", got, err)
	}
	e.mu.Unlock()
	if got, err := readTraffic(context.Background(), r); err != nil || len(got) != 2 {
		t.Errorf("after it: %v, %v; want two", got, err)
	}
}
