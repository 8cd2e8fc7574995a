package health

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// TestWatchRefused: a watch that cannot begin is tried again, until the end.
func TestWatchRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tries, refused := 0, errors.New("refused")
		untilBegun(t.Context(), func() error {
			if tries++; tries < 3 {
				return refused
			}
			return nil
		})
		if tries != 3 {
			t.Errorf("%d tries, want 3", tries)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		tries = 0
		untilBegun(ctx, func() error { tries++; return refused })
		if tries < 9 || tries > 11 {
			t.Errorf("%d tries in 10 seconds, want one a second", tries)
		}
	})
}

func TestZoned(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{
		"192.168.1.1": "192.168.1.1", "169.254.0.1": "169.254.0.1", "fd00::1": "fd00::1", "fe80::1": "fe80::1%7",
	} {
		if got := zoned(host.Address{Addr: netip.MustParseAddr(addr), Index: 7}); got.String() != want {
			t.Errorf("%s: %s, want %s", addr, got, want)
		}
	}
}

// failingHost fails to list its addresses until it is mended.
type failingHost struct{ mended chan struct{} }

func (h failingHost) list() ([]netip.Addr, error) {
	select {
	case <-h.mended:
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
	default:
		return nil, errors.New("netlink is out of order")
	}
}

func (h failingHost) watch(ctx context.Context, _ func()) { <-ctx.Done() }

// TestAddressesUnknown: sockets are opened once the addresses can be listed again, without anybody asking.
func TestAddressesUnknown(t *testing.T) {
	t.Parallel()
	host := failingHost{make(chan struct{})}
	b, number := newLive(t, onLoopback, func(s *Services) { s.host = host }), freePort(t)
	b.set(servicePort(svcA, "", plan.IPv4, number, "10.0.0.1:80+"))
	eventually(t, "the port fails", func() bool { _, failing := b.Ports(); return failing == 1 })
	close(host.mended)
	b.eventually("127.0.0.1", number, "200 1")
}
