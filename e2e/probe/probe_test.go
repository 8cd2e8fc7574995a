package probe

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
	s, err := Serve(server.Netns, port)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return client, server
}

func TestAsk(t *testing.T) {
	t.Parallel()
	client, server := newPods(t)
	nobody := netip.MustParseAddr("10.244.1.200")
	for name, p := range probers {
		for what, c := range map[string]struct {
			to    netip.AddrPort
			limit time.Duration
			want  netip.Addr
		}{
			"a server":    {netip.AddrPortFrom(server.IP4, port), harness.Limit, server.IP4},
			"no server":   {netip.AddrPortFrom(server.IP4, port+1), harness.Limit, netip.Addr{}},
			"no host":     {netip.AddrPortFrom(nobody, port), 100 * time.Millisecond, netip.Addr{}},
			"another pod": {netip.AddrPortFrom(client.IP4, port), harness.Limit, netip.Addr{}},
		} {
			err := client.Do(func() error {
				for range 10 {
					got, err := p.Ask(c.to, c.limit)
					if got != c.want || err != nil {
						t.Errorf("%s, %s: %s, %v, want %s", name, what, got, err, c.want)
						break
					}
				}
				return nil
			})
			assert.NoError(t, err)
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
			failed := make(chan error, 1)
			begun := time.Now()
			time.AfterFunc(later, func() {
				failed <- server.Take(netip.PrefixFrom(endpoint, 32))
			})
			var took time.Duration
			err := client.Do(func() (err error) {
				took, err = p.Await(begun, to, func(a netip.Addr) bool { return a == endpoint }, 2, time.Minute)
				return err
			})
			require.NoError(t, errors.Join(err, <-failed))
			if took < later {
				t.Errorf("seen after %v, and it was there after %v", took, later)
			}
			begun = time.Now()
			err = client.Do(func() error {
				_, err := p.Await(begun, to, func(netip.Addr) bool { return false }, 1, later)
				return err
			})
			if took := time.Since(begun); !errors.Is(err, ErrLate) || took < later {
				t.Errorf("an endpoint that never answers: %v after %v, want %v after %v", err, took, ErrLate, later)
			}
		})
	}
}
