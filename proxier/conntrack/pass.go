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
	// returned are endpoints whose stray answers are to be looked for.
	returned map[netip.AddrPort]struct{}
}

// mostNoted is how many frontends and endpoints are worth noting one by one.
const mostNoted = 1000

// add notes more work; a full pass is the work of everything.
func (w *work) add(o work) {
	if w.all || o.all || len(w.frontends)+len(o.frontends) > mostNoted || len(w.returned)+len(o.returned) > mostNoted {
		*w = work{all: true}
		return
	}
	w.frontends, w.returned = union(w.frontends, o.frontends), union(w.returned, o.returned)
}

func union[T comparable](a, b map[T]struct{}) map[T]struct{} {
	if len(a) == 0 {
		return b
	}
	maps.Copy(a, b)
	return a
}

func (w *work) empty() bool { return !w.all && len(w.frontends) == 0 && len(w.returned) == 0 }

// filters returns the narrowest filters that let through the flows of a family and protocol that the work is about: those to
// frontends, and those of answers.
func (w *work) filters(family plan.Family, protocol uint8) []filter {
	var to, from []part
	for at := range w.frontends {
		if at.protocol == protocol && plan.FamilyOf(at.addr) == family {
			to = append(to, part{at.addr, at.port})
		}
	}
	for at := range w.returned {
		if protocol == protoUDP && plan.FamilyOf(at.Addr()) == family {
			from = append(from, part{at.Addr(), at.Port()})
		}
	}
	var out []filter
	if len(to) > 0 {
		f := filter{family: family, protocol: protocol, dst: narrowest(to)}
		if f.dst.addr == anyAddr(family) {
			f.dst.addr = netip.Addr{}
		}
		out = append(out, f)
	}
	if len(from) > 0 {
		out = append(out, filter{family: family, protocol: protocol, src: narrowest(from)})
	}
	return out
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
	gone, left := maps.Clone(r.index.gone), maps.Clone(r.index.left)
	filters := r.filters(todo)
	r.mu.Unlock()
	if len(filters) > 0 {
		err = r.removeStale(ctx, filters, todo.all, unknown)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil || !settled:
		r.work.add(todo)
		if err == nil && r.settled {
			r.poke() // The end may have come when there was nothing left to do.
		}
	case todo.all:
		r.started = true
		swept(r.index.gone, gone)
		swept(r.index.left, left)
	}
	return todo.all, err
}

// filters returns what has to be read for some work.
func (r *Reconciler) filters(todo work) []filter {
	var out []filter
	for _, family := range r.cfg.Families {
		for _, p := range protocols {
			protocol := protocolNumber(p)
			if !todo.all {
				out = append(out, todo.filters(family, protocol)...)
				continue
			}
			if r.index.watched(family, protocol) || !r.started && p != plan.TCP && len(r.cfg.ServiceCIDRs) > 0 {
				out = append(out, filter{family: family, protocol: protocol})
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
