package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/source"
)

var (
	svcA = plan.Service{Namespace: "ns", Name: "a"}
	svcB = plan.Service{Namespace: "ns", Name: "b"}
)

// onLoopback keeps these tests from listening anywhere else.
var onLoopback = plan.Settings{NodePortAddresses: plan.NodePortAddresses{
	CIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
}}

// servicePort makes a ServicePort under policy Local. An endpoint is ADDRESS:PORT, with + behind it if it runs on this node, and
// with - if it shuts down there.
func servicePort(svc plan.Service, name string, f plan.Family, health uint16, endpoints ...string) *plan.ServicePort {
	sp := &plan.ServicePort{Key: plan.Key{Service: svc, Port: name, Protocol: plan.TCP, Family: f}, ExternalPolicy: plan.Local}
	if health != 0 {
		sp.Frontends = []plan.Frontend{{Kind: plan.HealthCheckNodePort, Protocol: plan.TCP, Port: health}}
	}
	for _, text := range endpoints {
		addr := strings.TrimRight(text, "+-")
		ep := plan.Endpoint{Addr: netip.MustParseAddrPort(addr), Local: addr != text, Terminating: strings.HasSuffix(text, "-")}
		sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, ep)
		if ep.Local {
			sp.Endpoints.Local = append(sp.Endpoints.Local, ep)
		}
	}
	return sp
}

// live is a Services that runs, and a plan for it.
type live struct {
	*Services
	t        testing.TB
	plan     *plan.Plan
	healthy  atomic.Bool
	mu       sync.Mutex
	findings []string
}

func newLive(t testing.TB, settings plan.Settings, change ...func(*Services)) *live {
	b := &live{t: t, plan: plan.New(plan.Node{Name: "me"}, settings)}
	b.healthy.Store(true)
	b.Services = NewServices(ServicesConfig{Healthy: b.healthy.Load,
		Report: func(f source.Finding) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.findings = append(b.findings, f.String())
		}})
	for _, c := range change {
		c(b.Services)
	}
	b.Update(b.plan, plan.Everything())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return b
}

// set puts ServicePorts into the plan and updates with their keys.
func (b *live) set(sps ...*plan.ServicePort) {
	changed := plan.Keys{}
	for _, sp := range sps {
		b.plan.Set(sp)
		changed.Add(sp.Key)
	}
	b.Update(b.plan, plan.Only(changed))
}

func (b *live) remove(key plan.Key) {
	b.plan.Delete(key)
	b.Update(b.plan, plan.Only(plan.Keys{key: {}}))
}

func (b *live) reported() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.findings...)
}

// answer is "CODE WEIGHT", or what went wrong.
func answer(at string, port uint16) string {
	code, header, _, err := get("http://" + net.JoinHostPort(at, fmt.Sprint(port)) + "/")
	if err != nil {
		return "no answer"
	}
	return fmt.Sprint(code, " ", header.Get("X-Load-Balancing-Endpoint-Weight"))
}

func (b *live) eventually(at string, port uint16, want string) {
	b.t.Helper()
	got := ""
	eventually(b.t, fmt.Sprintf("%s port %d: %s", at, port, want), func() bool {
		got = answer(at, port)
		return got == want
	})
}

// ports counts those that freePort has tried.
var ports atomic.Uint32

// freePort returns a port that is free. It is below those that the kernel gives to clients, of which other tests have hundreds; and
// no two tests get the same.
func freePort(t testing.TB) uint16 {
	const first, last = 12000, 30000
	for range last - first {
		port := uint16(first + (uint32(os.Getpid())*100+ports.Add(1))%(last-first))
		if l, err := net.Listen("tcp", fmt.Sprintf(":%d", port)); err == nil && nstest.Close(l) == nil {
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// freeAddress returns an address on loopback with such a port.
func freeAddress(t testing.TB) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), freePort(t))
}

// newServices returns a Services that a test runs step by step, and that is to report nothing.
func newServices(t testing.TB) *Services {
	s := NewServices(ServicesConfig{Healthy: func() bool { return true },
		Report: func(f source.Finding) { t.Error(f) }})
	t.Cleanup(s.closeAll)
	return s
}

