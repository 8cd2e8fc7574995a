// Package nftables turns a plan into a table of nftables for each family, and keeps the kernel equal to it.
//
// Services and endpoints are elements of maps (element.go). A map gives each frontend the number of a kind (kind.go), which says how its
// traffic is treated; each kind in use has a chain. So chains and rules (layout.go, rule.go) do not grow with the number of
// Services. An engine remembers what the kernel holds, and writes the differences in transactions (engine.go). Everything goes over
// netlink; no program is run.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"nodeproxy/backend"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Config configures a Backend.
type Config struct {
	// Families are the address families to program.
	Families []plan.Family
	// MasqueradeBit is Options.MasqueradeBit.
	MasqueradeBit int
	// Count is Options.Count.
	Count bool
	// Failed is called after each failed transaction. cleanup says that the transaction only removed unused objects.
	Failed func(f plan.Family, cleanup bool)
	// Compared, if not nil, is called after each sync that compared the kernel with what had been written, once for all
	// families. The first sync, and the one after an error, have nothing to compare with. It must not block.
	Compared func(drift.Report)
	// Warn is called once for each scheduler that Services ask for and the mode does not have, and when a share of affinity has nearly no
	// room left for clients. It must not block.
	Warn func(string)
	// Refused is called with all ServicePorts of a family that the kernel does not take, whenever these are others than
	// before. It must not block.
	Refused func(plan.Family, []plan.Refusal)
	// Clients is called at each comparison of a family with how many clients each share of affinity remembers, unless the kernel
	// does not tell. It must not block.
	Clients func(f plan.Family, share, clients int)
	// Sockets, if not nil, take the place of those of the kernel.
	Sockets *Sockets
	Log     *slog.Logger
}

// Sockets open connections to nf_tables.
type Sockets struct {
	// Open opens one for requests.
	Open func() (netlink.Socket, error)
	// Subscribe opens one for notifications.
	Subscribe func() (nft.Notifications, error)
}

// dial opens a connection; s may be nil.
func (s *Sockets) dial() (*nft.Conn, error) {
	if s == nil {
		return nft.Dial()
	}
	socket, err := s.Open()
	if err != nil {
		return nil, err
	}
	return nft.NewConn(socket), nil
}

