package ipvs

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Watch calls suspect, with the reason, when another program may have changed what Sync has written: at once for rules, the guard
// of marks, addresses and routes, later for what counting virtual servers and entries of sets does not show (probe.go). What counting
// shows, it repairs itself. It begins with a call, since nothing has watched since the first Sync. It returns when ctx ends, or with an
// error if it can't watch: then only a comparison of everything finds changes.
func (b *Backend) Watch(ctx context.Context, suspect func(why string)) error {
	device, err := b.node.WatchDevice()
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	running.Go(func() {
		device(ctx, func(c host.DeviceChange) {
			if slices.ContainsFunc(b.Engines, func(e *engine) bool { return e.contradicts(c) }) {
				suspect(fmt.Sprintf("interface %s: %s", names.Device, c))
			}
		})
	})
	if len(b.node.Guards) > 0 {
		guards, err := b.node.WatchTables()
		if err != nil {
			return err
		}
		running.Go(func() {
			guards(ctx, func(f plan.Family) {
				for _, e := range b.Engines {
					if e.family != f {
						continue
					}
					if why := e.tablesDiffer(); why != "" {
						suspect(why)
					}
				}
			})
		})
	}
	for _, e := range b.Engines {
		rules, err := b.node.WatchRules(b.node.Tables[e.family])
		if err != nil {
			return fmt.Errorf("watching for changes of iptables rules by other programs: %w", err)
		}
		running.Go(func() { rules(ctx, suspect) })
	}
	suspect("changes by other programs were not watched for until now")
	b.probe(ctx, suspect)
	return nil
}

// contradicts reports whether a change of the device differs from what was written last. It waits for a sync to end, so that the sync's
// own changes are not taken for another program's.
func (e *engine) contradicts(c host.DeviceChange) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.desired == nil: // The next sync compares everything.
		return false
	case c.PortRule:
		return c.Family == e.family && e.actual.ports.complete
	case c.ByPort:
		return e.actual.ports.routes.Has(c.Route.Addr())
	case c.Route.IsValid():
		_, made := e.actual.routes[c.Route]
		return made
	case c.Address.IsValid():
		if plan.FamilyOf(c.Address) != e.family {
			return false
		}
		return (e.actual.vips.Has(c.Address) || e.actual.ports.unrouted.Has(c.Address)) == c.Gone
	}
	return true
}

// tablesDiffer says which nftables table has changed; "" for none, or if the next sync compares everything.
func (e *engine) tablesDiffer() string {
	e.mu.Lock() // a sync uses the same socket
	defer e.mu.Unlock()
	if e.desired == nil {
		return ""
	}
	if e.machine.guard != nil {
		if intact, err := e.machine.guard.Intact(); err != nil || !intact {
			return fmt.Sprintf("nftables table %s (%s) was changed", names.IPVSMarks, e.family)
		}
	}
	return e.portsDiffer()
}
