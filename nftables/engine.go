package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/backend"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// kernel carries out transactions and reads tables. Tests use a fake.
type kernel interface {
	Commit(*nft.Batch) error
	Read(f plan.Family, table string, sets []nft.Set, chains []nft.Chain) (*nft.Content, error)
	Sample(f plan.Family, table string, s nft.Set, each func(nft.Element) error) error
	Element(f plan.Family, table string, s nft.Set, e nft.Element) (nft.Element, bool, error)
	Find(f plan.Family, table string, keys []nft.ElementKey, each func(i int, e nft.Element, is bool) error) error
	Generation() (uint32, error)
	Close() error
}

// mostInTransaction is about how many elements one transaction changes. No other program can change nftables during a transaction. The
// kernel is idle until the first one has been prepared, and of the last one there is nothing left to prepare beside it, so they are small.
const mostInTransaction = 2500

// engine programs one family.
type engine struct {
	family  plan.Family
	options Options
	log     *slog.Logger
	// dial opens kernel, which is nil until the first use and after an error: late answers to a failed request may still arrive on
	// the old socket.
	dial   func() (kernel, error)
	kernel kernel
	// reader opens a kernel to read from beside that.
	reader func() (kernel, error)
	most   int // mostInTransaction, or less
	// tight is set if most was reduced because the kernel limits the length of messages: in a user namespace, to the host's
	// net.core.wmem_max.
	tight bool
	// mostListed and mostAtOnce are the constants, or less.
	mostListed, mostAtOnce int
	failed                 func(f plan.Family, cleanup bool)
	sets                   []nft.Set
	asked                  *askedFor
	// onRefused is called with what the kernel refuses when that has changed.
	onRefused func(plan.Family, []plan.Refusal)
	// warn and onClients are Config.Warn and Config.Clients. A share of affinity is crowded from when it was warned of until there is room
	// again; only comparisons beside syncs look at it.
	warn      func(string)
	onClients func(f plan.Family, share, clients int)
	crowded   [affinityShares]bool
	// traffic, if not nil, gets what elements have counted before they are replaced.
	traffic *TrafficReader

	mu backend.Mutex // held by sync
	// layout and current describe the kernel's content; current is nil if that is not known.
	layout  *layout
	current *contents
	users   map[netip.Addr]int // how many frontends each cluster IP has
	kinds   map[kind]bool      // the kinds that have a chain
	// refused are the ServicePorts that the kernel refuses, which are not in current; spareKinds are elements that lead to
	// the chains that they keep, and are not in kinds.
	refused    map[plan.Key]*refusal
	spareKinds map[id]value
	// unfinished are the ServicePorts of which some frontends are still as an earlier version has them, and lastStepped is the one of which
	// the last sync changed most.
	unfinished  plan.Keys
	lastStepped plan.Key
	leftover    map[string]bool // chains that no kind uses any more, and that could not be removed yet
	// existed is set where the last sync failed as something existed already, and certain where everything is read anew after that.
	existed, certain bool
	// full is how many syncs have begun that do not go by what was written. touched are the elements that were written since a comparison beside syncs began;
	// nil if there is none.
	full    int
	touched map[id]bool
	// verified is when a comparison beside syncs last found everything as it should be. No sync uses it.
	verified version
	// unread are the sets in which there may be elements that nothing leads to, and that neither a sync nor a comparison has read.
	unread [setCount]bool
	backend.Comparison
}

// version is of what the kernel holds: it is the same as long as that has not changed, and no sync has begun that does not go by what was
// written.
type version struct {
	generation uint32 // of nftables; never 0
	full       int    // of the engine
}

// Family implements backend.Engine.
func (e *engine) Family() plan.Family { return e.family }

func (e *engine) layoutOf(p *plan.Plan) *layout {
	return layoutOf(p, e.family, e.options)
}

// Sync implements backend.Engine.
func (e *engine) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Compared, e.Found = false, nil
	e.certain, e.existed = e.current == nil && e.existed, false
	err := e.open()
	if err == nil {
		unknown := change.Unknown() || e.current == nil || e.meetsUnknown(p, change.Keys())
		if unknown || change.All() || !reflect.DeepEqual(e.layout, e.layoutOf(p)) {
			err = e.syncAll(ctx, p, unknown || p.Partial || e.layout.partial)
		} else {
			err = e.syncChanged(ctx, p, change.Keys())
		}
	}
	if errors.Is(err, unix.EMSGSIZE) && e.most > 1 { // The next attempt uses smaller transactions.
		e.most, e.tight = e.most/4, true
		e.log.Warn("the kernel does not take transactions as large as usual: net.core.wmem_max of the host limits them, as this is a "+
			"user namespace or the right CAP_NET_ADMIN is missing", "family", e.family, "elements at most from now on", e.most)
	}
	if err != nil {
		e.existed = errors.Is(err, unix.EEXIST)
		e.forget()
		return fmt.Errorf("programming %s: %w", e.family, err)
	}
	return nil
}

func (e *engine) open() error {
	if e.kernel != nil {
		return nil
	}
	k, err := e.dial()
	if err == nil {
		e.kernel = k
	}
	return err
}

// meetsUnknown reports whether the plan is partial and the change adds a frontend: the kernel may have elements of a ServicePort that is not
// known yet, with the same keys.
func (e *engine) meetsUnknown(p *plan.Plan, changed plan.Keys) bool {
	if !p.Partial {
		return false
	}
	for k := range changed {
		sp := p.Services[k]
		if sp == nil || k.Family != e.family {
			continue
		}
		before := e.current.of(k)
		if before.sp == nil || slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return !before.sp.Has(f) }) {
			return true
		}
	}
	return false
}
