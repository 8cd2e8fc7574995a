package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// kernel carries out transactions and reads tables. Tests have one that is none.
type kernel interface {
	Commit(*nft.Batch) error
	Read(f plan.Family, table string, sets []nft.Set, chains []nft.ChainSpec) (*nft.Content, error)
	Elements(f plan.Family, table string, s nft.Set) ([]nft.Element, error)
	Close() error
}

// mostInTransaction is about how many elements one transaction changes: nothing else that uses nftables can write meanwhile.
const mostInTransaction = 10000

// engine programs one family.
type engine struct {
	family  plan.Family
	options Options
	log     *slog.Logger
	// dial opens a kernel, which is nil until the first use and after an error: answers to what has failed may still come.
	dial   func() (kernel, error)
	kernel kernel
	most   int // as mostInTransaction
	// tight is set where most is smaller because the kernel does not take messages as long as asked for. That is so in a user
	// namespace, where net.core.wmem_max of the host is the limit.
	tight  bool
	failed func(f plan.Family, cleanup bool)
	sets   []nft.Set

	mu sync.Mutex // held by sync
	// layout and current are what the kernel holds; current is nil where that is not known.
	layout  *layout
	current map[plan.Key]written
	users   map[netip.Addr]int // frontends by cluster IP
	kinds   map[kind]bool      // those that have a chain
	// compared says that the last sync knew what had been written before, and found is what it found to differ.
	compared bool
	found    drift.Found
}

func (e *engine) layoutOf(p *plan.Plan) *layout {
	return &layout{family: e.family, options: e.options, settings: p.Settings, node: p.Node, partial: p.Partial}
}

func (e *engine) sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.compared, e.found = false, nil
	err := e.open()
	if err == nil {
		if change.All() || e.current == nil || !reflect.DeepEqual(e.layout, e.layoutOf(p)) || e.meetsUnknown(p, change.Keys()) {
			err = e.syncAll(ctx, p)
		} else {
			err = e.syncChanged(ctx, p, change.Keys())
		}
	}
	if errors.Is(err, unix.EMSGSIZE) && e.most > 1 { // for the next attempt
		e.most, e.tight = e.most/4, true
		e.log.Warn("the kernel does not take transactions as large as usual: net.core.wmem_max of the host limits them, as this is a "+
			"user namespace or the right CAP_NET_ADMIN is missing", "family", e.family, "elements at most from now on", e.most)
	}
	if err != nil {
		e.current = nil
		if e.kernel != nil {
			_ = e.kernel.Close()
			e.kernel = nil
		}
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

// meetsUnknown reports whether a change adds a ServicePort, or frontends to one, while the kernel may hold elements of some that are not known.
func (e *engine) meetsUnknown(p *plan.Plan, changed plan.Keys) bool {
	if !p.Partial {
		return false
	}
	for k := range changed {
		sp := p.Services[k]
		if sp == nil || k.Family != e.family {
			continue
		}
		before, known := e.current[k]
		if !known || slices.ContainsFunc(sp.Frontends, func(f plan.Frontend) bool { return !slices.Contains(before.sp.Frontends, f) }) {
			return true
		}
	}
	return false
}
