// Package iptables turns a plan into chains of iptables rules, and brings the kernel's tables to them.
//
// A ServicePort becomes chains of its own and entries in dispatchers (service.go); dispatchers become trees of chains
// (trie.go, dispatch.go); both are joined in rules (rules.go), which Render prints and Backend applies. Only Backend and
// tool touch the machine.
package iptables

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"nodeproxy/backend"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Config says how a Backend works.
type Config struct {
	// Variant is the implementation of iptables to use; if empty, the one that the node uses already.
	Variant xtables.Variant
	// Families are those to program.
	Families []plan.Family
	// MasqueradeBit is as in Options.
	MasqueradeBit int
	// KeepCounters is for a Backend whose Traffic is read: see Options.
	KeepCounters bool
	// SysctlDir is where kernel settings are written; empty for /proc/sys.
	SysctlDir string
	// Observer receives what happens to rules; nil for none.
	Observer Observer
	// Compared, if not nil, is called after each comparison of everything with the kernel, once for all families, with what was not as
	// it had been written. The first sync and the one after an error do not know that. It must not block.
	Compared func(drift.Report)
	// NativeRules, if not nil, is called for tables in which other programs keep rules that iptables can't read, when their chains are
	// found and when they are gone. It must not block.
	NativeRules func(xtables.NativeRules)
	// Refused, if not nil, is called with all ServicePorts of a family that the kernel does not take, whenever these are others than
	// before. It must not block.
	Refused func(plan.Family, []plan.Refusal)
	// Tables, if not nil, takes the place of the programs of iptables and of the kernel.
	Tables *Tables
	Log    *slog.Logger
}

// Tables replace the programs of iptables and the kernel.
type Tables struct {
	// Kernels are the tables of each family.
	Kernels map[plan.Family]xtables.Kernel
	// Watch notices what others change in them.
	Watch Watch
	// MaxNames is as in xtables.Writer.
	MaxNames int
}

// Watch notices what others change, as an xtables.Watch does.
type Watch interface {
	Writing() (done func())
	Run(ctx context.Context, suspect func(why string)) error
}

// Backend keeps the iptables rules of this network namespace equal to a plan. Sync is not safe for concurrent use.
type Backend struct {
	backend.PerFamily[*engine]
	// Variant is the implementation of iptables in use.
	Variant xtables.Variant
	watch   Watch
}

// New finds the iptables programs and what they and the kernel can do. It changes nothing. A family for which there are
// none, or for which the kernel has no table nat, is left out with a warning (Families returns the rest); New fails if none remains.
func New(cfg Config) (*Backend, error) {
	b := &Backend{Variant: cfg.Variant}
	var open func(plan.Family) (*engine, error)
	if cfg.Tables != nil {
		b.Variant, b.watch = xtables.NFT, cfg.Tables.Watch
		open = func(f plan.Family) (*engine, error) {
			w := &xtables.Writer{Kernel: cfg.Tables.Kernels[f], MaxNames: cfg.Tables.MaxNames, Log: cfg.Log}
			return newEngine(w, f, true, cfg), nil
		}
	} else {
		if b.Variant == "" {
			b.Variant = xtables.Detect()
		}
		b.watch, open = openPrograms(b.Variant, cfg)
	}
	b.Concurrent, b.Compared, b.Log = true, cfg.Compared, cfg.Log
	var err error
	b.Engines, err = backend.Open("iptables", cfg.Families, cfg.Log, open)
	if err != nil {
		return nil, err
	}
	for _, e := range b.Engines {
		e.writing = b.watch.Writing
	}
	return b, nil
}

// openPrograms returns what opens the engine of a family with the programs of iptables, and the watch of what they write.
func openPrograms(v xtables.Variant, cfg Config) (Watch, func(plan.Family) (*engine, error)) {
	watch := &xtables.Watch{}
	return watch, func(f plan.Family) (*engine, error) {
		t, err := xtables.Find(v, f)
		if err == nil {
			err = t.Usable()
		}
		if err != nil {
			return nil, err
		}
		t.OnNativeRules = cfg.NativeRules
		watch.Add(t, names.NAT, names.Filter)
		cfg.Log.Info("using iptables", "program", t.Describe(), "random-fully", t.RandomFully)
		return newEngine(t.Writer(cfg.Log), f, t.RandomFully, cfg), nil
	}
}

func newEngine(w *xtables.Writer, f plan.Family, randomFully bool, cfg Config) *engine {
	e := &engine{Writer: w, family: f, log: cfg.Log, sysctlDir: cmp.Or(cfg.SysctlDir, "/proc/sys"),
		counts: newRuleCounts(cfg.Observer), onRefused: cfg.Refused, writing: unwatched}
	e.Ran = e.ran
	e.options = Options{
		MasqueradeBit: cfg.MasqueradeBit,
		RandomFully:   randomFully,
		CompactAbove:  DefaultCompactAbove,
		KeepCounters:  cfg.KeepCounters,
		TCPLiberal:    conntrack.TCPLiberal(),
	}
	e.setOptions(e.options)
	return e
}

// unwatched is the writing of an engine without a Watch.
func unwatched() (done func()) { return func() {} }

// setOptions changes the options, and lets others than the goroutine of syncs know.
func (e *engine) setOptions(o Options) {
	e.options = o
	e.known.Store(&o)
}

// MostAtOnce is how many chains should change in one Sync; 0 for any number.
func (b *Backend) MostAtOnce() int {
	most := 0
	for _, e := range b.Engines {
		most = max(most, e.MaxNames)
	}
	return most
}

// Sync implements proxier.Backend.
func (b *Backend) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	defer b.watch.Writing()()
	return b.PerFamily.Sync(ctx, p, change)
}

