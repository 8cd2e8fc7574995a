package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/probe"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/source"
)

// comparison is how a scenario compares proxies through a real API server.
//
// The proxies share the cluster, so what one is measured by concerns the others too: these are stopped meanwhile (SIGSTOP), and get time to
// catch up before it is their turn. The turns are short, so that whatever else the machine does meanwhile disturbs all alike.
type comparison struct {
	prober  probe.Prober
	without bool // there are also nodeproxy in mode iptables, and two nodes without a proxy
	// complete waits until the cold start is, which samples of the Services have answered after. turn are the steps of each turn, last those
	// of one more, and finally is for all nodes together.
	complete   func(b *bench, n *node, begun time.Time)
	turn, last []step
	finally    func(b *bench, nodes []*node)
	rows       func(o *options, most bool) []row // most: for the largest number of Services
	note       string                            // what is printed before
	legend     string                            // and after
}

// step measures something of a node whose proxy has caught up; turn is that of o.turns.
type step func(ctx context.Context, b *bench, n *node, turn int)

// bench is a comparison under way.
type bench struct {
	comparison
	*options
	*lab
}

// The two nodes without a proxy come last: one that tracks connections, and one without any rule.
const (
	noProxy = "no proxy"
	noRules = "no rules"
)

// run measures the proxies with each number of Services, prints tables, and returns how many goals are missed.
func (c comparison) run(ctx context.Context, o *options) (missed int) {
	np, other := o.findProxies()
	proxies := []proxy{np, other}
	if c.without {
		ipt := np
		ipt.name, ipt.flags = inIPTables, []string{"--proxy-mode=iptables", "--iptables-backend=" + string(harness.NFT)}
		proxies = append(proxies, ipt, proxy{name: noProxy}, proxy{name: noRules})
	}
	fmt.Printf("# nodeproxy %s, %s %s, mode %s, kernel %s\n# before the run: %s\n%s", np.version, other.name, other.version, o.modeName(),
		machine.Kernel(), machine.State(), c.note)
	// For each number of Services there are nodes, so that every cold start is on a node as good as new.
	l := newLab(ctx, o, slices.Repeat(proxies, len(o.services)))
	defer func() { check(errors.Join(caught(recover()), l.close())) }()
	if len(o.backends) > 0 {
		tools := filepath.Join(l.Dir, "tools")
		check(errors.Join(os.Mkdir(tools, 0o755), harness.Variant(o.backends[0]).Link(tools)))
		l.nodes[1].process.Env = append(l.nodes[1].process.Env, "PATH="+tools+":"+os.Getenv("PATH"))
	}
	b := &bench{c, o, l}
	var results [][]figures
	others := meanwhile(func() {
		for i, n := range o.services {
			l.fill(ctx, n)
			o.progress("%d Services with %d endpoints each", n, o.endpoints)
			results = append(results, b.measure(ctx, l.nodes[i*len(proxies):(i+1)*len(proxies)]))
		}
	})
	o.progress("done; meanwhile %s", others)
	fmt.Println()
	t := newTable(os.Stdout)
	c.print(t, o, results)
	o.ended()
	return t.missed
}

// meanwhile does something, and says what else the machine had to do.
func meanwhile(fn func()) string {
	load, before := machine.WatchLoad(), machine.UsageNow()
	fn()
	return load() + "; " + machine.UsageNow().OthersSince(before)
}

// modeName is the mode, with the variant of iptables where the mode runs it.
func (o *options) modeName() string {
	if o.mode == string(harness.IPTables) {
		return fmt.Sprintf("%s (%s)", o.mode, o.backends[0])
	}
	return o.mode
}

// measure measures all nodes with the Services that there are: those with a proxy one after the other, then in turns.
func (b *bench) measure(ctx context.Context, nodes []*node) (results []figures) {
	var running []*node
	for _, n := range nodes {
		defer n.process.Stop()
		switch {
		case n.name == noProxy:
			n.masquerade(harness.NFT)
		case slices.Contains(b.only, n.name) || n.name == another:
			if b.coldStart(n); n.runs() {
				running = append(running, n)
			}
		}
	}
	for turn := range b.turns + 1 {
		steps := b.turn
		if turn == b.turns {
			steps = b.last
		}
		for _, n := range running {
			if !n.runs() || len(steps) == 0 {
				continue
			}
			others := b.takeTurn(ctx, n, steps, turn)
			n.summarize()
			b.progress("%s, turn %d: p50 so far %s; meanwhile %s", n.name, turn+1, seconds(n.figures["changed p50"]), others)
		}
	}
	if b.finally != nil {
		b.finally(b, nodes)
	}
	for _, n := range nodes {
		results = append(results, n.figures)
	}
	return results
}

