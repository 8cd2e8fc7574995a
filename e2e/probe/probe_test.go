package probe

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"nodeproxy/e2e/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

const port = 8080

func often(time.Duration) time.Duration { return time.Millisecond }

// probers are one for each way to make a connection.
var probers = map[string]Prober{
	"blocking": {Connect: ConnectBlocking, Handshake: 30 * time.Millisecond, Pause: often},
	"looking":  {Connect: ConnectLooking, Handshake: 2 * time.Millisecond, Pause: often},
}

// newPods makes two pods on a node; the second one is a server.
func newPods(t *testing.T) (client, server *harness.Pod) {
	t.Helper()
	w := harness.New(t, harness.Options{Pods: []int{2}, Ports: []uint16{}})
	client, server = w.Pod("n1a"), w.Pod("n1b")
	s, err := Serve(server.Netns, port, Greet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return client, server
}

func TestAsk(t *testing.T) {
	t.Parallel()
	client, server := newPods(t)
	nobody := netip.MustParseAddr("10.244.1.200")
	for name, p := range probers {
		for what, c := range map[string]struct {
			to   netip.AddrPort
			want Answer
		}{
			"a server":    {netip.AddrPortFrom(server.IP4, port), Answer{Endpoint: server.IP4, Client: client.IP4}},
			"no server":   {netip.AddrPortFrom(server.IP4, port+1), Answer{Refused: true}},
			"no host":     {netip.AddrPortFrom(nobody, port), Answer{}},
			"another pod": {netip.AddrPortFrom(client.IP4, port), Answer{Refused: true}},
		} {
			err := client.Do(func() error {
				for range 10 {
					got, err := p.Ask(c.to, 100*time.Millisecond)
					if got != c.want || err != nil {
						t.Errorf("%s, %s: %+v, %v, want %+v", name, what, got, err, c.want)
						break
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// TestAwait: an endpoint that answers later is seen then, and one that never does is given up.
func TestAwait(t *testing.T) {
	t.Parallel()
	for name, p := range probers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const later = 200 * time.Millisecond
			client, server := newPods(t)
			endpoint := netip.MustParseAddr("10.128.0.1")
			to := netip.AddrPortFrom(endpoint, port)
			var effective time.Time // from here on, or some time before
			failed := make(chan error, 1)
			begun := time.Now()
			time.AfterFunc(later, func() {
				err := server.Take(netip.PrefixFrom(endpoint, 32))
				effective = time.Now()
				failed <- err
			})
			var took time.Duration
			err := client.Do(func() (err error) {
				took, err = p.Await(begun, to, func(a netip.Addr) bool { return a == endpoint }, 2, time.Minute)
				return err
			})
			if err := errors.Join(err, <-failed); err != nil {
				t.Fatal(err)
			}
			if latest := effective.Sub(begun) + 10*later; took < later || took > latest {
				t.Errorf("seen after %v, want from %v to %v", took, later, latest)
			}
			begun = time.Now()
			err = client.Do(func() error {
				_, err := p.Await(begun, to, func(netip.Addr) bool { return false }, 1, later)
				return err
			})
			if took := time.Since(begun); !errors.Is(err, ErrLate) || took < later || took > 50*later {
				t.Errorf("an endpoint that never answers: %v after %v, want %v after %v", err, took, ErrLate, later)
			}
		})
	}
}
