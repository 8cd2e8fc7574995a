package health

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// hostAddresses reads this host's addresses from the kernel.
type hostAddresses interface {
	// list returns the addresses that sockets can be bound to now. Only link-local ones have a zone.
	list() ([]netip.Addr, error)
	// watch calls changed once when it begins to watch, and after each change, until ctx ends.
	watch(ctx context.Context, changed func())
}

// kernelAddresses are the addresses in the network namespace of the process.
type kernelAddresses struct{ host.Filter }

// newKernelAddresses leaves out the addresses of some interfaces.
func newKernelAddresses(except []string) kernelAddresses {
	return kernelAddresses{host.Filter{Except: except, LinkLocal: true}}
}

func (k kernelAddresses) list() ([]netip.Addr, error) {
	list, err := k.Addresses(plan.Families[:]...)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, a := range list {
		if a.Usable {
			out = append(out, zoned(a))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// zoned gives an address of a link a zone, without which no socket can be bound to it.
func zoned(a host.Address) netip.Addr {
	if a.Addr.Is6() && a.Addr.IsLinkLocalUnicast() {
		return a.Addr.WithZone(strconv.Itoa(a.Index))
	}
	return a.Addr
}

// calm is how long to wait after a change of the host's addresses, as several often change together.
const calm = 50 * time.Millisecond

// watchAgainAfter is the pause before another attempt to watch addresses.
const watchAgainAfter = time.Second

func (k kernelAddresses) watch(ctx context.Context, changed func()) {
	untilBegun(ctx, func() error { return k.Watch(ctx, calm, changed) })
}

// untilBegun calls watch until it returns no error, or ctx ends.
func untilBegun(ctx context.Context, watch func() error) {
	_ = wait.PollUntilContextCancel(ctx, watchAgainAfter, true, func(context.Context) (bool, error) { return watch() == nil, nil })
}

// listenAt is the address of one socket: a single address, or all of one family or of both.
type listenAt struct {
	network string // tcp for both families, tcp4 or tcp6
	addr    netip.Addr
}

// wildcard is every address of both families, at one socket; of IPv4 only if the kernel has no IPv6.
var wildcard = listenAt{network: "tcp", addr: netip.IPv4Unspecified()}

func (l listenAt) String() string {
	if l == wildcard {
		return "every address"
	}
	return l.addr.String()
}

// everywhere reports whether the sockets do not depend on the host's addresses.
func everywhere(at plan.NodePortAddresses) bool { return at.All(plan.IPv4) && at.All(plan.IPv6) }

// sockets returns where to listen so as to be reachable wherever node ports answer, in order; host are the host's addresses. Where node
// ports answer everywhere, that is one socket for both families, as with kube-proxy.
func sockets(at plan.NodePortAddresses, node plan.Node, host []netip.Addr) []listenAt {
	if everywhere(at) {
		return []listenAt{wildcard}
	}
	var out []listenAt
	for _, f := range plan.Families {
		network, all := "tcp4", netip.IPv4Unspecified()
		if f == plan.IPv6 {
			network, all = "tcp6", netip.IPv6Unspecified()
		}
		if at.All(f) {
			out = append(out, listenAt{network, all})
			continue
		}
		ranges := at.Ranges(f, node)
		for _, addr := range host {
			if slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(addr.WithZone("")) }) {
				out = append(out, listenAt{network, addr})
			}
		}
	}
	return out
}
