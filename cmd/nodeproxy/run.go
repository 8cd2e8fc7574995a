package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/proxier"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
	"nodeproxy/proxier/source/apiserver"
	"nodeproxy/proxier/source/manifest"
)

func runCommand() *cobra.Command {
	flags := &config.Flags{}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Keep this node's rules equal to what the Services ask for",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := flags.Config()
			if err != nil {
				return &usageError{err}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			return run(ctx, cfg, newLog(cfg))
		},
	}
	flags.Add(cmd.Flags())
	return cmd
}

// run serves until ctx ends. The rules stay when it returns.
func run(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	backend, err := iptables.New(iptables.Config{
		Variant: cfg.IPTablesBackend, Families: hostFamilies(log), MasqueradeBit: cfg.MasqueradeBit, Log: log,
	})
	if err != nil {
		return err
	}
	report := reporter(log)
	objects, from, err := objectSource(ctx, cfg, report, log)
	if err != nil {
		return err
	}
	p := proxier.New(proxier.Config{
		NodeName: cfg.NodeName, Settings: cfg.Settings, Families: backend.Families(), Backend: backend,
		MinSyncPeriod: cfg.MinSyncPeriod, Report: report, Log: log,
	})
	log.Info("starting", "version", version, "mode", cfg.Mode, "node", cfg.NodeName, "objects-from", from)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		defer cancel()
		failed <- objects.Run(ctx, p)
	}()
	p.Run(ctx)
	cancel()
	if err := <-failed; err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("reading objects from %s: %w", from, err)
	}
	log.Info("stopped; the rules stay in force")
	return nil
}

// objectSource makes the source that the configuration asks for, and names it.
func objectSource(ctx context.Context, cfg *config.Config, report source.Report, log *slog.Logger) (source.Source, string, error) {
	if cfg.Manifests != "" {
		s, err := manifest.New(manifestConfig(cfg, report, log))
		return s, cfg.Manifests, err
	}
	apiserver.RedirectLogs(log)
	client, err := apiserver.NewClient(apiserver.ClientConfig{
		Kubeconfig: cfg.API.Kubeconfig, Master: cfg.API.Master, ContentType: cfg.API.ContentType,
		QPS: cfg.API.QPS, Burst: cfg.API.Burst, UserAgent: "nodeproxy/" + version,
	})
	if err != nil {
		return nil, "", &usageError{err}
	}
	events := apiserver.NewEvents(client, cfg.NodeName, "nodeproxy", log)
	go events.Run(ctx)
	events.Normal("Starting", "StartNodeproxy", "")
	return apiserver.New(apiserver.Config{Client: client, NodeName: cfg.NodeName, Log: log, Report: report}), "the API server", nil
}

func manifestConfig(cfg *config.Config, report source.Report, log *slog.Logger) manifest.Config {
	return manifest.Config{
		Path: cfg.Manifests, ServiceCIDRs: cfg.ServiceCIDRs,
		NodePorts: manifest.PortRange{First: cfg.NodePorts.First, Last: cfg.NodePorts.Last}, Report: report, Log: log,
	}
}

// reporter logs findings: problems as warnings, notes at level info.
func reporter(log *slog.Logger) source.Report {
	return func(f source.Finding) {
		level := slog.LevelInfo
		if f.Severity == source.Problem {
			level = slog.LevelWarn
		}
		var attrs []slog.Attr
		for _, a := range [][2]string{{"at", f.Where}, {"object", f.Object}, {"field", f.Field}, {"effect", f.Effect}} {
			if a[1] != "" {
				attrs = append(attrs, slog.String(a[0], a[1]))
			}
		}
		log.LogAttrs(context.Background(), level, f.Detail, attrs...)
	}
}

// hostFamilies are the families that this node can forward: IPv4 always, IPv6 unless the kernel has it off.
func hostFamilies(log *slog.Logger) []plan.Family {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		log.Info("IPv4 only: this kernel has no IPv6")
		return []plan.Family{plan.IPv4}
	}
	if off, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6"); err == nil && strings.TrimSpace(string(off)) == "1" {
		log.Info("IPv4 only: IPv6 is switched off by net.ipv6.conf.all.disable_ipv6")
		return []plan.Family{plan.IPv4}
	}
	return plan.Families[:]
}
