// Package ipvs turns a plan into virtual servers, ipsets and addresses, with the few iptables rules that they need, and keeps the
// kernel equal to them.
//
// A ServicePort becomes objects (objects.go), which a state collects (state.go). An engine compares that desired state with the
// actual one (engine.go) and changes what differs, one thing at a time. The rules (rules.go) know no Services: they ask sets. Only
// the packages below kernel, nftrules, and iptables for its rules, touch the machine.
package ipvs

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"nodeproxy/backend"
	"nodeproxy/internal/set"
	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// drainInterval is the interval at which draining real servers are checked.
const drainInterval = time.Second

// Config configures a Backend.
type Config struct {
	Options
	// Variant is the implementation of iptables to use; if empty, the one that the node uses already.
	Variant xtables.Variant
	// Families are the families to program.
	Families []plan.Family
	// ExcludeCIDRs are ranges whose virtual servers belong to other programs.
	ExcludeCIDRs []netip.Prefix
	// StrictARP keeps the node from answering ARP requests for addresses of Services on other interfaces.
	StrictARP bool
	// How long IPVS remembers an idle connection; zero leaves the kernel's setting unchanged.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// GracePeriod is how long connections are left to a real server whose endpoint is no longer listed. It does not include the pod's
	// own termination: as long as an EndpointSlice lists an endpoint, its connections are left to it.
	GracePeriod time.Duration
	// SysctlDir is where kernel settings are written; empty for /proc/sys.
	SysctlDir string
	// Warn is called for each scheduler that the kernel lacks, once; nil for none.
	Warn func(text string)
	// RestoreFailed is called for each failed run of iptables-restore; nil for none.
	RestoreFailed func(plan.Family)
	// NativeRules is as in iptables.Config.
	NativeRules func(xtables.NativeRules)
	// Refused is as in iptables.Config.
	Refused func(plan.Family, []plan.Refusal)
	// Compared, unless nil, receives the result of each comparison of everything with the kernel, once for all families: what
	// differed from what had been written. The first sync and the one after an error do not know that. It must not block.
	Compared func(drift.Report)
	// Node, unless nil, takes the place of this node, but for kernel settings.
	Node *Node
	Log  *slog.Logger
}

// Backend keeps virtual servers and their other objects equal to a plan. Sync is not safe for concurrent use.
type Backend struct {
	backend.PerFamily[*engine]
	cfg    Config
	node   *Node
	device Device

	settings sync.Mutex // held while sysctls is used
	sysctls  sysctlKeeper
}

// New finds out what the node supports, and sets the sysctls that IPVS needs. An error names what is missing and what to do about
// it; nothing has been programmed then.
func New(cfg Config) (*Backend, error) {
	n, err := openNode(&cfg)
	if err != nil {
		return nil, cannot(err)
	}
	b := &Backend{cfg: cfg, node: n}
	b.Compared, b.Log, b.Shared = cfg.Compared, cfg.Log, b.repairSysctls // The engines wait for each other: both need the kernel's lock on IPVS.
	if err := b.open(); err != nil {
		n.close()
		if b.device != nil {
			_ = b.device.Close()
		}
		return nil, cannot(err)
	}
	return b, nil
}

// cannot is an error of what this mode needs; nil for none.
func cannot(err error) error {
	if err != nil {
		return fmt.Errorf("mode ipvs can't work here: %w", err)
	}
	return nil
}

// Check returns the error that New would return, as far as that is known without changes. It may load kernel modules and changes
// nothing else. What is not an error is only logged.
func Check(cfg Config) error {
	n, err := openNode(&cfg)
	if err == nil {
		defer n.close()
		_, err = setSysctls(cfg, true)
	}
	return cannot(err)
}

// Prepare does the part of New that needs more rights than programming: it loads kernel modules and sets the sysctls. Its error is
// the one that New would return without these.
func Prepare(cfg Config) error {
	n, err := openKernel(cmp.Or(cfg.Scheduler, DefaultScheduler))
	if err != nil {
		return cannot(err)
	}
	defer n.close()
	if _, err := setSysctls(cfg, false); err != nil {
		return cannot(err)
	}
	// Asking for a scheduler loads it.
	if missing := slices.DeleteFunc(slices.Clone(plan.Schedulers), n.Servers.HasScheduler); len(missing) > 0 {
		cfg.Log.Info("this kernel lacks some IPVS schedulers; Services that ask for one of them get the default one",
			"schedulers", strings.Join(missing, ", "))
	}
	return nil
}

