package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"nodeproxy/config"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/metrics"
	"nodeproxy/nftables"
	"nodeproxy/node/exclusive"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

var nftablesMode = mode{
	name:    "nftables",
	flows:   flows.Config{ResetTCP: func(sp *plan.ServicePort) bool { return sp.ResetTCP }},
	check:   func(c modeConfig) error { return nftables.Check(c.nftables()) },
	prepare: prepareNFTables,
	open:    openNFTables,
	render:  renderNFTables,
	machine: func(cfg *config.Config, _, near *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
		return nftables.Machine(near, f, renderedNFTables(cfg)), nil
	},
	diff:   diffNFTables,
	remove: removeNFTables,
}

func (c modeConfig) nftables() nftables.Config {
	sockets, _ := c.kernel.(*nftables.Sockets)
	return nftables.Config{
		Families: c.families, MasqueradeBit: c.MasqueradeBit, Count: c.ServiceMetrics > 0, Failed: c.metrics.NFTablesFailed, Compared: c.compared,
		Warn: c.warn, Refused: c.refused, Clients: c.metrics.AffinityClients, Sockets: sockets, Log: c.log,
	}
}

// prepareNFTables tries what the mode needs, which loads modules of the kernel.
func prepareNFTables(_ context.Context, cfg *config.Config, log *slog.Logger) error {
	return nftables.Check(nftables.Config{Families: plan.Families[:], MasqueradeBit: cfg.MasqueradeBit, Log: log})
}

func openNFTables(c modeConfig) (*openMode, error) {
	b, err := nftables.New(c.nftables())
	if err != nil {
		return nil, err
	}
	return &openMode{
		backend: b, compare: b.Compare, unchanged: b.Unchanged, unfinished: b.Unfinished, close: b.Close,
		machine: func(_, near *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
			return b.Machine(near, f), nil
		},
		traffic: func() metrics.TrafficReader { return b.Traffic() },
	}, nil
}

// renderedNFTables are the options on a node with the kernel's default settings.
func renderedNFTables(cfg *config.Config) nftables.Options {
	return nftables.Options{MasqueradeBit: cfg.MasqueradeBit, Count: cfg.ServiceMetrics > 0}
}

func renderNFTables(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	var out strings.Builder
	for _, f := range families {
		out.WriteString(nftables.Render(desired, f, renderedNFTables(cfg)))
	}
	return out.String()
}

// diffNFTables compares the table of a family.
func diffNFTables(from, to *side, f plan.Family) ([]drift.Hunk, error) {
	options := func(s *side) nftables.Options {
		return nftables.Options{MasqueradeBit: s.cfg.MasqueradeBit, TCPLiberal: conntrack.TCPLiberal(), Count: s.cfg.ServiceMetrics > 0}
	}
	var have, want *nftables.Table
	var err error
	switch {
	case from.kernel():
		o := nftables.Options{}
		if !to.nothing() {
			o = options(to)
		}
		if have, err = nftables.Read(nil, f, o); err != nil && (!to.nothing() || !errors.Is(err, nft.ErrAbsent)) {
			return nil, err
		}
	case !from.nothing():
		have = nftables.Planned(from.desired, f, options(from), nil)
	}
	if !to.nothing() {
		want = nftables.Planned(to.desired, f, options(to), have)
	}
	return nftables.Diff(f, have, want), nil
}

// removeNFTables removes the tables. Connections that they have translated continue, since the translation is kept with the connection.
func removeNFTables(_ context.Context, r removal) error {
	sockets, _ := r.kernel.(*nftables.Sockets)
	left, err := sockets.Leftovers()
	if err != nil || len(left) == 0 {
		return err
	}
	if r.list != nil {
		for _, f := range left {
			r.list("nftables table " + nft.FamilyName(f) + " " + names.NFTables)
		}
	}
	if r.dry {
		return nil
	}
	r.log.Info("this node was in mode nftables before; its tables are removed")
	return sockets.Cleanup()
}

// handOver leaves rules that a kube-proxy in mode nftables does not remove before it has its own, if one is to follow. Where that is not
// possible, what is in the kernel stays.
func (d *daemon) handOver() {
	if !d.cfg.HandOver || d.comesBack() {
		return
	}
	if other := d.other(); other != nil {
		d.log.Warn("the rules are not handed over, as another proxy runs here and has its own: " + other.String())
		return
	}
	s := d.proxier.Snapshot()
	if s == nil || s.Partial {
		d.log.Warn("the rules are not handed over to kube-proxy, as not all Services are known")
		return
	}
	start := time.Now()
	err := nftables.HandOver(s.Plan(), d.backend.Families(), nftables.Options{MasqueradeBit: d.cfg.MasqueradeBit})
	if err != nil {
		d.log.Warn("the rules are not handed over to kube-proxy", "error", err)
		return
	}
	d.log.Info("what the rules do is in the tables of a kube-proxy in mode nftables too, until it has its own", "took", time.Since(start))
}

// other returns a proxy that runs here, if there are tables of a kube-proxy: they are in use, as what this program has found of that kind
// when it started is gone. nil if there is none.
func (d *daemon) other() *exclusive.Proxy {
	if in, err := nft.FamiliesWith(names.KubeProxy); err != nil || len(in) == 0 {
		return nil
	}
	guard := exclusive.Guard{Ports: proxyPorts(d.cfg), Log: d.log}
	return guard.Beside()
}

// askLast is how long a program that ends asks whether kube-proxy follows.
const askLast = 2 * time.Second

// comesBack reports whether kube-proxy is known not to follow: it is deployed, but not for this node.
func (d *daemon) comesBack() bool {
	if d.client == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), askLast) // d.ctx has ended.
	defer cancel()
	_, wants, err := d.client.KubeProxyWants(ctx, d.cfg.NodeName)
	return err == nil && !wants
}
