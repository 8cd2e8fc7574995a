package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"nodeproxy/config"
	"nodeproxy/ipvs"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
)

var ipvsMode = mode{
	name:    "ipvs",
	flows:   flows.Config{StrayAnswers: true}, // ResetTCP would not change the table of connections that IPVS has of its own.
	check:   func(c modeConfig) error { return ipvs.Check(c.ipvs()) },
	prepare: prepareIPVS,
	open:    openIPVS,
	render:  renderIPVS,
	remove:  removeIPVS,
}

func (c modeConfig) ipvs() ipvs.Config {
	return ipvs.Config{
		Options: ipvs.Options{MasqueradeBit: c.MasqueradeBit, Scheduler: c.IPVS.Scheduler, VIPs: c.IPVS.VIPs},
		Variant: c.IPTablesBackend, Families: c.families, ExcludeCIDRs: c.IPVS.ExcludeCIDRs, StrictARP: c.IPVS.StrictARP,
		TCPTimeout: c.IPVS.TCPTimeout, TCPFinTimeout: c.IPVS.TCPFinTimeout, UDPTimeout: c.IPVS.UDPTimeout,
		GracePeriod: c.IPVS.GracePeriod, SysctlDir: c.SysctlDir, Warn: c.warn,
		RestoreFailed: func(f plan.Family) { c.metrics.RestoreFailed(f, false) },
		Compared:      c.compared, NativeRules: c.nativeRules, Refused: c.refused, Log: c.log,
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
		backend: b, run: b.Run, close: b.Close,
		traffic: func() (metrics.TrafficReader, func(*plan.Plan, plan.Change)) { return b.Traffic(), nil },
	}, nil
}

func renderIPVS(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	options := ipvs.Options{
		MasqueradeBit: cfg.MasqueradeBit, RandomFully: true, Scheduler: cfg.IPVS.Scheduler, VIPs: cfg.IPVS.VIPs,
	}
	if len(families) == 1 {
		return ipvs.Render(desired, families[0], options)
	}
	var out strings.Builder
	for _, f := range families {
		fmt.Fprintf(&out, "# %s\n%s", f, ipvs.Render(desired, f, options))
	}
	return out.String()
}

// removeIPVS leaves everything where neither the device nor a set is there: then virtual servers belong to another program.
func removeIPVS(ctx context.Context, r removal) error {
	left, err := ipvs.Leftovers()
	if err != nil || !left {
		return err
	}
	c := ipvs.Cleaner{ExcludeCIDRs: r.cfg.IPVS.ExcludeCIDRs, MasqueradeBit: r.cfg.MasqueradeBit, Log: r.log}
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
