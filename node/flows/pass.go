package flows

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"time"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// work is what the next pass must look for.
type work struct {
	all       bool
	frontends map[frontend]struct{}
	// opened are TCP frontends that lead to endpoints now; openedMany stands for more than mostNoted.
	opened     map[frontend]struct{}
	openedMany bool
	// returned are endpoints whose stray answers must be looked for.
	returned map[netip.AddrPort]struct{}
}

// mostNoted is the number of frontends and endpoints up to which each is recorded; beyond, everything is looked at.
const mostNoted = 1000

// add adds more work; a full pass covers everything.
func (w *work) add(o work) {
	if w.all || o.all || len(w.frontends)+len(o.frontends) > mostNoted || len(w.returned)+len(o.returned) > mostNoted {
		*w = work{all: true}
		return
	}
	w.frontends, w.returned = union(w.frontends, o.frontends), union(w.returned, o.returned)
	if w.openedMany = w.openedMany || o.openedMany || len(w.opened)+len(o.opened) > mostNoted; w.openedMany {
		w.opened = nil
	} else {
		w.opened = union(w.opened, o.opened)
	}
}

func union[T comparable](a, b map[T]struct{}) map[T]struct{} {
	if len(a) == 0 {
		return b
	}
	maps.Copy(a, b)
	return a
}

func (w *work) empty() bool {
	return !w.all && !w.openedMany && len(w.frontends) == 0 && len(w.opened) == 0 && len(w.returned) == 0
}

// filters returns the narrowest filters that match the flows of a family and protocol that the work concerns: those to frontends,
// and those of answers.
func (w *work) filters(family plan.Family, protocol uint8) []conntrack.Filter {
	to := partsOf(w.frontends, family, protocol)
	var from []conntrack.End
	for at := range w.returned {
		if protocol == protoUDP && plan.FamilyOf(at.Addr()) == family {
			from = append(from, conntrack.End{Addr: at.Addr(), Port: at.Port()})
		}
	}
	var out []conntrack.Filter
	if len(to) > 0 {
		out = append(out, conntrack.Filter{Family: family, Protocol: protocol, Dst: conntrack.Narrowest(to)})
	}
	if opened := partsOf(w.opened, family, protocol); len(opened) > 0 {
		out = append(out, conntrack.Filter{Family: family, Protocol: protocol, Dst: conntrack.Narrowest(opened), Early: true})
	} else if w.openedMany && protocol == protoTCP {
		out = append(out, conntrack.Filter{Family: family, Protocol: protocol, Early: true})
	}
	if len(from) > 0 {
		out = append(out, conntrack.Filter{Family: family, Protocol: protocol, Src: conntrack.Narrowest(from)})
	}
	return out
}

// partsOf returns what a filter says of the frontends of a family and protocol.
func partsOf(frontends map[frontend]struct{}, family plan.Family, protocol uint8) []conntrack.End {
	var out []conntrack.End
	for at := range frontends {
		if at.protocol != protocol || plan.FamilyOf(at.addr) != family {
			continue
		}
		p := conntrack.End{Addr: at.addr, Port: at.port}
		if at.addr == anyAddr(family) {
			p.Addr = netip.Addr{}
		}
		out = append(out, p)
	}
	return out
}

var protocols = [...]plan.Protocol{plan.UDP, plan.SCTP, plan.TCP}

// pass does the pending work once and reports whether it was a full pass. It puts back what could not be done, and what was done
// before the rules matched the plan.
func (r *Reconciler) pass(ctx context.Context) (full bool, err error) {
	r.mu.Lock()
	if !r.known {
		r.mu.Unlock()
		return false, nil
	}
	todo, settled, unknown, early := r.work, r.settled, !r.started && !r.partial, r.index.early
	r.work = work{}
	if todo.all {
		r.index.early = false
	}
	gone, left := maps.Clone(r.index.gone), maps.Clone(r.index.left)
	filters := r.filters(todo, early)
	r.mu.Unlock()
	if len(filters) > 0 {
		err = r.removeStale(ctx, filters, todo.all, unknown)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil || !settled:
		r.work.add(todo)
		r.index.early = r.index.early || early
		if err == nil && r.settled {
			r.poke() // The sync may have ended when no work was left.
		}
	case todo.all:
		r.started = r.started || unknown
		swept(r.index.gone, gone)
		swept(r.index.left, left)
	}
	return todo.all, err
}

// filters returns what must be read for some work; early is set if a full pass must look for connections that began early.
func (r *Reconciler) filters(todo work, early bool) []conntrack.Filter {
	var out []conntrack.Filter
	for _, family := range r.cfg.Families {
		for _, p := range protocols {
			protocol := netlink.Protocol(p)
			if !todo.all {
				out = append(out, todo.filters(family, protocol)...)
				continue
			}
			if r.index.watched(family, protocol) || !r.started && !r.partial && p != plan.TCP && len(r.cfg.ServiceCIDRs) > 0 {
				out = append(out, conntrack.Filter{Family: family, Protocol: protocol})
			} else if early && p == plan.TCP {
				out = append(out, conntrack.Filter{Family: family, Protocol: protocol, Early: true})
			}
		}
	}
	return out
}

// removeStale reads flows and removes the stale ones among them.
func (r *Reconciler) removeStale(ctx context.Context, filters []conntrack.Filter, full, unknown bool) error {
	if r.session == nil {
		session, err := r.table.Open()
		if err != nil {
			return err
		}
		r.session = session
	}
	var errs []error
	defer func() {
		if len(errs) > 0 { // Answers may still come.
			r.closeSession()
		}
	}()
	own := map[plan.Family]*host.Local{}
	for _, f := range filters {
		// Most often there is no flow whose address matters, and some machines have very many addresses.
		if own[f.Family] == nil && !(f.Early && f.Dst.Addr.IsValid()) {
			local, err := r.cfg.Local(f.Family)
			if err != nil {
				return errors.Join(append(errs, err)...)
			}
			own[f.Family] = local
		}
		start := time.Now()
		read, deleted, err := r.session.RemoveIf(ctx, f, func(fl *conntrack.Flow) bool {
			r.mu.RLock()
			defer r.mu.RUnlock()
			return r.index.stale(fl, own[fl.Family], unknown)
		})
		s := Sweep{Family: f.Family, Protocol: netlink.ProtocolOf(f.Protocol), Full: full, Read: read, Deleted: deleted,
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

// closeSession closes the sockets of passes, if there are any.
func (r *Reconciler) closeSession() {
	if r.session != nil {
		r.session.Close()
		r.session = nil
	}
}
