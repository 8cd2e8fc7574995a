package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/xtables"
	"nodeproxy/metrics"
	"nodeproxy/node/flows"
	"nodeproxy/node/health"
	"nodeproxy/node/memory"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
	"nodeproxy/source/apiserver"
	"nodeproxy/source/controlplane"
	"nodeproxy/source/manifest"
)

// daemon is one run of the program with one configuration: a source, the proxier, a backend, and what runs beside them.
type daemon struct {
	cfg      *config.Config
	mode     *mode
	log      *slog.Logger
	report   source.Report
	machine  machine
	families []plan.Family // of the host
	metrics  *metrics.Set
	objects  source.Source
	from     string                // names the source
	files    *manifest.Source      // it, if it is one of files
	watches  func() []source.Watch // how current the objects are; none for those of files
	// verifyObjects compares the objects that are known with those of the API server; nil without one.
	verifyObjects func(context.Context) ([]source.Compared, []source.Difference)
	// read is what the source delivers until there is a proxier.
	read *proxier.Objects
	// ctx ends when the daemon is to stop. running are all its goroutines, and ended receives what the source ended with.
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	ended   chan error
	// replaced is set before ctx ends if a daemon with another configuration takes the place of this one.
	replaced bool
	// rejected is what was last reported about a configuration file that is not in force.
	rejected atomic.Pointer[string]
	// servers are those of the process.
	servers []*health.Server
	// findings are about the configuration; reports are made once the daemon runs.
	findings []source.Finding
	reports  heldReports

	// What follows is set once this program has the claim.
	backend    *openMode
	proxier    *proxier.Proxier
	flows      *flows.Reconciler
	monitor    *monitor
	refusals   refusals
	lasting    standing[source.Finding]    // findings that no object has
	neighbours standing[inspect.Neighbour] // other programs
	drift      *driftReporter
	witness    *witness

	// client is that of the API server, and location where this is; nil without one.
	client   *apiserver.Client
	location *apiserver.Location

	// event sends the cluster, if there is one, an event about what is wrong on this node, and normalEvent about what is not.
	event       func(reason, action, text string)
	normalEvent func(reason, action string)
}

// machine is what a daemon works with. The zero machine is the one that this process runs on.
type machine struct {
	// api answers in place of the network.
	api http.RoundTripper
	// random is as in apiserver.Config.
	random func(resource string, limit time.Duration) time.Duration
	// kernel takes the place of the kernel, in the type that the mode has for it; nil for the kernel itself. If it is not nil, it is all there is
	// besides the API server: nothing of this machine is looked at, listened at or set.
	kernel any
	// left is, beside such a kernel, what other modes may have left, by their names, in the type that each has for it.
	left map[string]any
	// conntrack and local are as Dial and Local in flows.Config.
	conntrack func() (*netlink.Conn, error)
	local     func(plan.Family) (*host.Local, error)
}

// real reports whether it is the machine that this process runs on.
func (m machine) real() bool { return m.kernel == nil }

// newDaemon makes a daemon that stops when ctx ends. It writes nothing to the kernel, and reads no objects before begin.
func newDaemon(ctx context.Context, m machine, cfg *config.Config, log *slog.Logger) (*daemon, error) {
	d := &daemon{cfg: cfg, mode: modeNamed(cfg.Mode), log: log, machine: m, families: plan.Families[:],
		event: func(_, _, _ string) {}, normalEvent: func(_, _ string) {}, ended: make(chan error, 1), watches: func() []source.Watch { return nil }}
	if m.real() {
		d.families = hostFamilies(log)
	}
	d.read = proxier.NewObjects(cfg.NodeName, nodeIP(cfg), cfg.Settings, d.families)
	d.ctx, d.cancel = context.WithCancel(ctx)
	d.metrics = metrics.New(metrics.Config{Mode: d.mode.name, Version: version, Families: d.families, Start: started, Log: log})
	d.metrics.CollectRESTClient(requests)
	d.refusals.known = map[plan.Key]plan.Refusal{}
	d.drift = &driftReporter{metrics: d.metrics, log: log, event: func(text string) { d.event("DriftRepaired", "RepairRules", text) }}
	d.report, d.findings = d.reports.report, cfg.Findings
	for _, f := range cfg.Findings {
		d.report(f)
	}
	if err := d.open(d.ctx, d.report); err != nil {
		d.cancel()
		return nil, err
	}
	return d, nil
}

// begin begins to read objects. It is called once, before run.
func (d *daemon) begin() {
	d.running.Go(func() {
		defer d.cancel() // Whatever ends, the rest does too.
		err := d.objects.Run(d.ctx, d.read)
		if errors.Is(err, context.Canceled) {
			err = nil
		} else if err != nil {
			err = fmt.Errorf("reading objects from %s: %w", d.from, err)
		}
		d.ended <- err
	})
}

