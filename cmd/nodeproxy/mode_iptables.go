package main

import (
	"context"
	"log/slog"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
)

var iptablesMode = mode{
	name:    "iptables",
	flows:   flows.Config{ResetTCP: func(sp *plan.ServicePort) bool { return sp.ResetTCP }},
	check:   checkIPTables,
	prepare: prepareIPTables,
	open:    openIPTables,
	render:  renderIPTables,
}

func (c modeConfig) iptables() iptables.Config {
	return iptables.Config{
		Variant: c.IPTablesBackend, Families: c.families, MasqueradeBit: c.MasqueradeBit, KeepCounters: c.ServiceMetrics > 0,
		SysctlDir: c.SysctlDir, Observer: c.metrics, Compared: c.compared, NativeRules: c.nativeRules, Refused: c.refused, Log: c.log,
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
	err := iptables.AllowLocalhostNodePorts(ctx, iptables.Config{Variant: cfg.IPTablesBackend, SysctlDir: cfg.SysctlDir, Log: log})
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
		backend: b, mostAtOnce: b.MostAtOnce(), invalidDropped: b.InvalidDropped, localhostNodePorts: b.LocalhostNodePorts(),
		traffic: func() (metrics.TrafficReader, func(*plan.Plan, plan.Change)) {
			r := b.Traffic()
			return r, r.Update
		},
	}, nil
}

func renderIPTables(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	options := iptables.Options{
		MasqueradeBit: cfg.MasqueradeBit, RandomFully: true, CompactAbove: iptables.DefaultCompactAbove,
		KeepCounters: cfg.ServiceMetrics > 0,
	}
	if len(families) == 1 {
		return iptables.Render(desired, families[0], options)
	}
	return iptables.RenderAll(desired, options)
}