func TestServiceAnswer(t *testing.T) {
	t.Parallel()
	b, number := newLive(t, onLoopback), freePort(t)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+", "10.0.0.2:80+", "10.0.0.3:80"))
	b.eventually("127.0.0.1", number, "200 2")
	check := func(code int, weight, healthy string) {
		t.Helper()
		c, header, body, err := get(fmt.Sprintf("http://127.0.0.1:%d/any/path", number))
		want := "{\n\t\"service\": {\n\t\t\"namespace\": \"ns\",\n\t\t\"name\": \"a\"\n\t},\n\t\"localEndpoints\": " + weight +
			",\n\t\"serviceProxyHealthy\": " + healthy + "\n}"
		if err != nil || c != code || body != want {
			t.Errorf("%d %v %s\nwant %d %s", c, err, body, code, want)
		}
		for name, want := range map[string]string{"Content-Type": "application/json", "X-Content-Type-Options": "nosniff",
			"X-Load-Balancing-Endpoint-Weight": weight} {
			if header.Get(name) != want {
				t.Errorf("%s is %q, want %q", name, header.Get(name), want)
			}
		}
	}
	check(200, "2", "true")
	b.healthy.Store(false)
	check(503, "2", "false")
	b.healthy.Store(true)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.3:80"))
	check(503, "0", "true")
}

// TestLocalEndpoints: what counts as an endpoint on this node, by family.
func TestLocalEndpoints(t *testing.T) {
	t.Parallel()
	const hc = 30000
	for _, tc := range []struct {
		name         string
		ports        []*plan.ServicePort
		number       uint16
		over4, over6 int
	}{
		{"no health check node port", []*plan.ServicePort{servicePort(svcA, "", plan.IPv4, 0, "10.0.0.1:80+")}, 0, 0, 0},
		{"none here", []*plan.ServicePort{servicePort(svcA, "", plan.IPv4, hc, "10.0.0.1:80")}, hc, 0, 0},
		{"those that shut down", []*plan.ServicePort{servicePort(svcA, "", plan.IPv4, hc, "10.0.0.1:80-", "10.0.0.2:80-")}, hc, 0, 0},
		{"two ports of one endpoint, and one more", []*plan.ServicePort{
			servicePort(svcA, "x", plan.IPv4, hc, "10.0.0.1:80+"),
			servicePort(svcA, "y", plan.IPv4, 0, "10.0.0.1:81+", "10.0.0.2:81+"),
		}, hc, 2, 2},
		{"two families", []*plan.ServicePort{
			servicePort(svcA, "", plan.IPv4, hc, "10.0.0.1:80+"),
			servicePort(svcA, "", plan.IPv6, hc, "[fd00::1]:80+", "[fd00::2]:80+"),
		}, hc, 1, 2},
		{"IPv6 only", []*plan.ServicePort{servicePort(svcA, "", plan.IPv6, hc, "[fd00::1]:80+")}, hc, 1, 1},
		{"two families, endpoints in one", []*plan.ServicePort{
			servicePort(svcA, "", plan.IPv4, hc, "10.0.0.1:80+"), servicePort(svcA, "", plan.IPv6, hc),
		}, hc, 1, 0},
		{"another Service's", []*plan.ServicePort{
			servicePort(svcA, "", plan.IPv4, hc), servicePort(svcB, "", plan.IPv4, 0, "10.0.0.1:80+"),
		}, hc, 0, 0},
	} {
		p := plan.New(plan.Node{}, plan.Settings{})
		for _, sp := range tc.ports {
			p.Set(sp)
		}
		number, count := readPort(p, svcA)
		over4, over6 := count.over(plan.IPv4), count.over(plan.IPv6)
		if number != tc.number || over4 != tc.over4 || over6 != tc.over6 {
			t.Errorf("%s: port %d, %d over IPv4, %d over IPv6; want %d, %d, %d", tc.name, number, over4, over6, tc.number,
				tc.over4, tc.over6)
		}
	}
	// Endpoints under policy Local have not been chosen: nothing from outside reaches the port yet.
	sp := servicePort(svcA, "", plan.IPv4, hc, "10.0.0.1:80+", "10.0.0.2:80")
	sp.Endpoints.Local = nil
	p := plan.New(plan.Node{}, plan.Settings{})
	p.Set(sp)
	if _, count := readPort(p, svcA); count.over(plan.IPv4) != 1 {
		t.Errorf("%d endpoints without those of policy Local", count.over(plan.IPv4))
	}
}