// withEvents has findings reported as events too that ask for that.
func (d *daemon) withEvents(report source.Report) source.Report {
	return func(f source.Finding) {
		report(f)
		if f.Event != "" {
			d.event(f.Event, "ReadObjects", f.String())
		}
	}
}

// heldReports keeps findings until they should be reported. A configuration that is only tried reports none.
type heldReports struct {
	mu   sync.Mutex
	kept []source.Finding
	next source.Report
}

func (h *heldReports) report(f source.Finding) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.next == nil {
		h.kept = append(h.kept, f)
		return
	}
	h.next(f)
}

func (h *heldReports) passTo(next source.Report) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.kept {
		next(f)
	}
	h.kept, h.next = nil, next
}

// stop ends a daemon that does not run. The rules stay.
func (d *daemon) stop() {
	d.cancel()
	d.running.Wait()
}

// await returns when all objects have been read, or with the error for which they can't be.
func (d *daemon) await() error {
	select {
	case <-d.read.Synced():
		return nil
	case <-d.ctx.Done():
		err := <-d.ended
		d.ended <- err
		return cmp.Or(err, context.Cause(d.ctx))
	}
}

// build makes all that brings objects to the kernel, and the settings of the kernel that it needs. Where the mode can't work, no
// setting has changed.
func (d *daemon) build(f *front) error {
	d.servers = f.servers[:]
	cfg := d.cfg
	if err := d.check(); err != nil {
		return err
	}
	trackConnections(cfg, d.keep(d.report)) // Before the mode: some of its rules depend on them.
	var err error
	d.drift.history = &f.history
	if d.backend, err = d.mode.open(d.modeConfig()); err != nil {
		return err
	}
	d.monitor = newMonitor(d, d.backend.Families(), f)
	d.monitor.countTraffic(cfg.ServiceMetrics)
	known := cfg.ServiceCIDRs
	if !cfg.ServiceCIDRsGiven {
		known = nil
	}
	tracked := d.mode.flows
	tracked.Families, tracked.ServiceCIDRs, tracked.Observe, tracked.Log = d.backend.Families(), known, flowsSwept(d.metrics), d.log
	tracked.Dial, tracked.Local = d.machine.conntrack, d.machine.local
	d.flows = flows.New(tracked)
	d.proxier = proxier.New(proxier.Config{
		NodeName: cfg.NodeName, NodeIP: nodeIP(cfg), Settings: cfg.Settings, Families: d.backend.Families(),
		Backend:    d.flows.After(d.backend, d.backend.unfinished),
		MostAtOnce: d.backend.mostAtOnce, Compare: d.backend.compare, Unchanged: d.backend.unchanged, Unfinished: d.backend.unfinished,
		MinSyncPeriod: cfg.MinSyncPeriod, CompareEvery: cfg.SyncPeriod, Observer: d.monitor, Report: unlessSaid(cfg, d.report), Log: d.log,
	})
	d.witness = d.newWitness()
	return nil
}

// nodeIP is the address that takes the place of that of the Node's object; none for the zero Addr.
func nodeIP(cfg *config.Config) netip.Addr {
	if cfg.Servers.Bind.IsUnspecified() {
		return netip.Addr{}
	}
	return cfg.Servers.Bind
}

// trackConnections makes the kernel track connections as configured.
func trackConnections(cfg *config.Config, report source.Report) {
	for _, u := range conntrack.Sysctls(cfg.Conntrack).Apply(cfg.SysctlDir) {
		report(source.Finding{
			Severity: source.Problem, Field: u.Field, Detail: u.Error(), Effect: "connections are tracked by what is in force",
		})
	}
}

// warn sends the cluster an event about what is wrong with the mode on this node.
func (d *daemon) warn(text string) {
	d.event("ModeProblem", "StartNodeproxy", "mode "+d.mode.name+": "+text)
}

// warnAnd reports what is wrong with the mode as an event too.
func (d *daemon) warnAnd(report source.Report) source.Report {
	return func(f source.Finding) {
		report(f)
		d.warn(f.String())
	}
}

// refusals are the ServicePorts that the kernel does not take at present. Families may report theirs at the same time.
type refusals struct {
	mu    sync.Mutex
	known map[plan.Key]plan.Refusal
}

// list returns them in order.
func (r *refusals) list() []plan.Refusal {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.known), func(a, b plan.Refusal) int { return a.Key.Compare(b.Key) })
}

