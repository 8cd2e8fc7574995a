package ipvs

import (
	"context"
	"net/netip"

	"k8s.io/apimachinery/pkg/util/sets"

	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// machine is what an engine uses of the node. ipvs.Servers, ipset.Sets and host.Device implement its parts.
type machine struct {
	servers servers
	sets    ipsets
	device  device
	tables  tables
	guard   guard     // nil if the kernel has no nftables
	ports   portTable // nil if Options.WholeAddresses is set
	// host lists the addresses of all other interfaces.
	host func(plan.Family) (sets.Set[netip.Addr], error)
	// reader opens what reads beside syncs, which use servers and sets.
	reader func() (*reader, error)
}

// reader reads virtual servers and sets by sockets of its own.
type reader struct {
	servers interface {
		Get(ipvs.ServerID) (*ipvs.ActualServer, error)
	}
	sets interface {
		Entries(ipset.Set) (map[ipset.Entry]struct{}, error)
	}
	close func()
}

// openReader opens a reader beside what syncs use.
func openReader(v *ipvs.Servers) (*reader, error) {
	servers, err := v.Another()
	if err != nil {
		return nil, err
	}
	sets, err := ipset.Present()
	if err != nil {
		_ = servers.Close()
		return nil, err
	}
	return &reader{servers, sets, func() { _, _ = servers.Close(), sets.Close() }}, nil
}

type servers interface {
	List(plan.Family) (map[ipvs.ServerID]*ipvs.ActualServer, error)
	Get(ipvs.ServerID) (*ipvs.ActualServer, error)
	Apply([]ipvs.Op) []error
}

type ipsets interface {
	Names() ([]string, error)
	Ensure(ipset.Set) (bool, error)
	Size(name string) (int, error)
	Entries(ipset.Set) (map[ipset.Entry]struct{}, error)
	Add(ipset.Set, []ipset.Entry) error
	Remove(ipset.Set, []ipset.Entry) error
	Destroy(name string) error
}

type device interface {
	Ensure() (mended string, err error)
	Addresses(plan.Family) (sets.Set[netip.Addr], error)
	AddAddresses([]netip.Addr) error
	RemoveAddresses([]netip.Addr) error
	Routes(plan.Family) (map[netip.Prefix]netip.Addr, error)
	AddRoute(netip.Prefix, netip.Addr) error
	RemoveRoute(netip.Prefix) error
	UnroutedAddresses(plan.Family) (sets.Set[netip.Addr], error)
	AddUnrouted([]netip.Addr) error
	RouteAddresses([]netip.Addr) error
	PortRoutes(plan.Family) (sets.Set[netip.Addr], error)
	AddPortRoutes([]netip.Addr) error
	RemovePortRoutes([]netip.Addr) error
}

// portTable diverts single ports of addresses to this node.
type portTable interface {
	List() (ports sets.Set[plan.Address], exists, complete bool, err error)
	Write([]plan.Address) error
	Add([]plan.Address) error
	Remove([]plan.Address) error
	Clear() error
}

// guard keeps our marks apart from those of other programs.
type guard interface {
	Intact() (bool, error)
	Ensure() (was, written bool, err error)
}

type tables interface {
	Sync(context.Context, xtables.Desired) (int, error)
	ServiceChains(context.Context) (bool, error)
}
