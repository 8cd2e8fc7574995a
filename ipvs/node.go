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

// node is what this mode needs of a node. Finding it changes nothing but modules, which are loaded.
type node struct {
	servers *ipvs.Servers
	sets    *ipset.Sets
	tables  map[plan.Family]*xtables.Tables
	guards  map[plan.Family]*nftrules.Guards // none on a kernel without nftables
	ports   map[plan.Family]*nftrules.Ports  // none on a kernel that can't divert ports
	// missing are the reasons why families have no tables.
	missing []error
}

// find finds what a configuration needs, and sets its defaults. An error names what is missing.
func find(cfg *Config) (*node, error) {
	cfg.Scheduler = cmp.Or(cfg.Scheduler, DefaultScheduler)
	if cfg.Variant == "" {
		cfg.Variant = xtables.Detect()
	}
	n, err := findInKernel(cfg.Scheduler)
	if err != nil {
		return nil, err
	}
	n.tables, n.guards = map[plan.Family]*xtables.Tables{}, map[plan.Family]*nftrules.Guards{}
	n.ports = map[plan.Family]*nftrules.Ports{}
	for _, f := range cfg.Families {
		if t, err := xtables.NewTables(cfg.Variant, f, cfg.Log); err != nil {
			n.missing = append(n.missing, fmt.Errorf("%s: %w", f, err))
		} else {
			n.tables[f] = t
		}
	}
	if err := errors.Join(n.openGuards(newMarks(cfg.MasqueradeBit).guard()), n.openPorts()); err != nil {
		n.close()
		return nil, err
	}
	if len(n.tables) == 0 {
		n.close()
		return nil, errors.Join(n.missing...)
	}
	return n, nil
}

// openGuards opens the guard of marks of each family that has tables.
func (n *node) openGuards(m nftrules.MarkGuard) error {
	for f := range n.tables {
		switch g, err := nftrules.OpenGuards(f, m); {
		case err == nil:
			n.guards[f] = g
		case !errors.Is(err, nft.ErrAbsent):
			return err
		}
	}
	return nil
}

// openPorts opens what diverts ports of each family that has tables.
func (n *node) openPorts() error {
	for f := range n.tables {
		switch p, err := nftrules.OpenPorts(f); {
		case err == nil:
			n.ports[f] = p
		case !errors.Is(err, nftrules.ErrNoPorts):
			return err
		}
	}
	return nil
}

// findInKernel finds all but tables.
func findInKernel(scheduler string) (*node, error) {
	n := &node{}
	var err error
	if n.servers, err = ipvs.OpenServers(); err != nil {
		return nil, err
	}
	if n.sets, err = ipset.OpenSets(); err == nil && !n.servers.HasScheduler(scheduler) {
		err = fmt.Errorf("--ipvs-scheduler: this kernel has no scheduler %q (module ip_vs_%s)", scheduler, scheduler)
	}
	if err == nil {
		err = host.CheckDevice(names.Device)
	}
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// close closes the sockets.
func (n *node) close() {
	_ = n.servers.Close()
	if n.sets != nil {
		_ = n.sets.Close()
	}
	for _, g := range n.guards {
		_ = g.Close()
	}
	for _, p := range n.ports {
		_ = p.Close()
	}
}
