package main

import (
	"context"
	"log/slog"
	"strings"

	"nodeproxy/config"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/nftables"
	"nodeproxy/node/flows"
	"nodeproxy/plan"
)

var nftablesMode = mode{
	name:    "nftables",
	flows:   flows.Config{ResetTCP: func(sp *plan.ServicePort) bool { return sp.ResetTCP }},
	check:   func(c modeConfig) error { return nftables.Check(c.nftables()) },
	prepare: prepareNFTables,
	open:    openNFTables,
	render:  renderNFTables,
	remove:  removeNFTables,
	// It has no chains of iptables.
	withoutIPTables: true,
}

func (c modeConfig) nftables() nftables.Config {
	return nftables.Config{
		Families: c.families, MasqueradeBit: c.MasqueradeBit, Failed: c.metrics.NFTablesFailed, Compared: c.compared, Log: c.log,
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
	return &openMode{backend: b, close: b.Close}, nil
}

func renderNFTables(cfg *config.Config, desired *plan.Plan, families []plan.Family) string {
	var out strings.Builder
	for _, f := range families {
		out.WriteString(nftables.Render(desired, f, nftables.Options{MasqueradeBit: cfg.MasqueradeBit}))
	}
	return out.String()
}

// removeNFTables removes the tables. Connections that they have translated continue, since the translation is kept with the connection.
func removeNFTables(_ context.Context, r removal) error {
	left, err := nftables.Leftovers()
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
	return nftables.Cleanup()
}
