// Package nftables turns a plan into a table of nftables for each family, and keeps the kernel equal to it.
//
// Services and endpoints are elements of maps (element.go). A frontend has the number of a kind (kind.go), which stands for what is
// done with its traffic; each kind that occurs has a chain. So chains and rules (layout.go, rule.go) do not grow with the number of
// Services. An engine remembers what the kernel holds, and writes what differs in transactions (engine.go). Everything goes over
// netlink; no program is run.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Config says how a Backend works.
type Config struct {
	// Families are those to program.
	Families []plan.Family
	// MasqueradeBit is as in Options.
	MasqueradeBit int
	// Failed is told of each transaction that failed, and whether it only removed what nothing wants any more; nil for nobody.
	Failed func(f plan.Family, cleanup bool)
	// Compared is told of each comparison of everything with the kernel, once for all families, with what was not as it had
	// been written. The first sync and the one after an error do not know that. Nil is for nobody. It must not block.
	Compared func(drift.Report)
	Log      *slog.Logger
}

// Backend keeps tables equal to a plan. Sync is not safe for concurrent use.
type Backend struct {
	engines  []*engine
	compared func(drift.Report)
	took     map[plan.Family]time.Duration // by the last Sync
	ports    *ownPorts
}

// New finds out what the kernel can do. It changes nothing. A family for which the kernel lacks something is left out with a warning
// (Families tells which remain); it is an error if none remains.
func New(cfg Config) (*Backend, error) {
	b := &Backend{compared: cfg.Compared, ports: &ownPorts{}}
	options := Options{MasqueradeBit: cfg.MasqueradeBit, TCPLiberal: conntrack.TCPLiberal()}
	var missing []error
	for _, f := range cfg.Families {
		if err := try(f, options); err != nil {
			missing = append(missing, fmt.Errorf("%s: %w", f, err))
			continue
		}
		e := newEngine(f, options, cfg.Log, b.ports.dial)
		if cfg.Failed != nil {
			e.failed = cfg.Failed
		}
		b.engines = append(b.engines, e)
	}
	if len(b.engines) == 0 {
		return nil, fmt.Errorf("mode nftables can't work here: %w", errors.Join(missing...))
	}
	for _, err := range missing {
		cfg.Log.Warn("Services of this family are not proxied", "error", err)
	}
	return b, nil
}

func newEngine(f plan.Family, o Options, log *slog.Logger, dial func() (kernel, error)) *engine {
	return &engine{family: f, failed: func(plan.Family, bool) {}, options: o, log: log, dial: dial, most: mostInTransaction, sets: sets(f)}
}

// Check returns the error that New would return. It may load kernel modules, and changes nothing else.
func Check(cfg Config) error {
	_, err := New(cfg)
	return err
}

// trialTable is the name of a table that is never there: the transaction with it fails at its very end.
const trialTable = names.NFTables + "-trial"

// try returns an error if the kernel does not take what a table consists of.
func try(f plan.Family, o Options) error {
	c, err := nft.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	l := &layout{family: f, options: o}
	b := nft.NewBatch(f, trialTable)
	b.AddTable()
	for _, s := range sets(f) {
		b.AddSet(s)
	}
	all := map[kind]bool{}
	for t := internal; t <= within; t++ {
		all[kind{treatment: t, count: 1}] = true
		all[kind{treatment: t, count: 1, affinity: 1}] = true
	}
	chains := append(l.kindChains(all), l.chains()...)
	for _, ch := range chains {
		b.AddChain(ch)
	}
	for _, ch := range chains {
		if err := b.AddRules(ch); err != nil {
			return err
		}
	}
	const absent = "absent"
	b.DeleteChain(absent)
	err = c.Commit(b)
	var refused *nft.RefusedError
	switch {
	case err == nil:
		return errors.New("the kernel took a transaction that it should not have taken")
	case errors.As(err, &refused) && refused.What == "removing chain "+absent && errors.Is(err, unix.ENOENT):
		return nil
	}
	return err
}

// Families are those that the backend programs.
func (b *Backend) Families() []plan.Family {
	var out []plan.Family
	for _, e := range b.engines {
		out = append(out, e.family)
	}
	return out
}

// Sync implements proxier.Backend.
func (b *Backend) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	begin := time.Now()
	var errs []error
	b.took = map[plan.Family]time.Duration{}
	for _, e := range b.engines { // One after the other: they share the kernel's lock on nftables.
		family := time.Now()
		errs = append(errs, e.sync(ctx, p, change))
		b.took[e.family] = time.Since(family)
	}
	err := errors.Join(errs...)
	r, known := drift.Report{Took: time.Since(begin), Err: err}, false
	for _, e := range b.engines {
		if e.compared {
			known = true
			r.Found = append(r.Found, e.found...)
		}
		e.found = nil // It may be large.
	}
	if known && b.compared != nil {
		b.compared(r)
	}
	return err
}

// Took is how long the last Sync took for each family. It may be called between two of them.
func (b *Backend) Took() map[plan.Family]time.Duration { return b.took }

// Close closes the backend's sockets, and leaves what it has programmed. Neither Sync nor Watch may be running, nor be called after it.
func (b *Backend) Close() error {
	var errs []error
	for _, e := range b.engines {
		if e.kernel != nil {
			errs = append(errs, e.kernel.Close())
			e.kernel = nil
		}
	}
	return errors.Join(errs...)
}

// Leftovers lists the families that have a table of mode nftables in the network namespace of the calling thread.
func Leftovers() ([]plan.Family, error) { return nft.FamiliesWith(names.NFTables) }

// Cleanup removes the tables, with the clients that are remembered for affinity.
func Cleanup() error { return nft.RemoveTables(names.NFTables) }

// ownPorts are the netlink ports of sockets that this backend writes with, by which it knows its own changes.
type ownPorts struct {
	mu   sync.Mutex
	list map[uint32]bool
}

func (p *ownPorts) dial() (kernel, error) {
	c, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.list == nil {
		p.list = map[uint32]bool{}
	}
	p.list[c.Port()] = true
	return c, nil
}

func (p *ownPorts) has(port uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.list[port]
}
