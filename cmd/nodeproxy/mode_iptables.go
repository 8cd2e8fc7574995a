package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

var iptablesMode = mode{
	name:    "iptables",
	flows:   flows.Config{ResetTCP: func(sp *plan.ServicePort) bool { return sp.ResetTCP }},
	check:   checkIPTables,
	prepare: prepareIPTables,
	open:    openIPTables,
	render:  renderIPTables,
	machine: func(cfg *config.Config, whole, near *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
		return iptables.Machine(whole, near, f, renderedIPTables(cfg))
	},
	rules: rulesOfIPTables,
}

func (c modeConfig) iptables() iptables.Config {
	tables, _ := c.kernel.(*iptables.Tables)
	return iptables.Config{
		Variant: variant(c.IPTablesBackend), Families: c.families, MasqueradeBit: c.MasqueradeBit, KeepCounters: c.ServiceMetrics > 0,
		SysctlDir: c.SysctlDir, Observer: c.metrics, Compared: c.compared, NativeRules: c.nativeRules, Refused: c.refused, Tables: tables, Log: c.log,
	}
}

func checkIPTables(c modeConfig) error {
	_, err := iptables.New(c.iptables())
	return err
}

// prepareIPTables writes the kernel setting that node ports at 127.0.0.1 need.
func prepareIPTables(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	if !cfg.Settings.LocalhostReachable(plan.IPv4) {
		return nil
	}
	err := iptables.AllowLocalhostNodePorts(ctx, iptables.Config{Variant: variant(cfg.IPTablesBackend), SysctlDir: cfg.SysctlDir, Log: log})
	if err != nil {
		log.Warn("node ports will not answer on localhost", "error", err)
	}
	return nil
}

func openIPTables(c modeConfig) (*openMode, error) {
	b, err := iptables.New(c.iptables())
	if err != nil {
		return nil, err
	}
	return &openMode{
		variant: string(b.Variant),
		backend: b, mostAtOnce: b.MostAtOnce(), compare: b.Compare, unchanged: b.Unchanged, close: b.Close,
		invalidDropped: b.InvalidDropped, localhostNodePorts: b.LocalhostNodePorts(),
		machine: func(whole, near *plan.Plan, f plan.Family, _ func(netip.Addr) bool) (*packetsim.Machine, error) {
			return b.Machine(whole, near, f)
		},
		traffic: func() metrics.TrafficReader { return b.Traffic() },
	}, nil
}

// renderedIPTables are the options on a node whose iptables and kernel can do everything.
func renderedIPTables(cfg *config.Config) iptables.Options {
	return iptables.Options{
		MasqueradeBit: cfg.MasqueradeBit, RandomFully: true, CompactAbove: iptables.DefaultCompactAbove,
		KeepCounters: cfg.ServiceMetrics > 0,
	}
}

func rulesOfIPTables(cfg *config.Config, p *plan.Plan, f plan.Family, randomFully bool, actual map[names.Table]xtables.Content) xtables.Desired {
	options := renderedIPTables(cfg)
	options.RandomFully, options.TCPLiberal = randomFully, conntrack.TCPLiberal()
	return iptables.WithGuard(iptables.Desired(p, f, options), p, f, actual)
}

func renderIPTables(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	options := renderedIPTables(cfg)
	if len(families) == 1 {
		return iptables.Render(desired, families[0], options)
	}
	return iptables.RenderAll(desired, options)
}

// cleanupIPTables removes all chains, and returns a line for each thing that it removes. left is what mode iptables has for the kernel, if not nil.
func cleanupIPTables(ctx context.Context, cfg *config.Config, left any) (lines []string, err error) {
	tables, simulated := left.(*iptables.Tables)
	if !simulated {
		return xtables.Cleanup(ctx, false, variants(cfg.IPTablesBackend)...)
	}
	for _, f := range plan.Families {
		w := &xtables.Writer{Kernel: tables.Kernels[f]}
		removed, failed := w.Cleanup(ctx, names.Tables, false)
		lines, err = append(lines, removed...), errors.Join(err, failed)
	}
	return lines, err
}
