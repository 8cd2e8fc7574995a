package e2e

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/harness"
)

// clusterIP, nodePort, vip and externalIP are the frontends of the Service with this number.
func clusterIP(number, family int) netip.AddrPort {
	return netip.AddrPortFrom(harness.AddressesOf(number).ClusterIP(family), harness.ServicePort)
}

func vip(number, family int) netip.AddrPort {
	return netip.AddrPortFrom(harness.AddressesOf(number).VIP(family), harness.ServicePort)
}

func externalIP(number, family int) netip.AddrPort {
	return netip.AddrPortFrom(harness.AddressesOf(number).ExternalIP(family), harness.ServicePort)
}

func nodePort(addr netip.Addr, number int) netip.AddrPort {
	return netip.AddrPortFrom(addr, harness.AddressesOf(number).NodePort)
}

// frontends are all frontends of a Service, the node port at node1's primary address as the second.
func frontends(w *harness.World, number, family int) []netip.AddrPort {
	return []netip.AddrPort{
		clusterIP(number, family), nodePort(w.Node1().IP(family), number), vip(number, family), externalIP(number, family)}
}

// fallOutOfStep waits for a random time before requests that usually need not be made. Where two clients ask in turns, and the endpoints take turns,
// too, each client would get the same one for ever.
func fallOutOfStep(request int) {
	if request >= leastRequests {
		time.Sleep(rand.N(10 * time.Millisecond)) // It only makes the order of requests random.
	}
}

// serversOf asks until all wanted servers have answered, and a few times more than that would take by chance, and
// returns an error if another one answers, one of them never does, or a request fails.
func serversOf(client *harness.Host, network string, to netip.AddrPort, want ...string) error {
	seen := map[string]int{}
	for i := 0; i < mostRequests && (i < leastRequests || len(seen) < len(want)); i++ {
		fallOutOfStep(i)
		a := client.Ask(network, to, harness.Patient)
		if a.Outcome != harness.Answered || !slices.Contains(want, a.Server) {
			return fmt.Errorf("%s from %s to %s, request %d: %v, want an answer from one of %v",
				network, client.Name, to, i+1, a, want)
		}
		seen[a.Server]++
	}
	if len(seen) < len(want) {
		return fmt.Errorf("%s from %s to %s: answers from %v, want all of %v", network, client.Name, to, seen, want)
	}
	return nil
}

// together runs checks at the same time: most of them only wait.
func together(checks ...func()) {
	var wait sync.WaitGroup
	for _, check := range checks {
		wait.Go(check)
	}
	wait.Wait()
}

// wantServers is serversOf over TCP and UDP.
func wantServers(t *testing.T, client *harness.Host, to netip.AddrPort, want ...string) {
	t.Helper()
	for _, network := range networks {
		assert.NoError(t, serversOf(client, network, to, want...))
	}
}

// wantOutcome makes one request over TCP and UDP each and checks how it ends.
func wantOutcome(t *testing.T, client *harness.Host, to netip.AddrPort, want harness.Outcome) {
	t.Helper()
	timeout := harness.Patient
	if want == harness.TimedOut {
		timeout = harness.Brief
	}
	ask := func(network string) {
		if a := client.Ask(network, to, timeout); a.Outcome != want {
			t.Errorf("%s from %s to %s: %v, want %s", network, client.Name, to, a, want)
		}
	}
	together(func() { ask("tcp") }, func() { ask("udp") })
}

// wantNobody makes one request over TCP and UDP each to an address that no machine has. The network says so, or nothing.
func wantNobody(t *testing.T, client *harness.Host, to netip.AddrPort) {
	t.Helper()
	ask := func(network string) {
		if a := client.Ask(network, to, harness.Brief); a.Outcome != harness.TimedOut && a.Outcome != harness.Unreachable {
			t.Errorf("%s from %s to %s: %v, want no answer", network, client.Name, to, a)
		}
	}
	together(func() { ask("tcp") }, func() { ask("udp") })
}

// wantSource makes requests over TCP and UDP and checks the client's address as the servers saw it.
func wantSource(t *testing.T, client *harness.Host, to netip.AddrPort, want netip.Addr) {
	t.Helper()
	for _, network := range networks {
		if a := client.Ask(network, to, harness.Patient); a.Outcome != harness.Answered || a.Source != want {
			t.Errorf("%s from %s to %s: %v, want an endpoint to see %s", network, client.Name, to, a, want)
		}
	}
}

// eventually is until, and waits for the end of the sync that did it: what comes next may ask for something else that the same sync does.
func eventually(t *testing.T, what string, check func() error) time.Duration {
	t.Helper()
	took := until(t, what, check)
	harness.Settle(t)
	return took
}

