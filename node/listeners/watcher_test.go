package listeners

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
	"nodeproxy/source"
)

var primary = plan.Settings{NodePortAddresses: plan.NodePortAddresses{Primary: true}}

// TestWhatConflicts opens a socket of each kind and compares the report with what the kernel does.
func TestWhatConflicts(t *testing.T) {
	if !node(t) {
		return
	}
	const inNodePort = "spec.ports[p].nodePort"
	one := func(f plan.Frontend) []plan.Frontend { return []plan.Frontend{f} }
	nodePort := one(at(plan.NodePort, "", plan.TCP, 30080))
	udpPort := one(at(plan.NodePort, "", plan.UDP, 30053))
	external := one(at(plan.ExternalIP, "10.0.0.6", plan.TCP, 8080))
	balanced := one(at(plan.LoadBalancerIP, "fd00::5", plan.TCP, 8080))
	cluster := one(at(plan.ClusterIP, "10.96.0.1", plan.TCP, 443))
	dns := one(at(plan.ClusterIP, "10.96.0.10", plan.UDP, 53))
	localhost := plan.Settings{LocalhostNodePorts: true}
	within := func(cidr string) plan.Settings {
		return plan.Settings{NodePortAddresses: plan.NodePortAddresses{CIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}}}
	}
	for _, c := range []struct {
		name, network, address string
		settings               plan.Settings
		family                 plan.Family
		frontends              []plan.Frontend
		endpoints              []string
		want                   string // field, or empty for no conflict
	}{
		{name: "wildcard of both families", network: "tcp", address: ":30080",
			family: 4, frontends: nodePort, want: inNodePort},
		{name: "the same for IPv6", network: "tcp", address: ":30080",
			family: 6, frontends: nodePort, want: inNodePort},
		{name: "wildcard of IPv4", network: "tcp4", address: "0.0.0.0:30080",
			family: 4, frontends: nodePort, want: inNodePort},
		{name: "wildcard of IPv4, node port of IPv6", network: "tcp4", address: "0.0.0.0:30080",
			family: 6, frontends: nodePort},
		{name: "wildcard of IPv6 only", network: "tcp6", address: "[::]:30080",
			family: 6, frontends: nodePort, want: inNodePort},
		{name: "wildcard of IPv6 only, node port of IPv4", network: "tcp6", address: "[::]:30080",
			family: 4, frontends: nodePort},
		{name: "one address", network: "tcp", address: "10.0.0.6:30080",
			family: 4, frontends: nodePort, want: inNodePort},
		{name: "one address of IPv6", network: "tcp", address: "[fd00::5]:30080",
			family: 6, frontends: nodePort, want: inNodePort},
		{name: "another port", network: "tcp", address: ":30081", family: 4, frontends: nodePort},
		{name: "another protocol", network: "udp", address: ":30080", family: 4, frontends: nodePort},
		{name: "UDP", network: "udp", address: ":30053", family: 4, frontends: udpPort, want: inNodePort},
		{name: "loopback", network: "tcp", address: "127.0.0.1:30080", family: 4, frontends: nodePort},
		{name: "loopback with localhost node ports", network: "tcp", address: "127.0.0.1:30080", settings: localhost,
			family: 4, frontends: nodePort,
			want: inNodePort},
		{name: "loopback of IPv6", network: "tcp", address: "[::1]:30080", settings: localhost,
			family: 6, frontends: nodePort},
		{name: "node ports at primary addresses", network: "tcp", address: "10.0.0.5:30080", settings: primary,
			family: 4, frontends: nodePort,
			want: inNodePort},
		{name: "no node ports at this address", network: "tcp", address: "10.0.0.6:30080", settings: primary,
			family: 4, frontends: nodePort},
		{name: "wildcard, node ports at one address", network: "tcp", address: ":30080", settings: within("10.0.0.6/32"),
			family: 4, frontends: nodePort,
			want: inNodePort},
		{name: "wildcard, node ports at no address", network: "tcp", address: ":30080", settings: within("192.0.2.0/24"),
			family: 4, frontends: nodePort},
		{name: "external IP of the node, wildcard", network: "tcp", address: ":8080",
			family: 4, frontends: external, want: "spec.externalIPs"},
		{name: "external IP of the node", network: "tcp", address: "10.0.0.6:8080",
			family: 4, frontends: external, want: "spec.externalIPs"},
		{name: "beside the external IP", network: "tcp", address: "10.0.0.5:8080", family: 4, frontends: external},
		{name: "load balancer IP of the node", network: "tcp", address: ":8080",
			family: 6, frontends: balanced, want: "status.loadBalancer.ingress"},
		{name: "cluster IP, wildcard", network: "tcp", address: ":443", family: 4, frontends: cluster},
		{name: "cluster IP", network: "tcp", address: "10.96.0.1:443",
			family: 4, frontends: cluster, want: "spec.clusterIPs"},
		{name: "cache of DNS", network: "udp", address: "10.96.0.10:53",
			family: 4, frontends: dns, want: "note spec.clusterIPs"},
		{name: "its own endpoint", network: "tcp", address: ":30080",
			family: 4, frontends: nodePort, endpoints: []string{"10.0.0.5:30080"}},
		{name: "its own endpoint at one address", network: "tcp", address: "10.0.0.5:30080",
			family: 4, frontends: nodePort, endpoints: []string{"10.0.0.5:30080"}},
		{name: "beside its endpoint", network: "tcp", address: "10.0.0.6:30080",
			family: 4, frontends: nodePort, endpoints: []string{"10.0.0.5:30080"},
			want: inNodePort},
		{name: "endpoint of another port", network: "tcp", address: ":30080",
			family: 4, frontends: nodePort, endpoints: []string{"10.0.0.5:80"},
			want: inNodePort},
		{name: "endpoint of another node", network: "tcp", address: ":30080",
			family: 4, frontends: nodePort, endpoints: []string{"10.0.0.9:30080"},
			want: inNodePort},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWatched(t, c.settings)
			w.set(servicePort("web", c.family, c.frontends, c.endpoints...))
			if found := w.see(); len(found) != 0 || w.count != 0 {
				t.Fatalf("reported %v before anything listened, and counted %d", found, w.count)
			}
			closeIt := listen(t, c.network, c.address)
			found := w.see()
			if c.want == "" {
				if len(found) != 0 || w.count != 0 {
					t.Errorf("reported %v, and counted %d; there is no conflict", found, w.count)
				}
				return
			}
			field, note := strings.CutPrefix(c.want, "note ")
			if len(found) != 1 || found[0].Object != "Service ns/web" || found[0].Field != field ||
				(found[0].Severity == source.Note) != note {
				t.Fatalf("reported %v, want one of %s", found, c.want)
			}
			if self := fmt.Sprintf("process %d (", os.Getpid()); !strings.HasPrefix(found[0].Detail, self) {
				t.Errorf("reported %q; it is %s", found[0].Detail, self)
			}
			if !note && w.count != 1 {
				t.Errorf("counted %d, want 1", w.count)
			}
			if found := w.see(); len(found) != 0 {
				t.Errorf("reported %v again", found)
			}
			closeIt()
			if found := w.see(); len(found) != 1 || found[0].Severity != source.Note || w.count != 0 {
				t.Errorf("reported %v when it ended, and counted %d; want a note and 0", found, w.count)
			}
		})
	}
}