// TestFamilies: whoever comes over a family is answered with the endpoints of that family, and refused where the Service has only the
// other, as at its node ports. The Service may get or lose a family.
func TestFamilies(t *testing.T) {
	t.Parallel()
	b, one, two := newLive(t, onLoopback), freePort(t), freePort(t)
	more := servicePort(svcB, "", plan.IPv6, two, "[fd00::1]:80+", "[fd00::2]:80+")
	b.set(servicePort(svcA, "", plan.IPv6, one, "[fd00::1]:80+"), servicePort(svcB, "", plan.IPv4, two, "10.0.0.1:80+"), more)
	b.eventually("::1", one, "200 1")
	b.eventually("127.0.0.1", one, "no answer")
	b.eventually("127.0.0.1", two, "200 1")
	b.eventually("::1", two, "200 2")
	b.remove(more.Key)
	b.eventually("::1", two, "no answer")
	b.eventually("127.0.0.1", two, "200 1")
	b.set(more)
	b.eventually("::1", two, "200 2")
	eventually(t, "none is failing", func() bool { _, failing := b.Ports(); return failing == 0 })
}

func TestPortsComeAndGo(t *testing.T) {
	t.Parallel()
	b, one, two := newLive(t, onLoopback), freePort(t), freePort(t)
	spA := servicePort(svcA, "", plan.IPv4, one, "10.0.0.1:80+")
	b.set(spA)
	b.eventually("127.0.0.1", one, "200 1")
	b.set(servicePort(svcA, "", plan.IPv4, two, "10.0.0.1:80+"))
	b.eventually("127.0.0.1", two, "200 1")
	b.eventually("127.0.0.1", one, "no answer")

	// One Service's port becomes another's, in one step.
	b.plan.Set(servicePort(svcA, "", plan.IPv4, one, "10.0.0.1:80+"))
	b.plan.Set(servicePort(svcB, "", plan.IPv4, two, "10.0.0.1:80+", "10.0.0.2:80+"))
	b.Update(b.plan, plan.Everything())
	b.eventually("127.0.0.1", one, "200 1")
	b.eventually("127.0.0.1", two, "200 2")
	eventually(t, "two ports, and none is failing", func() bool { all, failing := b.Ports(); return all == 2 && failing == 0 })
	b.remove(spA.Key)
	b.eventually("127.0.0.1", one, "no answer")
	b.plan.Delete(spA.Key)
	b.plan.Delete(plan.Key{Service: svcB, Protocol: plan.TCP, Family: plan.IPv4})
	b.Update(b.plan, plan.Everything())
	b.eventually("127.0.0.1", two, "no answer")
	if got := b.reported(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
}

// TestCountsKeepTheSocket: a change of endpoints does not even break a connection that is kept open.
func TestCountsKeepTheSocket(t *testing.T) {
	t.Parallel()
	b, number := newLive(t, onLoopback), freePort(t)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"))
	b.eventually("127.0.0.1", number, "200 1")
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", number))
	require.NoError(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	buf := make([]byte, 4096)
	request := func() string {
		if _, err := fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return err.Error()
		}
		n, err := c.Read(buf)
		return fmt.Sprintf("%s %v", buf[:n], err)
	}
	for i := range 5 {
		var endpoints []string
		for j := range i {
			endpoints = append(endpoints, fmt.Sprintf("10.0.0.%d:80+", j+1))
		}
		b.set(servicePort(svcA, "", plan.IPv4, number, endpoints...))
		if i == 3 {
			b.Update(b.plan, plan.Everything())
		}
		if got := request(); !strings.Contains(got, fmt.Sprintf("\"localEndpoints\": %d,", i)) {
			t.Fatalf("with %d endpoints: %s", i, got)
		}
	}
	b.remove(plan.Key{Service: svcA, Protocol: plan.TCP, Family: plan.IPv4})
	if _, err := c.Read(buf); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection outlives the port: %v", err)
	}
}

