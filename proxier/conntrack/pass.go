package conntrack

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"time"

	"nodeproxy/proxier/plan"
)

// work is what the next pass is to look for.
type work struct {
	all       bool
	frontends map[frontend]struct{}
}

// mostFrontends is how many frontends are worth noting one by one.
const mostFrontends = 1000

func (w *work) add(frontends []frontend) {
	if w.all || len(frontends) == 0 {
		return
	}
	if len(w.frontends)+len(frontends) > mostFrontends {
		w.all, w.frontends = true, nil
		return
	}
	if w.frontends == nil {
		w.frontends = map[frontend]struct{}{}
	}
	for _, f := range frontends {
		w.frontends[f] = struct{}{}
	}
}

// addWork puts back what could not be done.
func (w *work) addWork(o work) {
	if o.all || w.all {
		w.all, w.frontends = true, nil
		return
	}
	for f := range o.frontends {
		w.add([]frontend{f})
	}
}

func (w *work) empty() bool { return !w.all && len(w.frontends) == 0 }

// filter returns the narrowest filter that lets through the flows of a family and protocol that the work is about, and
// false if it is about none.
func (w *work) filter(family plan.Family, protocol uint8) (filter, bool) {
	f := filter{family: family, protocol: protocol}
	found := false
	for at := range w.frontends {
		if at.protocol != protocol || plan.FamilyOf(at.addr) != family {
			continue
		}
		if !found {
			found, f.addr, f.port = true, at.addr, at.port
		}
		if f.addr != at.addr {
			f.addr = netip.Addr{}
		}
		if f.port != at.port {
			f.port = 0
		}
	}
	if f.addr == anyAddr(family) {
		f.addr = netip.Addr{}
	}
	return f, found
}

var protocols = [...]plan.Protocol{plan.UDP, plan.SCTP, plan.TCP}

// pass does the work there is, once, and reports whether it was a full pass. What could not be done is put back, and so
// is what was done before the rules were those of the plan.
func (r *Reconciler) pass(ctx context.Context) (full bool, err error) {
	r.mu.Lock()
	if !r.known {
		r.mu.Unlock()
		return false, nil
	}
	todo, settled, unknown := r.work, r.settled, !r.started
	r.work = work{}
	gone := maps.Clone(r.index.gone)
	filters := r.filters(todo)
	r.mu.Unlock()
	if len(filters) > 0 {
		err = r.removeStale(ctx, filters, todo.all, unknown)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil || !settled:
		r.work.addWork(todo)
		if err == nil && r.settled {
			r.poke() // The end may have come when there was nothing left to do.
		}
	case todo.all:
		r.started = true
		r.index.swept(gone)
	}
	return todo.all, err
}

// filters returns what has to be read for some work.
func (r *Reconciler) filters(todo work) []filter {
	var out []filter
	for _, family := range r.cfg.Families {
		for _, p := range protocols {
			protocol := protocolNumber(p)
			f, need := todo.filter(family, protocol)
			if todo.all {
				f = filter{family: family, protocol: protocol}
				need = r.index.watched(family, protocol) ||
					!r.started && p != plan.TCP && len(r.cfg.ServiceCIDRs) > 0
			}
			if need {
				out = append(out, f)
			}
		}
	}
	return out
}

// removeStale reads flows and removes the stale ones among them.
func (r *Reconciler) removeStale(ctx context.Context, filters []filter, full, unknown bool) error {
	t, err := openTable(r.open, &r.noFilter)
	if err != nil {
		return err
	}
	defer t.close()
	own := map[plan.Family]*addresses{}
	var errs []error
	for _, f := range filters {
		if own[f.family] == nil {
			if own[f.family], err = r.local(f.family); err != nil {
				return errors.Join(append(errs, err)...)
			}
		}
		start := time.Now()
		read, deleted, err := t.removeIf(ctx, f, func(fl *flow) bool {
			r.mu.RLock()
			defer r.mu.RUnlock()
			return r.index.stale(fl, own[fl.family], unknown)
		})
		s := Sweep{Family: f.family, Protocol: protocolOf(f.protocol), Full: full, Read: read, Deleted: deleted,
			Took: time.Since(start), Err: err}
		r.cfg.Observe(s)
		if deleted > 0 {
			r.cfg.Log.Debug("stale flows removed", "family", s.Family, "protocol", s.Protocol, "count", deleted, "of", read,
				"took", s.Took.Round(10*time.Microsecond))
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func protocolOf(number uint8) plan.Protocol {
	for _, p := range protocols {
		if protocolNumber(p) == number {
			return p
		}
	}
	return plan.TCP
}
