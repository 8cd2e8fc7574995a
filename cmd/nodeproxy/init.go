package main

import (
	"context"
	"log/slog"

	"nodeproxy/config"
	"nodeproxy/kernel/conntrack"
)

// initOnly does what needs more rights than the program has to have later: it loads modules and makes kernel settings, those of
// connection tracking and those of the mode. What can't be made is warned of. It is an error only where forwarding can't work
// without it, as in a run: an init container that fails keeps the node from having a proxy at all. It does not wait for another
// proxy, since it takes nothing from any.
func initOnly(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	for _, u := range conntrack.Sysctls(cfg.Conntrack).Apply(cfg.SysctlDir) {
		log.Warn("connections are tracked by what is in force", "field", u.Field, "error", u.Error())
	}
	return modeNamed(cfg.Mode).prepare(ctx, cfg, log)
}