// read opens a connection that nothing is written with.
func (s *Sockets) read() (kernel, error) {
	c, err := s.dial()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// read opens a connection to the kernel that nothing is written with.
func read() (kernel, error) { return (*Sockets)(nil).read() }

// subscribe opens a socket for notifications; s may be nil.
func (s *Sockets) subscribe() (nft.Notifications, error) {
	if s == nil {
		return nft.Subscribe()
	}
	return s.Subscribe()
}

// Backend keeps tables equal to a plan. Sync is not safe for concurrent use.
type Backend struct {
	backend.PerFamily[*engine]
	ports   *ownPorts
	sockets *Sockets
}

// New finds out what the kernel can do. It changes nothing. A family for which the kernel lacks something is left out with a warning
// (Families returns the rest); New fails if none remains.
func New(cfg Config) (*Backend, error) {
	b := &Backend{ports: &ownPorts{}, sockets: cfg.Sockets}
	dial := func() (kernel, error) { return b.ports.dial(cfg.Sockets) }
	b.Compared, b.Log = cfg.Compared, cfg.Log // The engines wait for each other, as they share the kernel's lock on nftables.
	options := Options{MasqueradeBit: cfg.MasqueradeBit, TCPLiberal: conntrack.TCPLiberal(), Count: cfg.Count}
	asked := &askedFor{warn: cfg.Warn, known: map[string]bool{}}
	var err error
	b.Engines, err = backend.Open("nftables", cfg.Families, cfg.Log, func(f plan.Family) (*engine, error) {
		e := newEngine(f, options, cfg.Log, dial)
		e.reader = cfg.Sockets.read
		e.failed, e.onRefused, e.warn, e.onClients = cfg.Failed, cfg.Refused, cfg.Warn, cfg.Clients
		e.asked = asked
		return e, try(cfg.Sockets, f, options)
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

func newEngine(f plan.Family, o Options, log *slog.Logger, dial func() (kernel, error)) *engine {
	return &engine{family: f, failed: func(plan.Family, bool) {}, onRefused: func(plan.Family, []plan.Refusal) {},
		warn: func(string) {}, onClients: func(plan.Family, int, int) {}, options: o, log: log, dial: dial, reader: read, most: mostInTransaction, mostListed: mostListed,
		mostAtOnce: mostAtOnce, sets: o.sets(f)}
}

// Check returns the error that New would return. It may load kernel modules, and changes nothing else.
func Check(cfg Config) error {
	_, err := New(cfg)
	return err
}

// trialTable is the name of a table that never exists: the transaction that adds it fails at its last step.
const trialTable = names.NFTables + "-trial"

// try returns an error if the kernel rejects the sets, chains or rules of a table.
func try(s *Sockets, f plan.Family, o Options) error {
	c, err := s.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	l := &layout{family: f, options: o}
	b := nft.NewBatch(f, trialTable)
	b.AddTable()
	for _, s := range o.sets(f) {
		b.AddSet(s)
	}
	all := map[kind]bool{}
	for t := internal; t <= within; t++ {
		all[kind{treatment: t, count: 1}] = true
		all[kind{treatment: t, count: 1, affinity: 1}] = true
		all[kind{treatment: t, count: 1, schedule: bySourcePort}] = true
	}
	if err := b.AddChains(append(l.kindChains(all), l.chains()...)); err != nil {
		return err
	}
	return rehearse(c, b)
}

// Close closes the backend's sockets, and leaves what it has programmed. Neither Sync nor Compare nor Watch may be running, nor be called after it.
func (b *Backend) Close() error {
	var errs []error
	for _, e := range b.Engines {
		if e.kernel != nil {
			errs = append(errs, e.kernel.Close())
			e.kernel = nil
		}
	}
	return errors.Join(errs...)
}

// Unfinished reports whether the last Sync has changed some frontends of a ServicePort only, as it has many. The next one goes on, whatever its
// change is. It must not be called during a Sync.
func (b *Backend) Unfinished() bool {
	return slices.ContainsFunc(b.Engines, func(e *engine) bool { return len(e.unfinished) > 0 })
}

// Leftovers lists the families that have a table of mode nftables; s may be nil.
func (s *Sockets) Leftovers() (list []plan.Family, err error) {
	err = s.use(func(c *nft.Conn) error {
		list, err = c.FamiliesWith(names.NFTables)
		return err
	})
	return list, err
}

// Cleanup removes the tables, including the remembered clients of session affinity; s may be nil.
func (s *Sockets) Cleanup() error {
	return s.use(func(c *nft.Conn) error { return c.RemoveTables(names.NFTables) })
}

// use opens a connection for a function. Without nftables, it does nothing.
func (s *Sockets) use(do func(*nft.Conn) error) error {
	c, err := s.dial()
	if errors.Is(err, nft.ErrAbsent) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c)
}

// ownPorts is the set of the netlink ports of the sockets with which this backend writes. By them, it recognises notifications of its
// own changes.
type ownPorts struct{ sync.Map }

func (p *ownPorts) dial(s *Sockets) (kernel, error) {
	c, err := s.dial()
	if err != nil {
		return nil, err
	}
	p.Store(c.Port(), true)
	return c, nil
}

// Watch calls suspect, with the reason, when another program may have changed a table of ours. It begins with a call: nothing reports what
// happened since the first sync has read the table. It returns when ctx ends, or with an error if it can't watch: then only comparisons
// that are due by time detect changes.
func (b *Backend) Watch(ctx context.Context, suspect func(why string)) error {
	watch, err := nft.Watch(b.sockets.subscribe, names.NFTables)
	if err != nil {
		return err
	}
	suspect("changes by other programs were not watched for until now")
	watch(ctx, func(c nft.Change) {
		if _, own := b.ports.Load(c.Port); !own && slices.Contains(b.Families(), c.Family) {
			suspect(fmt.Sprintf("table %s %s of nftables was changed", nft.FamilyName(c.Family), names.NFTables))
		}
	}, func(err error) {
		suspect(fmt.Sprintf("notifications of nftables were lost: %v", err))
	})
	return nil
}
