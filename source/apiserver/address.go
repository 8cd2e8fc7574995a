package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// How often Location looks up the addresses of the API server: more often while they are unknown.
const (
	locateEvery   = 30 * time.Second
	locateUnknown = 2 * time.Second
)

// Location finds the addresses and the port of the API server, as far as the client's configuration tells them.
type Location struct {
	host   string
	port   uint16
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	log    *slog.Logger
}

// Location returns the Location of the client's API server.
func (c *Client) Location(log *slog.Logger) (*Location, error) {
	host, port, err := hostAndPort(c.server)
	if err != nil {
		return nil, fmt.Errorf("address of the API server: %w", err)
	}
	return &Location{host, port, func(ctx context.Context, host string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	}, log}, nil
}

// hostAndPort returns the host and port of a URL; the port defaults to that of the scheme.
func hostAndPort(server *url.URL) (string, uint16, error) {
	text := cmp.Or(server.Port(), map[string]string{"http": "80"}[server.Scheme], "443")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || server.Hostname() == "" {
		return "", 0, fmt.Errorf("%s names no host or no valid port", server)
	}
	return server.Hostname(), uint16(port), nil
}

// Addresses returns all current addresses of the API server's name, in order.
func (l *Location) Addresses(ctx context.Context) ([]netip.AddrPort, error) {
	addrs := []netip.Addr{}
	if addr, err := netip.ParseAddr(l.host); err == nil {
		addrs = append(addrs, addr)
	} else if addrs, err = l.lookup(ctx, l.host); err != nil {
		return nil, fmt.Errorf("looking up the API server's name %s: %w", l.host, err)
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		out = append(out, netip.AddrPortFrom(a.Unmap().WithZone(""), l.port))
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out), nil
}

// Follow calls moved with the addresses when it starts and whenever they change, until ctx ends. While the name can't be looked up,
// the last addresses stay.
func (l *Location) Follow(ctx context.Context, moved func([]netip.AddrPort)) {
	var last []netip.AddrPort
	for {
		now, err := l.Addresses(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			l.log.Debug("the addresses of the API server stay as they were", "error", err)
		case err == nil && !slices.Equal(now, last):
			last = now
			moved(now)
		}
		wait := locateEvery
		if last == nil {
			wait = locateUnknown
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