// TestOneConflictForBothFamilies has one socket of both families and a Service of both, and two sockets in one place.
func TestOneConflictForBothFamilies(t *testing.T) {
	if !node(t) {
		return
	}
	w := newWatched(t, plan.Settings{})
	w.set(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.TCP, 30080)}))
	w.set(servicePort("web", plan.IPv6, []plan.Frontend{at(plan.NodePort, "", plan.TCP, 30080)}))
	listen(t, "tcp", ":30080")
	listen(t, "tcp", ":30080")
	if found := w.see(); len(found) != 1 || w.count != 1 || !strings.Contains(found[0].Detail, "every address, port 30080/TCP") {
		t.Errorf("reported %v, and counted %d; want one", found, w.count)
	}
	// An endpoint of either family makes it the Service's own.
	w.set(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.TCP, 30080)}, "10.0.0.5:30080"))
	if w.see(); w.count != 0 {
		t.Errorf("counted %d, want none for the Service's own endpoint", w.count)
	}
}

// TestHealthCheckNodePort has a socket of this program at the port, and then one of somebody else.
func TestHealthCheckNodePort(t *testing.T) {
	if !node(t) {
		return
	}
	w := newWatched(t, plan.Settings{})
	w.set(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.HealthCheckNodePort, "", plan.TCP, 32000)}, "10.0.0.5:32000"))
	listen(t, "tcp", ":32000")
	w.own = sockets.Own
	for range 3 {
		if found := w.see(); len(found) != 0 {
			t.Fatalf("reported %v; the socket is this program's", found)
		}
	}
	w.own = func() map[uint32]bool { return nil }
	if found := w.see(); len(found) != 0 {
		t.Errorf("reported %v at the first sight", found)
	}
	if found := w.see(); len(found) != 1 || found[0].Field != "spec.healthCheckNodePort" || w.count != 1 {
		t.Errorf("reported %v, and counted %d; want one", found, w.count)
	}
	if found := w.see(); len(found) != 0 || w.count != 1 {
		t.Errorf("reported %v again, and counted %d; want 1", found, w.count)
	}

	other := newWatched(t, plan.Settings{})
	other.cfg.Held = func(svc plan.Service) bool { return svc.Name == "web" }
	other.set(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.HealthCheckNodePort, "", plan.TCP, 32000)}, "10.0.0.5:32000"))
	other.own = func() map[uint32]bool { return nil }
	if found := other.see(); len(found) != 1 {
		t.Errorf("reported %v at the first sight, though this program could not listen there; want one", found)
	}
}