// refused reports the ServicePorts of a family that the kernel does not take, each once as long as that lasts.
func (d *daemon) refused(f plan.Family, list []plan.Refusal) {
	d.refusals.mu.Lock()
	defer d.refusals.mu.Unlock()
	still := map[plan.Key]bool{}
	for _, r := range list {
		still[r.Key] = true
		_, known := d.refusals.known[r.Key]
		if d.refusals.known[r.Key] = r; known {
			continue
		}
		finding := source.Finding{
			Severity: source.Problem, Object: "Service " + r.Key.Service.String(), Detail: r.String(), Effect: r.Effect(),
		}
		d.report(finding)
		d.event("ServiceRefused", "SyncRules", finding.String())
	}
	for k := range d.refusals.known {
		if k.Family == f && !still[k] {
			delete(d.refusals.known, k)
			d.log.Info("the kernel takes ServicePort " + k.String() + " again, or it is gone")
		}
	}
}

// inspected returns what commands ask about; nil before anything can be programmed.
func (d *daemon) inspected() *inspect.Node {
	if d == nil {
		return nil
	}
	var serviceFile func(namespace, name string) string
	if d.files != nil {
		serviceFile = d.files.ServiceFile
	}
	return &inspect.Node{
		ServiceFile: serviceFile, OnlyProxied: d.cfg.Manifests == "",
		Mode: d.mode.name, Options: optionsOf(d.cfg), Families: d.backend.Families(),
		Self: d.self, Support: d.support, Verify: d.verification, History: d.monitor.history, View: d.proxier.View, Programmed: d.proxier.Snapshot, Refused: d.refusals.list,
		Findings: d.otherFindings, Pods: d.pods(), Machine: d.backend.machine, Local: localAddresses, Reality: d.reality(),
	}
}

// nativeRules reports a table with rules that only nft can read. Families may call it at the same time.
func (d *daemon) nativeRules(n xtables.NativeRules) {
	if len(n.Chains) == 0 {
		d.log.Info("iptables can read the table again", "table", n.Table, "family", n.Family)
		d.keepNative(n, nil)
		return
	}
	f := source.Finding{
		Severity: source.Problem, Object: fmt.Sprintf("table %s (%s)", n.Table, n.Family), Detail: n.String(),
		Effect: "nodeproxy reads it chain by chain and goes on; programs that count on iptables-save may not, so such rules " +
			"should move to a table of their own",
	}
	d.keepNative(n, &f)
	d.report(f)
	d.event("NativeRules", "CompareRules", f.String())
}

// run serves until the daemon is stopped or its source fails for good. Nothing is written to the kernel before this program has
// the claim. The rules stay when it returns.
func (d *daemon) run(claim *claim, front *front) error {
	defer d.stop()
	ctx := d.ctx
	if d.machine.real() {
		if err := setOOMScore(d.cfg.OOMScoreAdj); err != nil {
			d.log.Info("the kernel may end this process sooner than others when memory runs out", "error", err)
		}
	}
	begins := "starting"
	if front.daemon.Load() != nil {
		begins = "continuing with this configuration"
	}
	d.log.Info(begins, "version", version, "mode", d.mode.name, "node", d.cfg.NodeName, "objects-from", d.from)
	d.reports.passTo(d.withEvents(d.metrics.Report(reporter(d.log))))
	d.normalEvent("Starting", "StartNodeproxy")
	err := d.awaitClaim(ctx, claim)
	if err != nil && ctx.Err() != nil {
		d.log.Info("the wait for another proxy ends; nothing has been written")
		return <-d.ended // It has ended, or does so by the very end of ctx.
	}
	if err == nil {
		err = front.prepare(d.cfg)
	}
	if err == nil {
		err = d.build(front)
	}
	if err != nil {
		front.discard()
		d.warn(err.Error())
		d.cancel()
		return &startError{errors.Join(err, <-d.ended)}
	}
	d.read.PassTo(d.proxier) // Before anybody is told how it goes: what waits to be programmed has to count.
	front.serve(d)
	d.goBeside(ctx)
	if d.machine.real() {
		d.lookAround(ctx, claim)
	}
	if d.location != nil {
		d.followLocation(ctx)
	}
	d.proxier.Run(ctx)
	d.running.Wait()
	if err := d.backend.close(); err != nil {
		d.log.Warn("some sockets of the mode stay open", "error", err)
	}
	if err := <-d.ended; err != nil {
		return err
	}
	if !d.replaced {
		d.handOver()
		d.log.Info("stopped; the rules stay in force")
	}
	return nil
}

// locateFirst is how long the first sync waits for where the API server is. Whatever has brought the objects could look it up.
const locateFirst = 5 * time.Second