// until repeats a check until it succeeds, and fails the test if it doesn't within harness.Limit. It returns how long that took.
func until(t *testing.T, what string, check func() error) time.Duration {
	t.Helper()
	for start := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		err := check()
		if err == nil {
			return time.Since(start)
		}
		if time.Since(start) > harness.Limit {
			t.Fatalf("%s, still not after %v: %v", what, harness.Limit, err)
		}
	}
}

// answers returns a check that one TCP request is answered by one of the servers.
func answers(client *harness.Host, to netip.AddrPort, servers ...string) func() error {
	return func() error { return answered(client, to, harness.Brief, servers) }
}

// answersNow checks that one of the servers answers a TCP request, however long it takes.
func answersNow(client *harness.Host, to netip.AddrPort, servers ...string) error {
	return answered(client, to, harness.Patient, servers)
}

func answered(client *harness.Host, to netip.AddrPort, timeout time.Duration, servers []string) error {
	if a := client.Ask("tcp", to, timeout); a.Outcome != harness.Answered || !slices.Contains(servers, a.Server) {
		return fmt.Errorf("%s from %s: %v, want one of %v", to, client.Name, a, servers)
	}
	return nil
}

// ends returns a check that one TCP request ends in a certain way.
func ends(client *harness.Host, to netip.AddrPort, want harness.Outcome) func() error {
	timeout := harness.Brief
	if want == harness.Refused {
		timeout = harness.Patient // the ICMPv6 error for the first SYN is lost if the kernel still has its socket in hand
	}
	return func() error {
		if a := client.Ask("tcp", to, timeout); a.Outcome != want {
			return fmt.Errorf("%s from %s: %v, want %s", to, client.Name, a, want)
		}
		return nil
	}
}

// more waits until each load has made n requests more.
func more(t *testing.T, n int, loads ...*harness.Load) {
	t.Helper()
	for _, l := range loads {
		want := l.Requests() + n
		eventually(t, "requests", func() error { return requestsMade(l, want) })
	}
}

// aWhile is how many requests of each load tests let pass before and after something that must not disturb them.
const aWhile = 20

// noFailures ends a load, not before it has made enough requests to show anything, and fails the test if one of them failed.
func noFailures(t *testing.T, loads ...*harness.Load) {
	t.Helper()
	for _, l := range loads {
		eventually(t, "requests", func() error { return requestsMade(l, 50) })
		l.Stop()
		t.Logf("load: %s", l)
		if failed := l.Failures(); len(failed) > 0 {
			t.Errorf("%d of %d requests failed, the first, of %s, with %v", len(failed), l.Requests(),
				failed[0].Begun.UTC().Format("15:04:05.000"), failed[0])
		}
	}
}

// spread asks n times over TCP and returns how often each server answered.
func spread(t *testing.T, client *harness.Host, to netip.AddrPort, n int) map[string]int {
	t.Helper()
	seen := map[string]int{}
	for range n {
		a := client.Ask("tcp", to, harness.Patient)
		if a.Outcome != harness.Answered {
			t.Errorf("%s from %s: %v", to, client.Name, a)
			return seen
		}
		seen[a.Server]++
	}
	return seen
}

// deleted is when an object that is shutting down was deleted.
func deleted() *metav1.Time { return &metav1.Time{Time: time.Unix(1700000000, 0).UTC()} }

var endpointSliceType = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}

// sliceOf is the metadata of a slice for a Service.
func sliceOf(service, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: harness.Namespace, Name: name, Labels: map[string]string{"kubernetes.io/service-name": service}}
}

// due returns from how many to how many of n independent picks a choice may have that is made with probability p. A count is outside with
// a probability that is so small that, of so many counts of a test, one is outside by chance once in 10⁹ runs at most.
func due(n int, p float64, counts int) (least, most int) {
	alarm := 1e-9 / 2 / float64(counts)
	logFactorial := func(k int) float64 { value, _ := math.Lgamma(float64(k + 1)); return value }
	probability := func(k int) float64 {
		return math.Exp(logFactorial(n) - logFactorial(k) - logFactorial(n-k) + float64(k)*math.Log(p) + float64(n-k)*math.Log1p(-p))
	}
	for below := probability(0); below < alarm; below += probability(least) {
		least++
	}
	most = n
	for above := probability(n); above < alarm; above += probability(most) {
		most--
	}
	return least, most
}

// TestDue compares with tables of the binomial distribution.
func TestDue(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		n           int
		p           float64
		least, most int
	}{
		{100, 0.5, 20, 80}, // 1.35e-10 below 20, 5.58e-10 up to 20
		{30, 0.5, 0, 30},   // 9.3e-10 for none
		{900, 1. / 3, 216, 388},
	} {
		if least, most := due(c.n, c.p, 1); least != c.least || most != c.most {
			t.Errorf("%d picks with probability %v: from %d to %d, want from %d to %d", c.n, c.p, least, most, c.least, c.most)
		}
	}
}
