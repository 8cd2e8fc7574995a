package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"nodeproxy/config"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// modes are all modes, in the order in which cleanup removes what they keep in the kernel. Another mode is another entry here and in
// config's list of names.
var modes = []*mode{&iptablesMode, &ipvsMode, &nftablesMode}

// modeNamed returns the mode with a name that config has validated.
func modeNamed(name string) *mode {
	for _, m := range modes {
		if m.name == name {
			return m
		}
	}
	panic("config accepts a mode that the table of modes lacks: " + name)
}

// A mode is a way to bring a plan to the kernel. What depends on the mode is in its entry; besides, config validates the settings of each,
// metrics documents its metrics, and commands that look at the node, such as support, know what a mode keeps there.
type mode struct {
	name string
	// flows are the settings that the mode needs for the removal of stale flows.
	flows flows.Config

	// check returns the error that open would return, as far as that can be known by looking. It programs nothing.
	check func(modeConfig) error
	// prepare does what needs more privileges than open and the backend may have: it loads modules and writes kernel settings. Its
	// error is one without which forwarding can't work; what the mode can do without is logged.
	prepare func(context.Context, *config.Config, *slog.Logger) error
	// open finds out what the node can do, and makes a backend. It writes kernel settings, and nothing else to the kernel.
	open func(modeConfig) (*openMode, error)
	// render returns what the mode would program for these families, as text.
	render func(cfg *config.Config, desired *plan.Plan, families []plan.Family) string
	// machine returns what packets meet in the rules of a configuration, on a node that can do everything; otherwise it is as in
	// inspect.Node.
	machine func(cfg *config.Config, whole, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error)
	// rules returns the mode's rules of iptables, given whether the program knows --random-fully and what the tables hold; nil if it has none.
	rules func(c *config.Config, p *plan.Plan, f plan.Family, randomFully bool, actual map[names.Table]xtables.Content) xtables.Desired
	// diff compares what the mode has on two sides besides rules of iptables; nil if there is nothing else.
	diff func(from, to *side, f plan.Family) ([]drift.Hunk, error)
	// remove removes what the mode has left in the kernel besides chains of iptables; nil if it leaves nothing else. The chains are
	// removed first, by cleanup or by the mode that is in force.
	remove func(context.Context, removal) error
}

// modeConfig is what a mode works with.
type modeConfig struct {
	*config.Config
	families []plan.Family // of the host
	metrics  *metrics.Set
	log      *slog.Logger
	// kernel is as in machine.
	kernel any
	// warn reports a problem that is no error.
	warn func(text string)
	// compared, nativeRules and refused are as in the Config of a backend.
	compared    func(drift.Report)
	nativeRules func(xtables.NativeRules)
	refused     func(plan.Family, []plan.Refusal)
}

// openMode is a mode that is ready to program the kernel.
type openMode struct {
	backend
	// mostAtOnce is as in proxier.Config.
	mostAtOnce int
	// compare is as in proxier.Config.
	compare func(context.Context) bool
	// unchanged is as in proxier.Config; nil if the mode can't tell.
	unchanged func() bool
	// unfinished is as in proxier.Config.
	unfinished func() bool
	// run does the mode's work between syncs until ctx ends; nil if there is none. It calls resync when everything has to be
	// compared with the kernel.
	run func(ctx context.Context, resync func()) error
	// close closes the mode's sockets, ends programs that wait for changes, and leaves what it has programmed.
	close func() error
	// variant is that of iptables which the mode uses; "" where there is but one.
	variant string
	// machine is as in inspect.Node.
	machine func(whole, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error)
	// traffic returns a reader of the traffic of each ServicePort.
	traffic func() metrics.TrafficReader
	// invalidDropped and localhostNodePorts are as in metrics.Set.CollectPacketCounters.
	invalidDropped, localhostNodePorts func() (uint64, error)
}

// backend programs the kernel in one mode.
type backend interface {
	proxier.Backend
	watcher
	// Families are those that the backend programs.
	Families() []plan.Family
	// Took is how long the last Sync took for each family. It may be called between two of them.
	Took() map[plan.Family]time.Duration
	// Written is how much of each kind the last Sync has written. It may be called between two of them.
	Written() map[drift.Kind]int
	// Verify compares what was written of a Service with the kernel, beside syncs: how many things, and what differs.
	Verify(ctx context.Context, svc plan.Service) (things int, found drift.Found, err error)
}

// removal says how to remove what a mode has left in the kernel.
type removal struct {
	cfg *config.Config
	log *slog.Logger
	// kernel is as in machine.left.
	kernel any
	// list is called with each thing before it is removed, unless it is nil. dry removes nothing.
	list func(line string)
	dry  bool
	// wait leaves established connections what they need until they end, or the configured time is over.
	wait bool
}

// modeConfig returns what this daemon's mode works with.
func (d *daemon) modeConfig() modeConfig {
	report := d.warnAnd(d.keep(d.report))
	return modeConfig{
		Config: d.cfg, families: d.families, metrics: d.metrics, log: d.log, kernel: d.machine.kernel,
		warn:     func(text string) { report(source.Finding{Severity: source.Problem, Detail: text}) },
		compared: d.drift.compared, nativeRules: d.nativeRules, refused: d.refused,
	}
}

// check returns the error that opening the mode would return on this node. It programs nothing.
func (d *daemon) check() error {
	cfg := d.modeConfig()
	cfg.log = slog.New(slog.DiscardHandler)
	return d.mode.check(cfg)
}

// The removal of what other modes have left is tried again after firstRemoval, which is short since tables of mode nftables go on to refuse what
// had no endpoints when they were written, and each time after twice as long, up to lastRemoval. What stays even then is somebody else's matter,
// or that of the next start.
const firstRemoval, lastRemoval = time.Second, 128 * time.Second

// removeOthers removes what kube-proxy and other modes have left on this node, once all Services are programmed in this one. Established
// connections keep what they need.
func (d *daemon) removeOthers(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-d.monitor.complete:
	}
	for wait := firstRemoval; ; wait *= 2 {
		err := d.removeChains(ctx) // Before what they ask for: a set or an accounting object that a rule asks can't be removed.
		if wait == firstRemoval && d.machine.real() && ctx.Err() == nil {
			d.removeLeftovers()
		}
		for _, m := range modes {
			left, simulated := d.machine.left[m.name]
			if m == d.mode || m.remove == nil || !simulated && !d.machine.real() || ctx.Err() != nil {
				continue
			}
			err = errors.Join(err, m.remove(ctx, removal{cfg: d.cfg, log: d.log, kernel: left, wait: true}))
		}
		if err == nil || ctx.Err() != nil {
			return
		}
		if wait == firstRemoval {
			d.log.Warn("something of other modes stays for now; it is tried again for some minutes", "error", err)
		}
		if wait > lastRemoval {
			d.log.Warn("something of other modes stays until the next start", "error", err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// removeChains removes the chains of other modes, unless this mode has chains itself: its syncs remove those.
func (d *daemon) removeChains(ctx context.Context) error {
	left, simulated := d.machine.left[iptablesMode.name]
	if d.mode.rules != nil || !simulated && !d.machine.real() {
		return nil
	}
	lines, err := cleanupIPTables(ctx, d.cfg, left)
	if len(lines) > 0 && err == nil {
		d.log.Info("what other modes have left in the tables of iptables is removed", "removed", len(lines))
	}
	return err
}
