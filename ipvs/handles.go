package ipvs

import (
	"cmp"
	"errors"
	"fmt"

	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// handles are what this mode programs this node with, as far as its kernel and programs support it. Opening them loads modules and
// changes nothing else.
type handles struct {
	servers *ipvs.Servers
	sets    *ipset.Sets
	tables  map[plan.Family]*xtables.Tables
	guards  map[plan.Family]*nftrules.Guards // none on a kernel without nftables
	ports   map[plan.Family]*nftrules.Ports  // none on a kernel that can't divert ports
	// missing are the reasons why families have no tables.
	missing []error
}

func newHandles() *handles {
	return &handles{tables: map[plan.Family]*xtables.Tables{}, guards: map[plan.Family]*nftrules.Guards{},
		ports: map[plan.Family]*nftrules.Ports{}}
}

// openHandles opens what a configuration needs, and sets its defaults. An error names what is missing.
func openHandles(cfg *Config) (*handles, error) {
	cfg.Scheduler = cmp.Or(cfg.Scheduler, DefaultScheduler)
	if cfg.Variant == "" {
		cfg.Variant = xtables.Detect()
	}
	h, err := openKernel(cfg.Scheduler)
	if err != nil {
		return nil, err
	}
	for _, f := range cfg.Families {
		if t, err := xtables.NewTables(cfg.Variant, f, cfg.Log); err != nil {
			h.missing = append(h.missing, fmt.Errorf("%s: %w", f, err))
		} else {
			h.tables[f] = t
		}
	}
	for f := range h.tables {
		if err := h.openTables(f, newMarks(cfg.MasqueradeBit)); err != nil {
			h.close()
			return nil, err
		}
	}
	if len(h.tables) == 0 {
		h.close()
		return nil, errors.Join(h.missing...)
	}
	return h, nil
}

// openTables opens the guard of marks and what diverts ports of a family, as far as the kernel can have them.
func (h *handles) openTables(f plan.Family, m marks) error {
	switch g, err := nftrules.OpenGuards(f, m.guard()); {
	case err == nil:
		h.guards[f] = g
	case !errors.Is(err, nft.ErrAbsent):
		return err
	}
	switch p, err := nftrules.OpenPorts(f); {
	case err == nil:
		h.ports[f] = p
	case !errors.Is(err, nftrules.ErrNoPorts):
		return err
	}
	return nil
}

// machine returns what there is for a family, with the device unless that is nil.
func (h *handles) machine(f plan.Family, d *host.Device) machine {
	m := machine{host: hostAddresses, reader: func() (machine, func(), error) { return openReader(h.servers) }}
	if h.servers != nil {
		m.servers = h.servers
	}
	if h.sets != nil {
		m.sets = h.sets
	}
	if d != nil {
		m.device = d
	}
	if g := h.guards[f]; g != nil {
		m.guard = g
	}
	if p := h.ports[f]; p != nil {
		m.ports = p
	}
	return m
}

// openKernel opens the handles that depend on the kernel alone: all but the tables, guards and ports of the families.
func openKernel(scheduler string) (*handles, error) {
	h := newHandles()
	var err error
	if h.servers, err = ipvs.OpenServers(); err != nil {
		return nil, err
	}
	if h.sets, err = ipset.OpenSets(); err == nil && !h.servers.HasScheduler(scheduler) {
		err = fmt.Errorf("--ipvs-scheduler: this kernel has no scheduler %q (module ip_vs_%s)", scheduler, scheduler)
	}
	if err == nil {
		err = host.CheckDevice(names.Device)
	}
	if err != nil {
		h.close()
		return nil, err
	}
	return h, nil
}

// close closes the sockets.
func (h *handles) close() {
	if h.servers != nil {
		_ = h.servers.Close()
	}
	if h.sets != nil {
		_ = h.sets.Close()
	}
	for _, g := range h.guards {
		_ = g.Close()
	}
	for _, p := range h.ports {
		_ = p.Close()
	}
}
