package health

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// TestNotificationsBreakOff: when they do, as after an overrun of the socket, or can't be had at all, they are asked for again,
// and what happened meanwhile is not missed.
func TestNotificationsBreakOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		subscriptions, told := 0, 0
		k := kernelAddresses{subscribe: func(updates chan<- netlink.AddrUpdate, done <-chan struct{}) error {
			subscriptions++
			if subscriptions == 1 {
				return errors.New("refused")
			}
			n := subscriptions
			go func() {
				defer close(updates)
				updates <- netlink.AddrUpdate{}
				if n > 2 {
					<-done
				}
			}()
			return nil
		}}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		k.watch(ctx, func() { told++ })
		if subscriptions != 3 || told != 4 {
			t.Errorf("%d subscriptions, told %d times; want 3, 4", subscriptions, told)
		}
	})
}

func TestUsable(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		ip    string
		flags int
		want  string
	}{
		{"192.168.1.1", unix.IFA_F_PERMANENT, "192.168.1.1"},
		{"::ffff:192.168.1.1", 0, "192.168.1.1"},
		{"fd00::1", 0, "fd00::1"},
		{"fe80::1", 0, "fe80::1%7"},
		{"fd00::1", unix.IFA_F_TENTATIVE, "none"},
		{"fd00::1", unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC, "fd00::1"},
		{"fd00::1", unix.IFA_F_DADFAILED, "none"},
	} {
		got := "none"
		ip := net.ParseIP(tc.ip)
		if ip, ok := usable(netlink.Addr{IPNet: &net.IPNet{IP: ip}, Flags: tc.flags, LinkIndex: 7}); ok {
			got = ip.String()
		}
		if got != tc.want {
			t.Errorf("%s with flags %#x: %s, want %s", tc.ip, tc.flags, got, tc.want)
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