func (b *Backend) open() error {
	n := b.node
	for _, err := range n.missing {
		b.cfg.Log.Warn("Services of this family are not proxied", "error", err)
	}
	available := &schedulers{has: n.Servers.HasScheduler, known: map[string]bool{}, warn: b.cfg.Warn}
	b.cfg.Unavailable = available.lacks
	kept, err := setSysctls(b.cfg, false)
	if err != nil {
		return err
	}
	b.sysctls = sysctlKeeper{list: kept, dir: b.cfg.sysctlDir(), log: b.cfg.Log, warned: map[string]bool{}}
	if err := n.Servers.SetTimeouts(b.cfg.TCPTimeout, b.cfg.TCPFinTimeout, b.cfg.UDPTimeout); err != nil {
		return err
	}
	if b.device, err = n.Device(); err != nil {
		return err
	}
	if n.Tables[plan.IPv6] != nil {
		if err := b.device.EnableIPv6(b.cfg.sysctlDir()); err != nil {
			b.cfg.Log.Warn("Services of IPv6 are not proxied", "error", err)
			delete(n.Tables, plan.IPv6)
		}
	}
	for _, f := range b.cfg.Families {
		if t := n.Tables[f]; t != nil {
			b.Engines = append(b.Engines, b.engine(f, t))
		}
	}
	return nil
}

func (b *Backend) engine(f plan.Family, t *xtables.Tables) *engine {
	options, program := b.cfg.Options, "none"
	options.RandomFully, options.TCPLiberal = true, conntrack.TCPLiberal()
	if p, is := t.Kernel.(*xtables.Program); is {
		options.RandomFully, program = p.RandomFully, p.Describe()
	}
	b.cfg.Log.Info("using IPVS", "program", program, "scheduler", options.Scheduler)
	if options.WholeAddresses = b.node.Ports[f] == nil; options.WholeAddresses {
		b.cfg.Log.Warn("all ports of external IPs are this node's, even if another host has the address: give Services addresses of"+
			" their own", "family", f, "error", nftrules.ErrNoPorts)
	}
	e := &engine{
		family: f, options: options, onRefused: b.cfg.Refused, exclude: b.cfg.ExcludeCIDRs, grace: b.cfg.GracePeriod,
		log: b.cfg.Log, mostAtOnce: b.node.MostAtOnce, machine: b.node.machine(f, b.device),
	}
	e.machine.tables = t
	if e.machine.guard == nil {
		b.cfg.Log.Warn("marks that lead packets to virtual servers are not guarded: node ports do not work beside a network policy"+
			" that uses marks too", "family", f, "error", nft.ErrAbsent)
	}
	t.Found, t.NativeRules = &e.ruleDrift, b.cfg.NativeRules
	t.Ran = func(_ xtables.Input, err error) {
		if err != nil && b.cfg.RestoreFailed != nil {
			b.cfg.RestoreFailed(f)
		}
	}
	return e
}

// Close closes the backend's sockets and leaves what it has programmed. Neither Sync, Run nor Watch may run during or after it. A
// reader of traffic continues to work: metrics are read until the next backend replaces this one.
func (b *Backend) Close() error {
	b.node.close()
	return b.device.Close()
}

// repairSysctls restores the sysctls in a full sync, and returns those that had changed.
func (b *Backend) repairSysctls(change plan.Change) drift.Found {
	if !change.All() {
		return nil
	}
	b.settings.Lock()
	defer b.settings.Unlock()
	return b.sysctls.repair()
}

// others selects the addresses of this node that are not those of Services.
var others = host.Filter{Except: []string{names.Device}}

// hostAddresses lists them.
func hostAddresses(f plan.Family) (set.Set[netip.Addr], error) {
	list, err := others.Addresses(f)
	if err != nil {
		return nil, err
	}
	out := make(set.Set[netip.Addr], len(list))
	for _, a := range list {
		out.Insert(a.Addr)
	}
	return out, nil
}

// quiet is how long to wait for further changes of the node's addresses.
const quiet = 100 * time.Millisecond

// Run removes real servers when their connections have ended, and follows the node's own addresses. It calls changed when
// everything must be synced again, as after a failure. It returns when ctx ends.
func (b *Backend) Run(ctx context.Context, changed func()) error {
	watch := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() {
		watch <- b.node.WatchHost(ctx, quiet, func() {
			again := false
			for _, e := range b.Engines {
				again = e.follow() || again
			}
			if again {
				changed()
			}
		})
	})
	ticks := time.NewTicker(drainInterval)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-watch:
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("watching the node's addresses: %w", err)
			}
		case now := <-ticks.C:
			for _, e := range b.Engines {
				if err := e.drain(now); err != nil {
					b.cfg.Log.Warn("draining real servers could not be removed; everything is compared again", "error", err)
					changed()
				}
			}
		}
	}
}

// schedulers remembers which schedulers the kernel has. Syncs, comparisons, drains and questions ask beside each other.
type schedulers struct {
	has  func(string) bool
	warn func(string)

	mu    sync.Mutex
	known map[string]bool
}

func (s *schedulers) lacks(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	has, known := s.known[name]
	if !known {
		has = s.has(name)
		s.known[name] = has
		if !has && s.warn != nil {
			s.warn(fmt.Sprintf("this kernel has no IPVS scheduler %q (module ip_vs_%s); Services that ask for it get the default one",
				name, name))
		}
	}
	return !has
}