// TestPortThatIsTaken: a port in use is reported once, and others work; it is opened when it becomes free.
func TestPortThatIsTaken(t *testing.T) {
	t.Parallel()
	b, free := newLive(t, onLoopback), freePort(t)
	other, addr := taken(t)
	b.set(servicePort(svcA, "", plan.IPv4, addr.Port(), "10.0.0.1:80+"), servicePort(svcA, "", plan.IPv6, addr.Port(), "[fd00::1]:80+"),
		servicePort(svcB, "", plan.IPv4, free, "10.0.0.1:80+"))
	b.eventually("127.0.0.1", free, "200 1")
	want := fmt.Sprintf("Service ns/a: spec.healthCheckNodePort: can't listen on port %d at 127.0.0.1: bind: address already"+
		" in use; load balancers that ask there take this node for one without endpoints; listening is retried until it works", addr.Port())
	eventually(t, "a finding", func() bool { return len(b.reported()) > 0 })
	b.eventually("::1", addr.Port(), "200 1") // where it is free
	b.Update(b.plan, plan.Everything())
	time.Sleep(lastRetry + 200*time.Millisecond) // It tries once more, and is to say nothing.
	if got := b.reported(); len(got) != 1 || got[0] != want {
		t.Errorf("reported %q, want %q", got, want)
	}
	if _, failing := b.Ports(); failing != 1 {
		t.Errorf("%d ports failing", failing)
	}
	if !b.Held(svcA) || b.Held(svcB) {
		t.Errorf("held: %t and %t, want the first alone", b.Held(svcA), b.Held(svcB))
	}
	other.Close()
	b.eventually("127.0.0.1", addr.Port(), "200 1")
	eventually(t, "none is failing", func() bool { _, failing := b.Ports(); return failing == 0 })
}

// listens waits until every port listens: a program that another test starts may hold the socket that was there for a moment.
func (s *Services) listens(t *testing.T) {
	t.Helper()
	eventually(t, "every port listens", func() bool { s.reconcile(); return s.failing.Load() == 0 })
}

// TestPortOfAnotherService: where two Services have one port, the second gets it at once when the first goes.
func TestPortOfAnotherService(t *testing.T) {
	t.Parallel()
	s, number := newServices(t), freePort(t)
	s.cfg.Report = func(source.Finding) {} // A machine that is slow enough gives it time to report the second.
	p := plan.New(plan.Node{}, onLoopback)
	first, second := servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"), servicePort(svcB, "", plan.IPv4, number, "10.0.0.1:80+", "10.0.0.2:80+")
	update := func() {
		s.Update(p, plan.Only(plan.Keys{first.Key: {}, second.Key: {}}))
		s.reconcile()
	}
	p.Set(first)
	s.Update(p, plan.Everything())
	s.reconcile()
	p.Set(second)
	update()
	if _, failing := s.Ports(); failing != 1 || answer("127.0.0.1", number) != "200 1" {
		t.Errorf("%d ports failing, and the first Service's says %q", failing, answer("127.0.0.1", number))
	}
	p.Delete(first.Key)
	update()
	s.listens(t)
	if got := answer("127.0.0.1", number); got != "200 2" {
		t.Errorf("the second Service's says %q", got)
	}
}

// TestPortsWhileProgramsStart: a port that another Service had until now can be opened at once, though a process that is just being
// started holds the sockets of this one until its program runs.
func TestPortsWhileProgramsStart(t *testing.T) {
	t.Parallel()
	s, number := newServices(t), freePort(t)
	ctx, cancel := context.WithCancel(t.Context())
	var starting sync.WaitGroup
	defer starting.Wait()
	defer cancel()
	starting.Go(func() {
		for ctx.Err() == nil {
			assert.NoError(t, exec.Command("true").Run())
		}
	})
	p := plan.New(plan.Node{}, onLoopback)
	here, there := servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"), servicePort(svcB, "", plan.IPv4, number, "10.0.0.1:80+")
	for range 100 {
		p.Delete(there.Key)
		p.Set(here)
		s.Update(p, plan.Everything())
		s.listens(t)
		here, there = there, here
	}
}

