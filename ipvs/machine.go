package ipvs

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// machine is what an engine uses of the node. ipvs.Servers, ipset.Sets and host.Device implement its parts.
type machine struct {
	servers servers
	sets    ipsets
	device  device
	tables  tables
	guard   Guard     // nil if the kernel has no nftables
	ports   PortTable // nil if Options.WholeAddresses is set
	// host lists the addresses of all other interfaces.
	host func(plan.Family) (set.Set[netip.Addr], error)
	// reader is as in Node.
	reader func(expected func(ipvs.ServerID) int) (Reader, error)
}

// Reader reads beside syncs.
type Reader struct {
	Servers servers
	Sets    ipsets
	Device  device
	Close   func()
}

// openReader opens servers, sets and the device by sockets of their own.
func openReader(v *ipvs.Servers, expected func(ipvs.ServerID) int) (Reader, error) {
	servers, err := v.Another()
	if err != nil {
		return Reader{}, err
	}
	sets, err := ipset.Present()
	if err != nil {
		_ = servers.Close()
		return Reader{}, err
	}
	device, err := host.FindDevice(names.Device)
	if err != nil || device == nil {
		_, _ = servers.Close(), sets.Close()
		return Reader{}, cmp.Or(err, errNoDevice)
	}
	return Reader{glances{servers, expected}, sets, device, func() { _, _, _ = servers.Close(), sets.Close(), device.Close() }}, nil
}

var errNoDevice = errors.New("another program has removed interface " + names.Device)

// glances are servers that are listed once only: see EachOnce.
type glances struct {
	*ipvs.Servers
	expected func(ipvs.ServerID) int
}

func (g glances) Each(f plan.Family, each func(*ipvs.ActualServer)) error {
	return g.EachOnce(f, g.expected, each)
}

// read reads what there is of a family, where m has the means. A virtual server for which known, unless it is nil, returns one, is read as
// that: most are as they were, and a copy of each would take more memory than all else.
func (m machine) read(f plan.Family, marks marks, exclude []netip.Prefix, known func(*ipvs.ActualServer) *actualServer) (*actual, error) {
	h := newActual()
	if m.sets != nil {
		if err := h.readSets(m.sets, f); err != nil {
			return nil, err
		}
	}
	if m.servers != nil {
		now := time.Now() // Once: if reading the clock is a system call, doing so for each takes as long as everything else.
		err := m.servers.Each(f, func(v *ipvs.ActualServer) {
			if marks.foreign(v.ID, exclude) {
				return
			}
			var is *actualServer
			if known != nil {
				is = known(v)
			}
			if is == nil {
				is = newActualServer(v, now)
			}
			h.servers.Put(is)
			if v.Foreign {
				h.foreign = append(h.foreign, v.Server)
			}
		})
		if err != nil {
			return nil, err
		}
	}
	if m.ports != nil {
		list, exists, complete, err := m.ports.List()
		if err != nil {
			return nil, err
		}
		h.ports.exists, h.ports.complete = exists, complete
		for p := range list {
			h.ports.add(p)
		}
	}
	if m.device == nil {
		return h, nil
	}
	return h, h.readDevice(m.device, f)
}

func (h *actual) readSets(s ipsets, f plan.Family) error {
	there, err := s.Names()
	if err != nil {
		return err
	}
	for id := range setCount {
		if slices.Contains(there, setName(id, f)) {
			if err := h.readSet(s, id, f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (h *actual) readSet(s ipsets, id setID, f plan.Family) error {
	list := map[memberKey]marked{}
	err := s.Entries(setOf(id, f), func() { clear(list) }, func(e ipset.Entry) {
		m := member{id, e}
		list[m.key()] = m.marked()
	})
	if len(h.members) == 0 { // One set has nearly all entries.
		h.members, list = list, nil
	}
	maps.Copy(h.members, list)
	h.sets[id] = err == nil
	return err
}

func (h *actual) readDevice(d device, f plan.Family) (err error) {
	if h.vips, err = d.Addresses(f); err != nil {
		return err
	}
	if h.ports.unrouted, err = d.UnroutedAddresses(f); err != nil {
		return err
	}
	h.vips = h.vips.Difference(h.ports.unrouted)
	if h.ports.routes, err = d.PortRoutes(f); err != nil {
		return err
	}
	h.routes, err = d.Routes(f)
	return err
}

type servers interface {
	Each(plan.Family, func(*ipvs.ActualServer)) error
	Get(ipvs.ServerID) (*ipvs.ActualServer, error)
	RealServers(id ipvs.ServerID, n int) (map[netip.AddrPort]ipvs.ActualRealServer, error)
	Apply([]ipvs.Op) []error
}

type ipsets interface {
	Names() ([]string, error)
	Ensure(ipset.Set) (bool, error)
	Sizes(names []string) (map[string]int, error)
	Entries(set ipset.Set, begin func(), each func(ipset.Entry)) error
	Add(ipset.Set, []ipset.Entry) error
	Remove(ipset.Set, []ipset.Entry) error
	Destroy(name string) error
}

type device interface {
	Ensure() (mended string, err error)
	Addresses(plan.Family) (set.Set[netip.Addr], error)
	AddAddresses([]netip.Addr) error
	RemoveAddresses([]netip.Addr) error
	Routes(plan.Family) (map[netip.Prefix]netip.Addr, error)
	AddRoute(netip.Prefix, netip.Addr) error
	RemoveRoute(netip.Prefix) error
	UnroutedAddresses(plan.Family) (set.Set[netip.Addr], error)
	AddUnrouted([]netip.Addr) error
	RouteAddresses([]netip.Addr) error
	PortRoutes(plan.Family) (set.Set[netip.Addr], error)
	AddPortRoutes([]netip.Addr) error
	RemovePortRoutes([]netip.Addr) error
}

// PortTable diverts single ports of addresses to this node.
type PortTable interface {
	List() (ports set.Set[plan.Address], exists, complete bool, err error)
	Write([]plan.Address) error
	Add([]plan.Address) error
	Remove([]plan.Address) error
	Clear() error
}

// Guard keeps our marks apart from those of other programs.
type Guard interface {
	Intact() (bool, error)
	Ensure() (was, written bool, err error)
}

type tables interface {
	Sync(context.Context, xtables.Desired) (int, error)
	ServiceChains(context.Context) (bool, error)
}
