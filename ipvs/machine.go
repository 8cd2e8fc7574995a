package ipvs

import (
	"context"
	"net/netip"

	"nodeproxy/iptables"
	"nodeproxy/ipvs/kernel"
	"nodeproxy/plan"
)

// machine is what an engine needs of the node. kernel.Servers, kernel.Sets and kernel.Device are its parts.
type machine struct {
	servers servers
	sets    sets
	device  device
	tables  tables
	guard   guard     // nil where the kernel has no nftables
	ports   portTable // nil where Options.WholeAddresses is set
	// host lists the addresses of all other interfaces.
	host func(plan.Family) (map[netip.Addr]struct{}, error)
}

type servers interface {
	List(plan.Family) (map[kernel.ServerID]*kernel.HeldServer, error)
	Get(kernel.ServerID) (*kernel.HeldServer, error)
	Apply([]kernel.Op) []error
}

type sets interface {
	Names() ([]string, error)
	Ensure(kernel.Set) (bool, error)
	Size(name string) (int, error)
	Entries(kernel.Set) (map[kernel.Entry]struct{}, error)
	Add(kernel.Set, []kernel.Entry) error
	Remove(kernel.Set, []kernel.Entry) error
	Destroy(name string) error
}

type device interface {
	Ensure() (mended string, err error)
	Addresses(plan.Family) (map[netip.Addr]struct{}, error)
	AddAddresses([]netip.Addr) error
	RemoveAddresses([]netip.Addr) error
	Routes(plan.Family) (map[netip.Prefix]netip.Addr, error)
	AddRoute(netip.Prefix, netip.Addr) error
	RemoveRoute(netip.Prefix) error
	UnroutedAddresses(plan.Family) (map[netip.Addr]struct{}, error)
	AddUnrouted([]netip.Addr) error
	RouteAddresses([]netip.Addr) error
	PortRoutes(plan.Family) (map[netip.Addr]struct{}, error)
	AddPortRoutes([]netip.Addr) error
	RemovePortRoutes([]netip.Addr) error
}

// portTable diverts single ports of addresses to this node.
type portTable interface {
	Held() (ports map[plan.Address]struct{}, exists, complete bool, err error)
	Write([]plan.Address) error
	Add([]plan.Address) error
	Remove([]plan.Address) error
	Clear() error
}

// guard keeps marks of ours and of other programs apart.
type guard interface {
	Intact() (bool, error)
	Ensure() (was, written bool, err error)
}

type tables interface {
	Apply(context.Context, *iptables.Fixed) (int, error)
	ServiceChains(context.Context) (bool, error)
}