// late stops a proxy that nodeproxy is compared with, if it has taken longer than the limit. Any other error ends the run, and so does
// nodeproxy being late.
func (b *bench) late(n *node, err error, keys ...string) {
	if !errors.Is(err, probe.ErrLate) || n.name == nodeProxy {
		check(fmt.Errorf("%s: %w\n%s", n.name, err, n.process.Tail()))
	}
	for _, key := range keys {
		if _, ok := n.figures[key]; !ok {
			n.figures[key] = math.Inf(1)
		}
	}
	n.process.Stop()
	b.progress("%s: not within %s: %v", n.name, b.limit, err)
}

// coldStart starts the node's proxy on a node without rules, and leaves it frozen. What it takes is the time from before the process
// existed until Services from all of the cluster answer, and until complete has seen the rest; complete puts a longer time into "cold".
func (b *bench) coldStart(n *node) {
	usage, begun := machine.UsageNow(), time.Now()
	check(n.process.Start())
	var cpu time.Duration
	err := attempt(func() {
		n.figures["cold"] = b.awaitSamples(n, begun).Seconds()
		b.complete(b, n, begun)
		n.rest()
		cpu = n.used()
		_, peak, err := machine.Memory(n.process.PID)
		check(err)
		n.figures["cold peak"] = float64(peak)
	})
	if err != nil {
		delete(n.figures, "cold")
		b.late(n, err, "cold")
		return
	}
	n.figures["cold cpu"] = cpu.Seconds()
	b.progress("%s: cold start %s; meanwhile %s", n.name, seconds(n.figures["cold"]), machine.UsageNow().OthersSince(usage))
	check(n.process.Freeze())
}

// takeTurn lets the proxy go on, takes the steps when it has caught up (a change is in effect, and it has nothing left to do), and freezes
// it again. What it returns is about the machine during the steps.
func (b *bench) takeTurn(ctx context.Context, n *node, steps []step, turn int) (others string) {
	err := attempt(func() {
		check(n.process.Thaw())
		n.rest()
		b.change(ctx, n)
		n.rest()
	})
	time.Sleep(b.settle)
	before := machine.UsageNow()
	if err == nil {
		err = attempt(func() {
			for _, step := range steps {
				step(ctx, b, n, turn)
			}
		})
	}
	others = machine.UsageNow().OthersSince(before)
	if err != nil {
		b.late(n, err, "changed p50", "changed p99")
		return others
	}
	check(n.process.Freeze())
	return others
}

// awaitSamples waits until Services from all of the cluster answer to a node's client, and returns the time since begun.
func (b *bench) awaitSamples(n *node, begun time.Time) (took time.Duration) {
	n.inClient(func() {
		for i := len(b.lab.services) - 1; i >= 0; i -= max(1, len(b.lab.services)/100) {
			s := b.lab.services[i]
			took = must(b.prober.Await(begun, s.frontend(), s.has, 1, b.limit))
		}
	})
	return took
}

// awaitAll asks each of the Services, and takes the cold start to have lasted until the last one that had to be waited for.
func (b *bench) awaitAll(n *node, begun time.Time) {
	n.inClient(func() {
		for _, s := range b.lab.services {
			endpoint, err := b.prober.Ask(s.frontend(), harness.Patient)
			if err == nil && !s.has(endpoint) {
				var took time.Duration
				took, err = b.prober.Await(begun, s.frontend(), s.has, 1, b.limit)
				n.figures["cold"] = took.Seconds()
			}
			check(err, "service "+s.name)
		}
	})
}

// awaitSynced is awaitAll; then it asks the proxy how long the syncs took.
func (b *bench) awaitSynced(n *node, begun time.Time) {
	b.awaitAll(n, begun)
	n.rest()
	all, written := n.syncTime()
	n.figures["cold synced"] = all
	maps.Copy(n.figures, written)
}

// awaitVirtualServers waits until each of the Services has a virtual server with all real servers. A look at them takes a while itself:
// the cold start has lasted until the one began that found all.
func (b *bench) awaitVirtualServers(n *node, begun time.Time) {
	for {
		took := time.Since(begun)
		servers := must(virtualServers(n.Netns))
		missing := slices.IndexFunc(b.lab.services, func(s *service) bool { return servers[s.frontend()] < len(s.endpoints) })
		switch {
		case missing < 0:
			n.figures["cold"] = took.Seconds()
			return
		case took > b.limit:
			check(fmt.Errorf("service %s is not programmed: %w (%s)", b.lab.services[missing].name, probe.ErrLate, b.limit))
		}
		time.Sleep(took / 10)
	}
}

