package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/config"
	"nodeproxy/kernel/host"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

// life is that of a daemon: what it has got. There may be two at a time, as a new configuration reads all objects before it takes effect.
type life struct {
	daemon *daemon
	known  *proxier.State
	// first are the objects that no API server lacked when the daemon began, as of a version, and got what it has got. versions are those of
	// what has come, by kind and name.
	first, got   source.Batch
	firstVersion int
	versions     map[string]int
}

// start starts a nodeproxy, with what the configuration file holds.
func (w *world) start() {
	if w.file != nil {
		w.cfg, w.file = w.file, nil
	}
	p, machineOf := w.rules.start()
	ctx, cancel := context.WithCancel(context.Background())
	updates := make(chan update)
	newLife := func(ctx context.Context, cfg *config.Config) (*life, error) {
		return w.newLife(ctx, p, machineOf(cfg), cfg)
	}
	r := &reloads{claim: &claim{process: ctx, acquired: true}, front: newFront(), updates: updates}
	r.newDaemon = func(ctx context.Context, cfg *config.Config) (*daemon, error) {
		l, err := newLife(ctx, cfg)
		if err != nil {
			return nil, err
		}
		w.mayFail(l.daemon)
		return l.daemon, nil
	}
	l, err := newLife(ctx, w.cfg)
	if err != nil {
		w.fail("it can't be made: %v", err)
		cancel()
		return
	}
	w.rules.Lock()
	w.flows.restarted = w.life != nil
	w.life, w.front, w.process, w.cancel, w.updates, w.ended = l, r.front, p, cancel, updates, make(chan error, 1)
	w.failing, w.rejected = nil, ""
	clear(w.heeded)
	w.rules.Unlock()
	l.daemon.begin()
	go func() {
		time.Sleep(w.draw("claim", 200*time.Millisecond)) // in simulated time: objects come meanwhile
		w.ended <- r.run(ctx, l.daemon)
	}()
}

// mayFail lets the start of a daemon fail where that is to happen next with its configuration.
func (w *world) mayFail(d *daemon) {
	w.rules.Lock()
	defer w.rules.Unlock()
	if w.failing == nil || d.cfg != w.failing {
		return
	}
	if w.failures--; w.failures == 0 {
		w.failing = nil
	}
	mode := *d.mode
	mode.open = func(modeConfig) (*openMode, error) { return nil, errors.New("what the mode needs is gone") }
	d.mode = &mode
}

// rejects looks at what an event says of a configuration that is not in force.
func (w *world) rejects(text string) {
	w.rules.Lock()
	defer w.rules.Unlock()
	if text == w.rejected {
		w.fail("an event says once more: %s", text)
	}
	w.rejected = text
}

