package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"

	"nodeproxy/config"
	"nodeproxy/ipvs"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

var ipvsMode = mode{
	name:    "ipvs",
	flows:   flows.Config{StrayAnswers: true}, // ResetTCP would not change the table of connections that IPVS has of its own.
	check:   func(c modeConfig) error { return ipvs.Check(c.ipvs()) },
	prepare: prepareIPVS,
	open:    openIPVS,
	render:  renderIPVS,
	machine: func(cfg *config.Config, _, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error) {
		return ipvs.Machine(near, f, renderedIPVS(cfg).On(near, local))
	},
	rules:  rulesOfIPVS,
	diff:   diffIPVS,
	remove: removeIPVS,
}

func (c modeConfig) ipvs() ipvs.Config {
	node, _ := c.kernel.(*ipvs.Node)
	return ipvs.Config{
		Options: ipvs.Options{MasqueradeBit: c.MasqueradeBit, Scheduler: c.IPVS.Scheduler, VIPs: ipvs.VIPs(c.IPVS.VIPs)},
		Variant: variant(c.IPTablesBackend), Families: c.families, ExcludeCIDRs: c.IPVS.ExcludeCIDRs, StrictARP: c.IPVS.StrictARP,
		TCPTimeout: c.IPVS.TCPTimeout, TCPFinTimeout: c.IPVS.TCPFinTimeout, UDPTimeout: c.IPVS.UDPTimeout,
		GracePeriod: c.IPVS.GracePeriod, SysctlDir: c.SysctlDir, Warn: c.warn,
		RestoreFailed: func(f plan.Family) { c.metrics.RestoreFailed(f, false) },
		Compared:      c.compared, NativeRules: c.nativeRules, Refused: c.refused, Node: node, Log: c.log,
	}
}

func prepareIPVS(_ context.Context, cfg *config.Config, log *slog.Logger) error {
	return ipvs.Prepare(ipvs.Config{
		Options: ipvs.Options{Scheduler: cfg.IPVS.Scheduler}, StrictARP: cfg.IPVS.StrictARP, SysctlDir: cfg.SysctlDir, Log: log,
	})
}

func openIPVS(c modeConfig) (*openMode, error) {
	b, err := ipvs.New(c.ipvs())
	if err != nil {
		return nil, err
	}
	return &openMode{
		machine: func(_, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error) {
			return b.Machine(near, f, local)
		},
		backend: b, compare: b.Compare, unfinished: b.Unfinished, run: b.Run, close: b.Close,
		traffic: func() metrics.TrafficReader { return b.Traffic() },
	}, nil
}

// renderedIPVS are the options on a node whose iptables and kernel can do everything.
func renderedIPVS(cfg *config.Config) ipvs.Options {
	return ipvs.Options{
		MasqueradeBit: cfg.MasqueradeBit, RandomFully: true, Scheduler: cfg.IPVS.Scheduler, VIPs: ipvs.VIPs(cfg.IPVS.VIPs),
	}
}

func rulesOfIPVS(cfg *config.Config, p *plan.Plan, f plan.Family, randomFully bool, _ map[names.Table]xtables.Content) xtables.Desired {
	options := renderedIPVS(cfg)
	options.RandomFully, options.TCPLiberal = randomFully, conntrack.TCPLiberal()
	return ipvs.Rules(p, f, options)
}

func renderIPVS(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	options := renderedIPVS(cfg)
	if len(families) == 1 {
		return ipvs.Render(desired, families[0], options)
	}
	var out strings.Builder
	for _, f := range families {
		fmt.Fprintf(&out, "# %s\n%s", f, ipvs.Render(desired, f, options))
	}
	return out.String()
}

// diffIPVS compares virtual servers, sets, addresses and kernel settings.
func diffIPVS(from, to *side, f plan.Family) ([]drift.Hunk, error) {
	configOf := func(s *side) ipvs.Config {
		c := ipvs.Config{ExcludeCIDRs: s.cfg.IPVS.ExcludeCIDRs, StrictARP: s.cfg.IPVS.StrictARP, SysctlDir: s.cfg.SysctlDir}
		c.Options = renderedIPVS(s.cfg)
		return c
	}
	var have, want *ipvs.Objects
	var found *ipvs.Options // of the node
	var err error
	switch {
	case from.kernel():
		if to.nothing() { // What is there may be of a mode that was in force before.
			if left, err := ipvs.Leftovers(); err != nil || !left {
				return nil, err
			}
		}
		var o ipvs.Options
		if have, o, err = ipvs.Read(configOf(from), f, to.nothing()); err != nil {
			return nil, err
		}
		found = &o
	case !from.nothing():
		if have, err = ipvs.Planned(from.desired, f, configOf(from)); err != nil {
			return nil, err
		}
	}
	if !to.nothing() {
		c := configOf(to)
		if found != nil {
			c.Options = *found
		}
		if want, err = ipvs.Planned(to.desired, f, c); err != nil {
			return nil, err
		}
	}
	return ipvs.Diff(f, have, want), nil
}

// removeIPVS leaves everything where neither the device nor a set is there: then virtual servers belong to another program.
func removeIPVS(ctx context.Context, r removal) error {
	node, simulated := r.kernel.(*ipvs.Node)
	if !simulated {
		if left, err := ipvs.Leftovers(); err != nil || !left {
			return err
		}
	}
	c := ipvs.Cleaner{ExcludeCIDRs: r.cfg.IPVS.ExcludeCIDRs, MasqueradeBit: r.cfg.MasqueradeBit, Node: node, Log: r.log}
	if r.wait {
		c.GracePeriod = r.cfg.IPVS.GracePeriod
	}
	if r.list != nil {
		lines, err := c.List()
		for _, line := range lines {
			r.list(line)
		}
		if err != nil {
			return err
		}
	}
	if r.dry {
		return nil
	}
	r.log.Info("this node was in mode ipvs before; what is left of that is removed as its connections end")
	return c.Run(ctx)
}