// TestUDPSenders has sockets that only send: one whose port the kernel chose, and one that is connected.
func TestUDPSenders(t *testing.T) {
	if !node(t) {
		return
	}
	w := newWatched(t, plan.Settings{})
	w.gap = time.Hour
	sender, err := net.ListenPacket("udp4", "10.0.0.5:0")
	require.NoError(t, err)
	defer sender.Close()
	port := uint16(sender.LocalAddr().(*net.UDPAddr).Port)
	w.set(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.UDP, port)}))
	if found := w.see(); len(found) != 0 || len(w.doubtful) != 1 {
		t.Errorf("reported %v; the socket may be about to send (%d are in doubt)", found, len(w.doubtful))
	}
	if found := w.see(); len(found) != 0 || len(w.doubtful) != 1 {
		t.Errorf("reported %v; it is still too early to tell (%d are in doubt)", found, len(w.doubtful))
	}
	w.gap = 0
	if found := w.see(); len(found) != 1 {
		t.Errorf("reported %v; the socket stays, so it listens", found)
	}
	from, to := netip.MustParseAddrPort("10.0.0.6:30053"), netip.MustParseAddrPort("10.0.0.5:53")
	connected, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to))
	require.NoError(t, err)
	defer connected.Close()
	w.set(servicePort("dns", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.UDP, 30053)}))
	if found := w.see(); len(found) != 0 {
		t.Errorf("reported %v; the socket takes answers only", found)
	}
}

// TestServiceGoes has frontends come, change hands and go.
func TestServiceGoes(t *testing.T) {
	if !node(t) {
		return
	}
	listen(t, "tcp", ":30080")
	w := newWatched(t, plan.Settings{})
	a := servicePort("a", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.TCP, 30080)})
	b := servicePort("b", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.TCP, 30080)})
	w.set(a)
	if found := w.see(); len(found) != 1 || found[0].Object != "Service ns/a" {
		t.Fatalf("reported %v, want ns/a", found)
	}
	w.plan.Delete(a.Key)
	w.plan.Set(b)
	w.update(plan.Only(plan.Keys{a.Key: {}, b.Key: {}}))
	if found := w.see(); len(found) != 1 || found[0].Object != "Service ns/b" || w.count != 1 {
		t.Errorf("reported %v, and counted %d; want ns/b alone", found, w.count)
	}
	w.plan.Delete(b.Key)
	w.update(plan.Only(plan.Keys{b.Key: {}}))
	if found := w.see(); len(found) != 0 || w.count != 0 {
		t.Errorf("reported %v, and counted %d; want nothing for a Service that is gone", found, w.count)
	}
}

// TestRun finds what begins and ends by itself, and at once where the plan changes; and goes on after a failure.
func TestRun(t *testing.T) {
	if !node(t) {
		return
	}
	var mu sync.Mutex
	count, warned := -1, &strings.Builder{}
	w := newWatcher(func(c *Config) {
		c.Count = func(n int) { mu.Lock(); count = n; mu.Unlock() }
		c.Log = slog.New(slog.NewTextHandler(warned, nil))
	})
	w.period, w.gap = 50*time.Millisecond, 10*time.Millisecond
	failures := 3
	dump := w.dump
	w.dump = func(p plan.Protocol) ([]socket, error) {
		if failures--; failures >= 0 {
			return nil, errors.New("no sockets today")
		}
		return dump(p)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { w.Run(ctx); close(ended) }()
	until := func(want int) {
		t.Helper()
		for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
			mu.Lock()
			n := count
			mu.Unlock()
			if n == want {
				return
			}
			if time.Since(start) > time.Minute {
				t.Fatalf("counted %d after a minute, want %d", n, want)
			}
		}
	}
	w.Update(snapshotOf(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.NodePort, "", plan.TCP, 30080)})), plan.Everything())
	until(0)
	closeIt := listen(t, "tcp", ":30080")
	until(1)
	closeIt()
	until(0)
	cancel()
	<-ended
	if n := strings.Count(warned.String(), "no sockets today"); n != 1 {
		t.Errorf("warned %d times of one failure that lasted: %s", n, warned)
	}
}

// TestCurrent: those who ask at once, or soon after another, share one look at the sockets; later there is another one.
func TestCurrent(t *testing.T) {
	t.Parallel()
	var looks atomic.Int32
	w := newWatcher(func(*Config) {})
	w.keep = time.Hour
	w.own = func() map[uint32]bool { return nil }
	w.dump = func(plan.Protocol) ([]socket, error) {
		looks.Add(1)
		s := socket{}
		s.Addr, s.Port, s.Protocol = netip.MustParseAddr("0.0.0.0"), 30080, plan.TCP
		return []socket{s}, nil
	}
	p := snapshotOf(servicePort("web", plan.IPv4, []plan.Frontend{at(plan.ExternalIP, "10.0.0.6", plan.TCP, 30080)}))
	w.host = func([]string) ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.0.0.6")}, nil }
	w.Update(p, plan.Everything())
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if list := w.Current(); len(list) != 1 {
				t.Errorf("found %v", list)
			}
		})
	}
	all.Wait()
	if n := looks.Load(); n != 1 {
		t.Errorf("%d looks at the sockets for 20 who asked at once", n)
	}
	w.looked = time.Time{}
	w.Current()
	if n := looks.Load(); n != 2 {
		t.Errorf("%d looks at the sockets after a time", n)
	}
}