// newLife makes a daemon in a process.
func (w *world) newLife(ctx context.Context, p ruleWriter, m machine, cfg *config.Config) (*life, error) {
	m.api, m.conntrack = w.cluster, w.flows.kernel.Dial
	m.local = func(f plan.Family) (*host.Local, error) { return host.LocalOf(nodeAddress(f)), nil }
	m.random = func(resource string, limit time.Duration) time.Duration { return w.draw("pause "+resource, limit) }
	d, err := newDaemon(ctx, m, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	l := &life{daemon: d, known: emptyState(cfg), got: batchOf(&apiservertest.Cluster{}, 0), versions: map[string]int{}}
	l.first, l.firstVersion = w.oldest()
	d.objects = observed{d.objects, func(b source.Batch) { w.delivered(p, l, b) }}
	event, normal := d.event, d.normalEvent
	d.event = func(reason, action, text string) {
		switch event(reason, action, text); reason {
		case "VerificationRepaired":
			w.verified(text)
		case "ConfigRejected":
			w.rejects(text)
		}
	}
	d.normalEvent = func(reason, action string) {
		if normal(reason, action); reason == "Starting" {
			w.takesEffect(l)
		}
	}
	return l, nil
}

func emptyState(cfg *config.Config) *proxier.State {
	s := proxier.NewState("n1", cfg.Settings, plan.Families[:], nil)
	s.Reserve([]netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:6443")})
	return s
}

// takesEffect notes that the configuration of a daemon takes effect from now on. Whoever had an endpoint and has one by it goes on to have one.
func (w *world) takesEffect(l *life) {
	w.rules.Lock()
	defer w.rules.Unlock()
	if l == w.life {
		return // It is the first one of its process.
	}
	w.note("%s takes effect", l.daemon.cfg.Mode)
	w.life, w.cfg, w.last, w.flows.restarted = l, l.daemon.cfg, time.Now(), true
	clear(w.alike)
	clear(w.heeded)
	if w.known.Synced() {
		w.allow(w.plan())
		w.keepSteady()
	}
}

// keepSteady leaves of the packets that have had an endpoint those that have one by what has been delivered.
func (w *world) keepSteady() {
	verdicts := plan.NewEvaluator(w.plan())
	for q := range w.steady {
		if verdicts.Verdict(q.packet()).Action != plan.Forward {
			delete(w.steady, q)
		}
	}
}

// reload writes the configuration file.
func (w *world) reload(r *rand.Rand) string {
	words, u := "a mistake", update{err: errors.New("line 7 is wrong")}
	if r.IntN(6) > 0 {
		mode := w.modes[r.IntN(len(w.modes))]
		args := append(drawFlags(mode, r), "--proxy-mode="+mode)
		words, u = strings.Join(args, " "), update{cfg: w.configOf(args...)}
		if r.IntN(4) == 0 {
			failures := 1 + r.IntN(3)
			words += fmt.Sprintf(", whose first %d starts fail", failures)
			w.rules.Lock()
			w.failing, w.failures = u.cfg, failures
			w.rules.Unlock()
		}
	}
	w.rules.Lock()
	w.rejected = ""
	w.rules.Unlock()
	select {
	case w.updates <- u:
		w.file = u.cfg
		return words
	case <-time.After(time.Second): // in simulated time
		w.rules.Lock()
		w.failing = nil
		w.rules.Unlock()
		return "while another one takes effect"
	}
}

// stop ends the nodeproxy as SIGTERM does.
func (w *world) stop() {
	w.cancel()
	if err := <-w.ended; err != nil {
		w.fail("it ended with %v", err)
	}
	w.process.Kill(true)
}

// kill ends it as kill -9 does.
func (w *world) kill(all bool) {
	w.process.Kill(all)
	w.cancel()
	w.note("dead, with an error: %t", <-w.ended != nil)
}

// restart ends the nodeproxy, and starts one with other flags.
func (w *world) restart(r *rand.Rand, args ...string) {
	if r.IntN(2) == 0 {
		w.kill(true)
	} else {
		w.stop()
	}
	w.cfg, w.file = w.configOf(args...), nil
	w.start()
}

// switchMode starts a nodeproxy in the other one of two modes.
func (w *world) switchMode(r *rand.Rand) string {
	mode := w.modes[0]
	if w.cfg.Mode == mode {
		mode = w.modes[1]
	}
	w.restart(r, "--proxy-mode="+mode)
	return mode
}

// delivered takes over a batch that is about to be delivered to a daemon.
func (w *world) delivered(by ruleWriter, l *life, b source.Batch) {
	w.rules.Lock()
	defer w.rules.Unlock()
	if by.Dead() {
		return
	}
	if l == w.life {
		w.look()
		w.last = time.Now()
	}
	before := l.known.Synced()
	l.known.Apply(b)
	w.get(l, b)
	if l == w.life {
		w.allow(w.plan())
	}
	if !l.known.Synced() {
		return
	}
	if !before {
		w.note("synced")
		w.lacksNothing(l)
	}
	if l != w.life {
		return
	}
	w.keepSteady()
	if len(b.Services)+len(b.Nodes) > 0 {
		clear(w.heeded)
	}
}

// get notes what is delivered. No object may be older than it was, but where the API is back in time.
func (w *world) get(l *life, b source.Batch) {
	w.cluster.Lock()
	isBack := w.cluster.Lost != nil
	w.cluster.Unlock()
	newer := func(o apiservertest.Object) {
		version, _ := strconv.Atoi(o.GetResourceVersion())
		name := fmt.Sprintf("%T %s", o, o.GetName())
		if version < l.versions[name] && !isBack {
			w.fail("%s of version %d is delivered after %d", name, version, l.versions[name])
		}
		l.versions[name] = version
	}
	for name, o := range b.Services {
		if l.got.Services[name] = o; o != nil {
			newer(o)
		}
	}
	for name, o := range b.EndpointSlices {
		if l.got.EndpointSlices[name] = o; o != nil {
			newer(o)
		}
	}
}

// oldest returns the objects as of the version that all API servers have seen.
func (w *world) oldest() (b source.Batch, version int) {
	w.cluster.Lock()
	defer w.cluster.Unlock()
	version = w.cluster.Version
	for _, s := range w.cluster.Servers {
		version = min(version, s.Seen)
	}
	return batchOf(w.cluster, version), version
}

// batchOf returns all objects of a cluster as of a version. It is locked.
func batchOf(c *apiservertest.Cluster, version int) source.Batch {
	b := source.Batch{Synced: true, Services: map[types.NamespacedName]*v1.Service{}, Nodes: map[string]*v1.Node{},
		EndpointSlices: map[types.NamespacedName]*discovery.EndpointSlice{}}
	for name, o := range apiservertest.Objects(c.Log, "services", version) {
		b.Services[name] = o.Object.(*v1.Service)
	}
	for name, o := range apiservertest.Objects(c.Log, "endpointslices", version) {
		b.EndpointSlices[name] = o.Object.(*discovery.EndpointSlice)
	}
	for name, o := range apiservertest.Objects(c.Log, "nodes", version) {
		b.Nodes[name.Name] = o.Object.(*v1.Node)
	}
	return b
}

// lacksNothing looks whether all objects have been delivered that were there when a daemon began, and have not been gone since. What an
// API that is back in time has nobody knows.
func (w *world) lacksNothing(l *life) {
	w.cluster.Lock()
	defer w.cluster.Unlock()
	if w.cluster.Lost != nil {
		return
	}
	for _, o := range w.cluster.Log {
		if o.Version > l.firstVersion {
			delete(l.first.Services, o.Name)
			delete(l.first.EndpointSlices, o.Name)
		}
	}
	for name := range l.first.Services {
		if l.got.Services[name] == nil {
			w.fail("it says that all has been delivered, without Service %s", name)
		}
	}
	for name := range l.first.EndpointSlices {
		if l.got.EndpointSlices[name] == nil {
			w.fail("it says that all has been delivered, without EndpointSlice %s", name)
		}
	}
}