// Watch calls suspect, with the reason, when another program may have changed what Sync has written. It returns when ctx
// ends, or with an error if it can't watch: then only a Sync that compares everything finds out.
func (b *Backend) Watch(ctx context.Context, suspect func(why string)) error {
	return b.watch.Run(ctx, suspect)
}

// Close ends what waits for the next change. Neither Sync nor Compare may be running, nor be called after it.
func (b *Backend) Close() error {
	for _, e := range b.Engines {
		if p, is := e.Kernel.(*xtables.Program); is {
			p.Close()
		}
	}
	return nil
}

// engine programs one family.
type engine struct {
	*xtables.Writer
	family  plan.Family
	options Options
	known   atomic.Pointer[Options] // the same, for any goroutine
	log     *slog.Logger
	// sysctlDir is where kernel settings are written.
	sysctlDir        string
	reportedLocalnet bool // whether it was said that localhost node ports can't be had
	// refused are the ServicePorts that the kernel does not take. onRefused, if not nil, receives them.
	refused   map[plan.Key]*refusal
	onRefused func(plan.Family, []plan.Refusal)
	// syncing is held by Sync, and while a comparison beside syncs puts something right, for which writing is called before.
	syncing backend.Mutex
	writing func() (done func())
	// current is what the kernel holds; nil where that is not known.
	current *rules
	// full is how many syncs of everything have begun. touched are the chains that were written since a comparison beside syncs began;
	// nil if there is none.
	full    int
	touched map[tableChainName]bool
	// right are all chains in the state in which the last comparison found them right; nil where none has, and while one is under way.
	right digests
	// asItShould is the generation of nf_tables in which all was as it should be when it was compared last; 0 for none. No sync uses it.
	asItShould uint32
	// kept is what the kernel had, before this program wrote anything, for ServicePorts that are not known; nil where all are.
	kept *kept
	backend.Comparison
	counts ruleCounts
	// mangleFailed is since when table mangle, which this mode does not need, could not be read; zero if the last attempt did not fail.
	mangleFailed time.Time
}

// Family implements backend.Engine.
func (e *engine) Family() plan.Family { return e.family }

// Sync implements backend.Engine.
func (e *engine) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	e.syncing.Lock()
	defer e.syncing.Unlock()
	e.Compared, e.Found = false, nil
	e.counts.begin()
	changed := e.withhold(p, change.Keys())
	var err error
	if change.All() || e.current == nil || e.current.outgrown(p, changed) ||
		e.kept.any() && p.Adds(changed, e.family, e.current.services.Get) {
		err = e.syncAll(ctx, p)
	} else {
		err = e.syncChanged(ctx, p, changed)
		if xtables.IsRefused(err) { // A sync of everything finds out by what, and does all else.
			e.current, e.counts.partial = nil, false
			err = e.syncAll(ctx, p)
		}
	}
	if err != nil {
		e.current = nil
		return fmt.Errorf("programming %s: %w", e.family, err)
	}
	return nil
}

// syncChanged writes what differs between two plans of which the first is in the kernel.
func (e *engine) syncChanged(ctx context.Context, p *plan.Plan, changed plan.Keys) error {
	steps := e.current.update(p, changed)
	for _, c := range slices.Concat(steps...) {
		e.touch(tableChainName{c.Table, c.Chain})
	}
	e.counts.partial = true
	if err := e.Write(ctx, nil, steps...); err != nil {
		return err
	}
	if len(slices.Concat(steps...)) > 0 {
		e.Kernel.Prepare() // Where something has changed, something else soon does.
	}
	for _, c := range slices.Concat(steps...) {
		e.counts.total[c.Table] += c.Grows()
	}
	e.counts.report(e.family)
	return nil
}

// ran counts a run of iptables-restore.
func (e *engine) ran(input xtables.Input, err error) {
	if err != nil {
		e.counts.failed(e.family)
	} else {
		chains, rules := e.counts.wrote(input)
		e.Wrote(drift.Chain, chains)
		e.Wrote(drift.Rule, rules)
	}
}

// readSysctl returns a kernel setting of this network namespace; empty where it can't be read.
func readSysctl(name string) string {
	raw, err := os.ReadFile("/proc/sys/" + name)
	if err != nil || len(raw) == 0 {
		return ""
	}
	return string(raw[:len(raw)-1]) // without the newline
}

// AllowLocalhostNodePorts makes the kernel setting that node ports on 127.0.0.1 need, and before it puts the rule in place that
// guards against its misuse. Of cfg it heeds Variant, SysctlDir and Log. A Backend does the same; this is for a program that
// may not write kernel settings later.
func AllowLocalhostNodePorts(ctx context.Context, cfg Config) error {
	cfg.Families = []plan.Family{plan.IPv4}
	b, err := New(cfg)
	if err != nil {
		return err
	}
	f := &fullSync{engine: b.Engines[0], ctx: ctx, actual: map[names.Table]xtables.Content{}}
	if f.actual[names.Filter], err = f.Kernel.Save(ctx, names.Filter); err != nil {
		return err
	}
	if err := f.guard(); err != nil {
		return err
	}
	if err := f.ensure(guardJumps()); err != nil {
		return err
	}
	return allowRouteLocalnet(f.sysctlDir)
}

// allowRouteLocalnet lets packets with a loopback address travel beyond the loopback device, which node ports on
// 127.0.0.1 need. The guard against their misuse must be in place before.
func allowRouteLocalnet(dir string) error {
	const name = "net/ipv4/conf/all/route_localnet"
	if readSysctl(name) == "1" {
		return nil
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte("1\n"), 0o644); err != nil {
		return fmt.Errorf("setting %s, which node ports on localhost need (--iptables-localhost-nodeports=false does "+
			"without): %w", name, err)
	}
	return nil
}
