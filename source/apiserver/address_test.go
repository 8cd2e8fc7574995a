package apiserver

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
)

// TestLocation: which addresses and port a URL leads to, whatever form it has.
func TestLocation(t *testing.T) {
	t.Parallel()
	names := map[string][]netip.Addr{"api.example": {netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.1"),
		netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("::ffff:192.0.2.1")}}
	for server, want := range map[string][]string{
		"https://192.0.2.7:6443":                    {"192.0.2.7:6443"},
		"https://192.0.2.7":                         {"192.0.2.7:443"},
		"http://192.0.2.7":                          {"192.0.2.7:80"},
		"192.0.2.7:8080":                            {"192.0.2.7:8080"},
		"https://[2001:db8::7]:6443/":               {"[2001:db8::7]:6443"},
		"https://api.example:6443/k8s/clusters/c-1": {"192.0.2.1:6443", "192.0.2.2:6443", "[2001:db8::1]:6443"},
	} {
		c, err := newClient(&rest.Config{Host: server})
		if err != nil {
			t.Errorf("%s: %v", server, err)
			continue
		}
		l, err := c.Location(slog.New(slog.DiscardHandler))
		if err != nil {
			t.Errorf("%s: %v", server, err)
			continue
		}
		l.lookup = func(_ context.Context, host string) ([]netip.Addr, error) { return names[host], nil }
		got, err := l.Addresses(t.Context())
		if err != nil || !slices.EqualFunc(got, want, func(a netip.AddrPort, b string) bool { return a.String() == b }) {
			t.Errorf("%s is at %v, %v; want %v", server, got, err, want)
		}
	}
}

// TestFollow: changed addresses are reported, and a name that cannot be looked up for a while keeps those that it had.
func TestFollow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		first, second := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		begin := time.Now()
		l := &Location{host: "api.example", port: 6443, log: slog.New(slog.DiscardHandler)}
		l.lookup = func(context.Context, string) ([]netip.Addr, error) {
			switch passed := time.Since(begin); {
			case passed < 3*time.Second || passed > time.Minute && passed < 3*time.Minute:
				return nil, errors.New("no answer")
			case passed < 3*time.Minute:
				return []netip.Addr{first}, nil
			}
			return []netip.Addr{second}, nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		var got []string
		l.Follow(ctx, func(list []netip.AddrPort) {
			for _, a := range list {
				got = append(got, a.String())
			}
		})
		if want := []string{"192.0.2.1:6443", "192.0.2.2:6443"}; !slices.Equal(got, want) {
			t.Errorf("reported %v, want %v", got, want)
		}
	})
}