// virtualServers are those over IPv4 in a namespace, with the number of their real servers. They are read by netlink: in /proc/net/ip_vs,
// one namespace's are left out at random where another one has some too.
func virtualServers(n *harness.Netns) (map[netip.AddrPort]int, error) {
	held := map[netip.AddrPort]int{}
	err := n.Do(func() error {
		k, err := ipvs.OpenServers()
		if err != nil {
			return err
		}
		list, err := k.List(plan.IPv4)
		for id, v := range list {
			held[netip.AddrPortFrom(id.Addr, id.Port)] = len(v.RealServers)
		}
		return errors.Join(err, k.Close())
	})
	if err != nil {
		return nil, fmt.Errorf("virtual servers of %s: %w", n.Name, err)
	}
	return held, nil
}

// change replaces an endpoint, of another Service each time. It returns the time from before the PATCH is sent until the new endpoint
// answers a connection of the node's client, and until the API server has answered. Each probe makes as many connections as the Service
// has endpoints.
func (b *bench) change(ctx context.Context, n *node) (took, patched time.Duration) {
	s, patch, err := b.prepareChange()
	check(err)
	sent, begun, endpoint := make(chan error, 1), time.Now(), s.endpoints[0]
	var failed atomic.Bool // and is not waited for
	go func() {
		err := patch(ctx)
		patched = time.Since(begun)
		failed.Store(err != nil)
		sent <- err
	}()
	took, err = n.await(b.prober, begun, s, len(s.endpoints), b.limit, func(from netip.Addr) bool { return from == endpoint || failed.Load() })
	check(errors.Join(<-sent, err), "changed service "+s.name)
	return took, patched
}

// share is how many of a total are a turn's.
func (b *bench) share(total, turn int) int { return total*(turn+1)/b.turns - total*turn/b.turns }

// changesOf is how many of a total of changes are the node's in a turn.
func (b *bench) changesOf(n *node, total, turn int) int {
	if n.name == kubeProxy && b.theirChanges > 0 {
		total = min(total, b.theirChanges)
	}
	return b.share(total, turn)
}

// changes is the step of changes made one at a time.
func changes(ctx context.Context, b *bench, n *node, turn int) {
	n.counted("changed", func() {
		for range b.changesOf(n, b.options.changes, turn) {
			took, patched := b.change(ctx, n)
			n.series["changed"], n.series["patched"] = append(n.series["changed"], took), append(n.series["patched"], patched)
			time.Sleep(b.settle)
		}
	})
}

// additions is the step of Services that are created one at a time. Each takes from before the first POST is sent until the new Service
// answers a connection.
func additions(ctx context.Context, b *bench, n *node, turn int) {
	n.counted("added", func() {
		for range b.changesOf(n, b.options.additions, turn) {
			s := b.invent(b.lab.endpoints)
			named, sent, begun := make(chan struct{}), make(chan error, 1), time.Now()
			go func() { sent <- b.create(ctx, s, func() { close(named) }) }()
			select {
			case <-named:
			case err := <-sent:
				check(err)
			}
			took, err := n.await(b.prober, begun, s, 1, b.limit, s.has)
			check(errors.Join(<-sent, err), fmt.Sprintf("new service %s at %s", s.name, s.addr))
			n.series["added"] = append(n.series["added"], took)
			time.Sleep(b.settle)
		}
	})
}

// syncs is the step of changes after each of which the proxy is asked how long its sync took. That costs the proxy time itself.
func syncs(ctx context.Context, b *bench, n *node, turn int) {
	asked := b.changesOf(n, b.options.changes, turn)
	if n.name == kubeProxy {
		asked = 1
	}
	before, _ := n.syncTime()
	for range asked {
		b.change(ctx, n)
		time.Sleep(b.settle)
		after, _ := n.syncTime()
		n.series["synced"] = append(n.series["synced"], time.Duration((after-before)*float64(time.Second)))
		before = after
	}
}

// together is the step in which all endpoints of many Services change at once, in one write: as where a node with many pods fails. It takes
// from before that write until the last of the Services has answered; the others have been asked before, so the time that this takes is in
// it. It also notes how long it took until a client that only watches had all of them.
func together(ctx context.Context, b *bench, n *node, _ int) {
	times := 3
	if n.name == kubeProxy {
		times = 1
	}
	for range times {
		b.changeTogether(ctx, n)
		n.rest()
	}
}

