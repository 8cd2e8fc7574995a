package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/proxier"
	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
	"nodeproxy/proxier/source/apiserver"
	"nodeproxy/proxier/source/manifest"
)

// daemon is one run of the program with one configuration: a source, the proxier, a backend.
type daemon struct {
	log     *slog.Logger
	proxier *proxier.Proxier
	objects source.Source
	from    string // names the source
}

func newDaemon(ctx context.Context, cfg *config.Config, report source.Report, log *slog.Logger) (*daemon, error) {
	backend, err := iptables.New(iptables.Config{
		Variant: cfg.IPTablesBackend, Families: hostFamilies(log), MasqueradeBit: cfg.MasqueradeBit, Log: log,
	})
	if err != nil {
		return nil, err
	}
	d := &daemon{log: log}
	if d.objects, d.from, err = objectSource(ctx, cfg, report, log); err != nil {
		return nil, err
	}
	d.proxier = proxier.New(proxier.Config{
		NodeName: cfg.NodeName, Settings: cfg.Settings, Families: backend.Families(), Backend: backend,
		MinSyncPeriod: cfg.MinSyncPeriod, Report: report, Log: log,
	})
	return d, nil
}

// run serves until ctx ends or the source fails for good.
func (d *daemon) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		defer cancel()
		failed <- d.objects.Run(ctx, d.proxier)
	}()
	d.proxier.Run(ctx)
	cancel()
	if err := <-failed; err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("reading objects from %s: %w", d.from, err)
	}
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
		AcceptContentTypes: cfg.API.AcceptContentTypes, QPS: cfg.API.QPS, Burst: cfg.API.Burst,
		UserAgent: "nodeproxy/" + version,
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