// followLocation keeps Services from getting the API server's own address and port.
func (d *daemon) followLocation(ctx context.Context) {
	known := make(chan struct{})
	var once sync.Once
	d.running.Go(func() {
		d.location.Follow(ctx, func(list []netip.AddrPort) {
			d.log.Debug("no external address of a Service may be the API server's", "addresses", list)
			d.proxier.Reserve(list)
			once.Do(func() { close(known) })
		})
	})
	select {
	case <-ctx.Done():
	case <-known:
	case <-time.After(locateFirst):
	}
}

// goBeside starts what runs beside the proxier.
func (d *daemon) goBeside(ctx context.Context) {
	if d.backend.run != nil {
		d.running.Go(func() {
			if err := d.backend.run(ctx, d.proxier.Resync); err != nil {
				d.log.Error("mode "+d.mode.name+" goes on without this", "error", err)
			}
		})
	}
	d.running.Go(func() { d.flows.Run(ctx) })
	d.running.Go(func() { d.removeOthers(ctx) })
	d.running.Go(func() {
		select {
		case <-ctx.Done():
		case <-d.monitor.inSync: // The first programming is a flood of notifications, all of them of our own doing.
			d.running.Go(func() { d.witness.run(ctx) })
			d.drift.watch(ctx, d.backend, d.proxier.Suspect)
		}
	})
}

// lookAround starts what concerns this machine besides rules.
func (d *daemon) lookAround(ctx context.Context, claim *claim) {
	d.running.Go(func() { d.monitor.listeners.Run(ctx) })
	d.running.Go(func() { d.watchOthers(ctx, claim, lookEvery) })
	if d.client != nil && !d.cfg.TakeOver { // As for other proxies, it is known and wanted with --take-over.
		d.running.Go(func() { d.watchDaemonSet(ctx, daemonSetEvery) })
	}
	d.running.Go(func() {
		d.saveMemory(ctx)
		if growthUnset() {
			memory.CollectBetween(ctx, d.monitor.worked)
		}
	})
}

// open makes the source that the configuration asks for.
func (d *daemon) open(ctx context.Context, report source.Report) error {
	cfg := d.cfg
	if cfg.Manifests != "" {
		var err error
		d.from = cfg.Manifests
		d.files, err = manifest.New(manifestConfig(cfg, report, d.log))
		d.objects = d.files
		return err
	}
	apiserver.RedirectLogs(d.log)
	client, err := newClient(cfg, d.machine.api)
	if err != nil {
		return &usageError{err}
	}
	d.client = client
	if d.location, err = client.Location(d.log); err != nil {
		return &usageError{err}
	}
	events := apiserver.NewEvents(client, cfg.NodeName, "nodeproxy", d.log)
	go events.Run(ctx)
	d.normalEvent = func(reason, action string) { events.Normal(reason, action, "") }
	d.event = func(reason, action, text string) { events.Warning(reason, action, "%s", text) }
	d.from = "the API server"
	watched := apiserver.Config{Client: client, NodeName: cfg.NodeName, Random: d.machine.random, Log: d.log, Report: report}
	if cfg.Settings.DetectLocal.Mode == plan.DetectNodeCIDR {
		watched.PodCIDRTimeout = apiserver.DefaultPodCIDRTimeout
	}
	api := apiserver.New(watched)
	d.objects, d.watches, d.verifyObjects = api, api.Watches, api.Verify
	return nil
}

// faults returns what of the files can't be read.
func (d *daemon) faults() []string {
	if d.files == nil {
		return nil
	}
	return d.files.Faults()
}

func newClient(cfg *config.Config, transport http.RoundTripper) (*apiserver.Client, error) {
	return apiserver.NewClient(apiserver.ClientConfig{
		Kubeconfig: cfg.API.Kubeconfig, Master: cfg.API.Master, ContentType: cfg.API.ContentType,
		AcceptContentTypes: cfg.API.AcceptContentTypes, QPS: cfg.API.QPS, Burst: cfg.API.Burst,
		UserAgent: program(), Transport: transport,
	})
}

func manifestConfig(cfg *config.Config, report source.Report, log *slog.Logger) manifest.Config {
	return manifest.Config{
		Path: cfg.Manifests, Report: report, Log: log,
		Ranges: controlplane.Ranges{ServiceCIDRs: cfg.ServiceCIDRs, NodePorts: cfg.NodePorts},
	}
}

// hostFamilies are the families that this node can forward: IPv4 always, IPv6 unless it is disabled in the kernel.
func hostFamilies(log *slog.Logger) []plan.Family {
	if why := host.WithoutIPv6(); why != "" {
		log.Info("IPv4 only: " + why)
		return []plan.Family{plan.IPv4}
	}
	return plan.Families[:]
}