func (b *bench) changeTogether(ctx context.Context, n *node) {
	services, objects := b.prepareTogether(ctx, b.options.together)
	w := b.watch(ctx)
	defer w.stop()
	var took time.Duration
	begun := time.Now()
	check(b.controlPlane.Put(ctx, objects))
	n.inClient(func() {
		for _, s := range services {
			took = must(b.prober.Await(begun, s.frontend(), s.has, 1, b.limit))
		}
	})
	n.series["together"] = append(n.series["together"], took)
	var endpoints []netip.Addr
	for _, s := range services {
		endpoints = append(endpoints, s.endpoints[0])
	}
	if learned := slices.Collect(maps.Values(w.learned(endpoints))); len(learned) > 0 {
		last := slices.MaxFunc(learned, time.Time.Compare)
		n.series["together"+watchedSuffix] = append(n.series["together"+watchedSuffix], last.Sub(begun))
	}
}

// mostIdle is how often, at most, the step idle waits for a comparison.
const mostIdle = 3

// idle is the step in which nothing changes. A nodeproxy compares everything now and then, less often the longer that takes: if it has not
// done so meanwhile, the step is repeated.
func idle(_ context.Context, b *bench, n *node, _ int) {
	var used time.Duration
	var woken, compared float64
	tells, lasted := true, time.Duration(0)
	for range mostIdle {
		before, _ := n.comparisons()
		n.rest()
		usedBefore, wokenBefore := n.used(), must(machine.Wakeups(n.process.PID))
		time.Sleep(b.options.idle)
		used += n.used() - usedBefore
		woken += float64(must(machine.Wakeups(n.process.PID))) - float64(wokenBefore) // less than 0 if threads have ended
		lasted += b.options.idle
		if compared, tells = n.comparisons(); tells {
			compared -= before
			n.figures["compared"] += compared
		}
		if !tells || compared > 0 {
			break
		}
	}
	n.figures["idle"], n.figures["wake-ups"] = used.Seconds()/lasted.Seconds(), woken/lasted.Seconds()
}

// verified is the step in which a nodeproxy is asked to verify objects, plan and kernel, and is at rest again.
func verified(_ context.Context, b *bench, n *node, _ int) {
	if n.name != nodeProxy {
		return
	}
	before, begun := n.used(), time.Now()
	var answer struct{ Verification source.Verification }
	for !answer.Verification.Finished || answer.Verification.Began.Before(begun) { // It may be an earlier one's.
		_, body, err := n.Get(harness.HealthAddr, "/readyz?verify")
		check(errors.Join(err, json.Unmarshal([]byte(body), &answer)))
		if time.Since(begun) > b.limit {
			check(fmt.Errorf("a verification: %w (%s)", probe.ErrLate, b.limit))
		}
		time.Sleep(time.Second)
	}
	if !answer.Verification.Good() {
		check(fmt.Errorf("a verification: %+v", answer.Verification))
	}
	n.rest()
	n.figures["verified"], n.figures["verified cpu"] = answer.Verification.TookSeconds, (n.used() - before).Seconds()
}

// memory is the step that looks at that of the proxy itself.
func memory(_ context.Context, _ *bench, n *node, _ int) {
	now, peak, err := machine.Memory(n.process.PID)
	check(err)
	n.figures["resident"], n.figures["peak"] = float64(now), float64(peak)
	n.figures["grown"] = n.figures["resident"] / n.figures["cold peak"]
}

// connect compares connections to the Services with the lowest and the highest address, or to a pod where there is no proxy. Proxies are
// stopped meanwhile.
func (b *bench) connect(nodes []*node) {
	first, last := b.ends()
	var firsts, lasts []target
	var measured []*node
	for _, n := range nodes {
		switch {
		case n.path == "":
			firsts, lasts = append(firsts, n.pod(n.name)), append(lasts, n.pod(n.name))
		case n.runs():
			firsts, lasts = append(firsts, n.target(n.name, first.frontend())), append(lasts, n.target(n.name, last.frontend()))
		default:
			continue
		}
		measured = append(measured, n)
	}
	took, made := connectTimes(b.options, append(firsts, lasts...)...), rates(b.options, lasts...)
	for i, n := range measured {
		n.figures["first"], n.figures["last"], n.figures["rate"] = took[i].Seconds(), took[len(firsts)+i].Seconds(), made[i]
	}
	base := maps.Clone(nodes[len(nodes)-2].figures)
	for _, n := range measured {
		for _, key := range []string{"first", "last", "rate"} {
			n.figures[key+" times"] = n.figures[key] / base[key]
		}
	}
}