// TestLostSocket: a socket that ends by itself is opened again.
func TestLostSocket(t *testing.T) {
	t.Parallel()
	s, number := newServices(t), freePort(t)
	p := plan.New(plan.Node{}, onLoopback)
	p.Set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"))
	p.Set(servicePort(svcA, "", plan.IPv6, number, "[fd00::1]:80+"))
	s.Update(p, plan.Everything())
	<-s.wake
	for range 2 {
		// The port's two sockets end one after the other, so that one wake may come before the second has.
		eventually(t, "an answer at both addresses", func() bool {
			s.reconcile()
			return answer("127.0.0.1", number) == "200 1" && answer("::1", number) == "200 1"
		})
		for _, socket := range s.byName[svcA].open {
			socket.Listener.Close() // as if the kernel had
		}
		<-s.wake
	}
}

func TestSockets(t *testing.T) {
	t.Parallel()
	host := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.168.1.10"), netip.MustParseAddr("10.1.0.1"),
		netip.MustParseAddr("::1"), netip.MustParseAddr("fd00::10"), netip.MustParseAddr("fe80::1%2")}
	node := plan.Node{IPs: []netip.Addr{netip.MustParseAddr("192.168.1.10"), netip.MustParseAddr("fd00::10")}}
	both, ipv4, ipv6 := plan.Families[:], plan.Families[:1], plan.Families[1:]
	for _, tc := range []struct {
		name     string
		primary  bool
		cidrs    string
		families []plan.Family
		want     string
	}{
		{"everywhere", false, "", both, "[every address]"},
		{"everywhere, one family", false, "", ipv4, "[every address]"},
		{"everywhere, said", false, "0.0.0.0/0 ::/0", both, "[every address]"},
		{"one family, said", false, "0.0.0.0/0", both, "[every address]"},
		{"one family, and some of the other", false, "0.0.0.0/0 fd00::/8", both, "[0.0.0.0 fd00::10]"},
		{"one family, and not the other", false, "0.0.0.0/0 fd00::/8", ipv4, "[0.0.0.0]"},
		{"ranges", false, "192.168.0.0/16 10.0.0.0/8", both, "[192.168.1.10 10.1.0.1 ::]"},
		{"ranges, and the other family", false, "192.168.0.0/16 10.0.0.0/8", ipv6, "[::]"},
		{"link-local", false, "fe80::/10", both, "[0.0.0.0 fe80::1%2]"},
		{"primary", true, "", both, "[192.168.1.10 fd00::10]"},
		{"primary, IPv4", true, "", ipv4, "[192.168.1.10]"},
		{"primary, IPv6", true, "", ipv6, "[fd00::10]"},
		{"nowhere", false, "203.0.113.0/24 2001:db8::/32", both, "[]"},
	} {
		at := plan.NodePortAddresses{Primary: tc.primary}
		for _, c := range strings.Fields(tc.cidrs) {
			at.CIDRs = append(at.CIDRs, netip.MustParsePrefix(c))
		}
		p := newPort(svcA, 1, ServicesConfig{}, nil)
		p.count.Store(&localEndpoints{})
		for _, f := range tc.families {
			(*p.count.Load())[f] = 0
		}
		if got := fmt.Sprint(p.places(sockets(at, node, host))); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// BenchmarkUpdate is one Service of 10,000 that has changed.
func BenchmarkUpdate(b *testing.B) {
	p := plan.New(plan.Node{}, plan.Settings{})
	for i := range 10_000 {
		svc := plan.Service{Namespace: "ns", Name: fmt.Sprint("s", i)}
		p.Set(servicePort(svc, "", plan.IPv4, uint16(20_000+i), "10.0.0.1:80+", "10.0.0.2:80"))
	}
	s := newServices(b)
	s.Update(p, plan.Everything())
	changed := plan.Keys{{Service: plan.Service{Namespace: "ns", Name: "s5000"}, Protocol: plan.TCP, Family: plan.IPv4}: {}}
	for b.Loop() {
		s.Update(p, plan.Only(changed))
	}
}
