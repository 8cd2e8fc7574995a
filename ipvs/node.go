package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Node is what this mode programs a node with, as far as the kernel and the programs of that node support it. Opening that of this one loads
// modules and changes nothing else.
type Node struct {
	Servers virtualServers
	Sets    ipsets
	Tables  map[plan.Family]*xtables.Tables
	Guards  map[plan.Family]Guard     // none on a kernel without nftables
	Ports   map[plan.Family]PortTable // none on a kernel that can't divert ports
	// Device makes the interface with the addresses of Services, unless it exists.
	Device func() (Device, error)
	// Host lists the addresses of all other interfaces, and WatchHost calls changed when these have changed, until ctx ends.
	Host      func(plan.Family) (set.Set[netip.Addr], error)
	WatchHost func(ctx context.Context, quiet time.Duration, changed func()) error
	// Reader opens what reads beside syncs. expected returns how many real servers a virtual server probably has; it waits for syncs.
	Reader func(expected func(ipvs.ServerID) int) (Reader, error)
	// What these return follows changes until a context ends: of the interface, of tables of nftables and of rules.
	WatchDevice func() (func(context.Context, func(host.DeviceChange)), error)
	WatchTables func() (func(context.Context, func(plan.Family)), error)
	WatchRules  func(*xtables.Tables) (func(context.Context, func(why string)), error)
	// Remove removes the interface, the tables of nftables, and routing rules.
	Remove func() error
	// Counts opens what counts virtual servers.
	Counts func() (Counts, error)
	// Fingerprint is as ipvs.ReadFingerprint.
	Fingerprint func(skip func(ipvs.ServerID) bool) (ipvs.Fingerprint, error)
	// CPUTime is the processor time that the caller's thread has used; nil if nothing takes any.
	CPUTime func() time.Duration
	// MostAtOnce is about how many real servers of large ServicePorts one sync looks at.
	MostAtOnce int

	// missing are the reasons why families have no tables.
	missing []error
	closers []io.Closer
}

// virtualServers are all virtual servers. ipvs.Servers implements it.
type virtualServers interface {
	servers
	HasScheduler(name string) bool
	SetTimeouts(tcp, tcpFin, udp time.Duration) error
	Stats(each func(ipvs.ServerID, ipvs.Traffic)) error
}

// Device is the interface with the addresses of Services. host.Device implements it.
type Device interface {
	device
	Up() bool
	EnableIPv6(sysctlDir string) error
	Close() error
}

// Counts counts virtual servers until it is closed. ipvs.Counts implements it.
type Counts interface {
	counts
	Close() error
}

// thisNode returns this node, without what is to be opened first.
func thisNode() *Node {
	return &Node{
		Tables: map[plan.Family]*xtables.Tables{}, Guards: map[plan.Family]Guard{}, Ports: map[plan.Family]PortTable{},
		Device: func() (Device, error) { return host.OpenDevice(names.Device) },
		Host:   hostAddresses, WatchHost: others.Watch,
		WatchDevice: func() (func(context.Context, func(host.DeviceChange)), error) { return host.WatchDevice(names.Device) },
		WatchTables: nftrules.Watch, WatchRules: (*xtables.Tables).OpenWatch,
		Remove:      removeTables,
		Counts:      func() (Counts, error) { return ipvs.OpenCounts() },
		Fingerprint: ipvs.ReadFingerprint, CPUTime: cpuTime, MostAtOnce: mostAtOnce,
	}
}

// openNode opens what a configuration needs, and sets its defaults. An error names what is missing.
func openNode(cfg *Config) (*Node, error) {
	cfg.Scheduler = cmp.Or(cfg.Scheduler, DefaultScheduler)
	if cfg.Node != nil {
		return cfg.Node, nil
	}
	if cfg.Variant == "" {
		cfg.Variant = xtables.Detect()
	}
	n, err := openKernel(cfg.Scheduler)
	if err != nil {
		return nil, err
	}
	for _, f := range cfg.Families {
		if t, err := xtables.NewTables(cfg.Variant, f, cfg.Log); err != nil {
			n.missing = append(n.missing, fmt.Errorf("%s: %w", f, err))
		} else {
			n.Tables[f] = t
		}
	}
	for f := range n.Tables {
		if err := n.openTables(f, newMarks(cfg.MasqueradeBit)); err != nil {
			n.close()
			return nil, err
		}
	}
	if len(n.Tables) == 0 {
		n.close()
		return nil, errors.Join(n.missing...)
	}
	return n, nil
}

// openTables opens the guard of marks and what diverts ports of a family, as far as the kernel can have them.
func (n *Node) openTables(f plan.Family, m marks) error {
	switch g, err := nftrules.OpenGuards(f, m.guard()); {
	case err == nil:
		n.Guards[f], n.closers = g, append(n.closers, g)
	case !errors.Is(err, nft.ErrAbsent):
		return err
	}
	switch p, err := nftrules.OpenPorts(f); {
	case err == nil:
		n.Ports[f], n.closers = p, append(n.closers, p)
	case !errors.Is(err, nftrules.ErrNoPorts):
		return err
	}
	return nil
}

// machine returns what there is for a family, with a device unless that is nil.
func (n *Node) machine(f plan.Family, d device) machine {
	return machine{servers: n.Servers, sets: n.Sets, device: d, guard: n.Guards[f], ports: n.Ports[f], host: n.Host, reader: n.Reader}
}

// openServers and openSets open what there is of virtual servers and of sets.
func (n *Node) openServers() error {
	s, err := ipvs.OpenServers()
	if err == nil {
		n.Servers, n.closers = s, append(n.closers, s)
		n.Reader = func(expected func(ipvs.ServerID) int) (Reader, error) { return openReader(s, expected) }
	}
	return err
}

func (n *Node) openSets() error {
	s, err := ipset.OpenSets()
	if err == nil {
		n.Sets, n.closers = s, append(n.closers, s)
	}
	return err
}

// openKernel opens what depends on the kernel alone: all but the tables, guards and ports of the families.
func openKernel(scheduler string) (*Node, error) {
	n := thisNode()
	if err := n.openServers(); err != nil {
		return nil, err
	}
	err := n.openSets()
	if err == nil && !n.Servers.HasScheduler(scheduler) {
		err = fmt.Errorf("--ipvs-scheduler: this kernel has no scheduler %q (module ip_vs_%s)", scheduler, scheduler)
	}
	if err == nil {
		err = host.CheckDevice(names.Device)
	}
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// close closes the sockets.
func (n *Node) close() {
	for _, c := range n.closers {
		_ = c.Close()
	}
}
