package main

import (
	"cmp"
	"context"
	"fmt"
	"hash"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/config"
	"nodeproxy/internal/set"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/source"
	"nodeproxy/source/apiserver"
	"nodeproxy/source/apiserver/apiservertest"
)

// inTime is how long it may take, without trouble, until the tables hold what the objects ask for: an answer of the API server that hangs
// does so for 20 s and the pause after it is 10 s; a failed sync is tried again after 30 s; what was refused, in a trouble of 10 s, after
// 20 s, by a comparison, which comes every 30 s; and each comparison may lead to a sync. inTimeSilent is the same where the API server may
// send nothing without being asked.
const (
	inTime       = 3 * time.Minute
	inTimeSilent = inTime + 2*apiserver.DefaultSilence
	// inTimeLost is how much longer it may take where a watch has lost something: until the next verification has ended, and one that had begun.
	inTimeLost = 3*verifyEvery/2 + 2*(verifyObjects+verifyKernel)
	// repairTime is how long others' changes last where programs of iptables have never been slow and have never failed: there are two seconds
	// at most between two comparisons after a suspicion, and as many between two attempts.
	repairTime = 10 * time.Second
)

// world is a cluster, the tables of a node, and the nodeproxy on it, in simulated time.
type world struct {
	seed    uint64
	cluster *apiservertest.Cluster
	rules   nodeRules
	flows   worldFlows
	// modes are those that nodeproxy may be in. cfg is the configuration in force, and file that which the configuration file has come to
	// hold; nil if there is nothing new.
	modes     []string
	cfg, file *config.Config
	// failing is a configuration whose next daemons, so many, fail to start; nil for none. rejected is what an event has said last of a
	// configuration that is not in force.
	failing  *config.Config
	failures int
	rejected string
	// configOf returns the configuration by some flags, in addition to those that every nodeproxy has.
	configOf func(args ...string) *config.Config
	began    time.Time
	silent   bool            // The API server may be back in time, or have sent an answer that does not end.
	lost     map[string]bool // the names of objects of which a watch has lost something
	pace     time.Duration
	// troubled says that reading or writing rules has failed or been slow, and tampered that others have changed ours, or programs that a
	// killed nodeproxy had started.
	troubled, tampered bool

	// life is that of the daemon whose configuration is in force, in a process that ends with ended's error.
	*life
	front   *front
	process ruleWriter
	cancel  func()
	updates chan<- update // what the configuration file comes to hold
	ended   chan error

	// steady are the packets that have had an endpoint by all that has been delivered since the daemon was idle.
	steady map[probe]bool
	// alike are the families whose tables are what the plan of these asks for, unless either has changed since.
	alike map[plan.Family]bool
	last  time.Time // when the last batch was delivered
	// heeded are the packets that the rules say something of since the node was idle, whatever endpoints there are: where nothing else
	// than these has changed meanwhile, and nothing is wrong.
	heeded map[probe]bool
	// disturbed are families whose tables may not be as the daemon has left them, since that time.
	disturbed map[plan.Family]time.Time
	// ever are the endpoints that Services have had, by frontend address and port. owners are the ServicePorts that had these in any state which
	// has been delivered since the tables were in sync, or in that one, and usable the endpoints that ServicePorts had in any of those.
	ever   map[netip.AddrPort]map[netip.AddrPort]bool
	owners map[netip.AddrPort]set.Set[plan.Key]
	usable map[plan.Key]set.Set[netip.AddrPort]
	// foreign are the tables as others have left them.
	foreign map[plan.Family]string
	// balanced says that changeLoadBalancer has happened. Before that, packets to addresses of load balancers would only take time.
	balanced bool

	tracing sync.Mutex // guards trace
	trace   hash.Hash64
	failure string
}

// nodeRules are the rules of a node in one mode, which nodeproxy and others change.
type nodeRules interface {
	sync.Locker
	// start starts a process, and returns what the daemon of a configuration works with in it.
	start() (ruleWriter, func(*config.Config) machine)
	// differs says how the rules of a family differ from those of a plan; "" if they don't. They are locked. A sync or comparison may be
	// under way, unless they are settled.
	differs(f plan.Family, p *plan.Plan, settled bool) (why string)
	// others returns what others have in the tables of a family, which are locked.
	others(f plan.Family) string
	// packets returns what packets meet in the tables of a family, which are locked.
	packets(f plan.Family) (*packetsim.Machine, error)
	// leftover reports whether there is something of another mode for a family. All is locked.
	leftover(f plan.Family) bool
	// suffer lets a trouble happen for a while, and calm ends it.
	suffer(r *rand.Rand) (words string)
	calm()
}

// ruleWriter is a process that reads and writes rules.
type ruleWriter interface {
	// Kill ends it. What it has started to write by other programs goes on if these are not to die with it.
	Kill(all bool)
	Dead() bool
	// Written is how often it has changed something.
	Written() int
}

// probe is a packet to a Service.
type probe struct {
	from netip.Addr
	in   string // the interface; "" for packets of this node
	to   netip.AddrPort
}

func (p probe) packet() plan.Packet {
	return plan.Packet{Src: p.from, Dst: p.to.Addr(), DstPort: p.to.Port(), Protocol: protocolOf(p.to.Port()), Output: p.in == "", InInterface: p.in,
		SrcLocal: p.in == "", DstLocal: thisNode.Local(p.to.Addr())}
}

// thisNode has the addresses of the node.
var thisNode = packetsim.Node{Local: func(a netip.Addr) bool { return a == nodeAddress(plan.FamilyOf(a)) }}

// newWorld makes a world. Kernel settings are in a directory: its name is not drawn in simulated time, in which all may draw the same.
func newWorld(t *testing.T, seed uint64, mode, settings string) *world {
	random := rand.New(rand.NewPCG(seed, 1))
	w := &world{seed: seed, cluster: apiservertest.NewCluster(random, 1+random.IntN(3)), began: time.Now(), steady: map[probe]bool{},
		modes: provenModes[mode].modes, heeded: map[probe]bool{}, lost: map[string]bool{}, alike: map[plan.Family]bool{},
		disturbed: map[plan.Family]time.Time{}, ever: map[netip.AddrPort]map[netip.AddrPort]bool{},
		owners: map[netip.AddrPort]set.Set[plan.Key]{}, usable: map[plan.Key]set.Set[netip.AddrPort]{}, foreign: map[plan.Family]string{},
		trace: fnv.New64a()}
	w.cluster.Travel = func(r apiservertest.Request) time.Duration {
		return w.draw("travel "+r.Verb+r.Resource, 30*time.Millisecond)
	}
	w.cluster.Pace = func() time.Duration { return w.draw("pace", w.pace) }
	w.configOf = func(args ...string) *config.Config {
		flags := newRunFlags(t, append([]string{"--master=http://192.0.2.1:6443", "--proxy-mode=" + mode, "--hostname-override=n1",
			"--cluster-cidr=10.244.0.0/16,fd44::/32", "--iptables-localhost-nodeports=false"}, args...)...)
		cfg, err := flags.Config()
		if err != nil {
			t.Fatal(err)
		}
		cfg.Servers, cfg.Socket, cfg.Conntrack, cfg.SysctlDir = config.Servers{UI: "false"}, "", config.Conntrack{}, settings
		return cfg
	}
	w.cfg = w.configOf()
	w.flows.kernel.Flows = othersFlows()
	w.rules = provenModes[mode].rules(w)
	for _, f := range plan.Families {
		w.foreign[f] = w.rules.others(f)
	}
	return w
}

// draw returns a random time below a limit: the same for the same thing at the same time.
func (w *world) draw(what string, limit time.Duration) time.Duration {
	h := fnv.New64a()
	fmt.Fprint(h, w.seed, what, time.Now().UnixNano())
	return time.Duration(rand.New(rand.NewPCG(w.seed, h.Sum64())).Int64N(max(int64(limit), 1)))
}

// note adds to the trace.
func (w *world) note(format string, args ...any) {
	w.tracing.Lock()
	defer w.tracing.Unlock()
	fmt.Fprintf(w.trace, "%v "+format+"\n", append([]any{time.Since(w.began)}, args...)...)
}

func (w *world) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf("after %v: ", time.Since(w.began)) + fmt.Sprintf(format, args...)
	}
}

// observed is a source of which see gets each batch before the sink does.
type observed struct {
	source.Source
	see func(source.Batch)
}

func (o observed) Run(ctx context.Context, to source.Sink) error {
	return o.Source.Run(ctx, seeing{to, o.see})
}

type seeing struct {
	source.Sink
	see func(source.Batch)
}

func (s seeing) Apply(b source.Batch) {
	s.see(b)
	s.Sink.Apply(b)
}

// idle reports whether the nodeproxy says that the tables hold what has been delivered.
func (w *world) idle() bool {
	d := w.front.daemon.Load()
	return d != nil && d == w.daemon && time.Now().After(w.last) && d.monitor.node.OldestChange() == 0 && d.monitor.node.Healthy()
}

// plan returns the plan of what has been delivered.
func (w *world) plan() *plan.Plan {
	p, change := w.known.Update()
	if !change.None() {
		clear(w.alike)
	}
	return p
}

// look holds what the nodeproxy says to what the tables hold, which are locked.
func (w *world) look() {
	if d := w.front.daemon.Load(); d != nil && d == w.daemon && !w.troubled && d.monitor.node.OldestChange() > repairTime {
		w.fail("a change has waited for %v, and nothing is wrong", d.monitor.node.OldestChange())
	}
	if !w.idle() || !w.known.Synced() || len(w.daemon.refusals.list()) > 0 {
		return
	}
	for _, m := range w.daemon.monitor.node.Missing() {
		if m.Condition != "fresh" { // The API server may have sent nothing for a long time.
			w.fail("it says that no change waits, and that it is not ready: %s", m.Detail)
		}
	}
	p := w.plan()
	verdicts := plan.NewEvaluator(p)
	w.steady, w.heeded = map[probe]bool{}, map[probe]bool{}
	for _, f := range plan.Families {
		since, disturbed := w.disturbed[f]
		limit := repairTime
		if w.troubled {
			limit = inTime
		}
		var why string
		if !w.alike[f] {
			why = w.rules.differs(f, p, false)
		}
		if w.alike[f] = why == ""; !w.alike[f] {
			if !disturbed || time.Since(since) > limit {
				w.fail("it says that it is in sync, but %s (others' changes: %t, %v ago)", why, disturbed, time.Since(since))
			}
			continue
		}
		if w.cfg.Mode == "nftables" && disturbed && time.Since(since) <= repairTime {
			continue // A chain that no Service needs may come into use, and others have changed it.
		}
		_, refuses := w.rules.(*nftRules) // where a Service had no endpoints in the mode before
		if (disturbed || refuses) && w.rules.leftover(f) {
			continue // Nobody repairs that, but it goes.
		}
		delete(w.disturbed, f)
		if !w.rules.leftover(f) {
			maps.DeleteFunc(w.owners, func(at netip.AddrPort, _ set.Set[plan.Key]) bool { return plan.FamilyOf(at.Addr()) == f })
			maps.DeleteFunc(w.usable, func(k plan.Key, _ set.Set[netip.AddrPort]) bool { return k.Family == f })
			w.allow(p)
		}
		w.holdsFlows(f)
		kept := len(w.modes) > 1 && strings.Contains(w.foreign[f], stolen) // Others have rules that may refuse what another mode sends on.
		for q := range w.probes(f) {
			action := verdicts.Verdict(q.packet()).Action
			if action == plan.Forward && !kept {
				w.steady[q] = true
			}
			if action != plan.Pass && !w.rules.leftover(f) { // Addresses of mode ipvs are the node's own, which answers.
				w.heeded[q] = true
			}
		}
	}
}

// allow notes that packets may get to the endpoints of a plan.
func (w *world) allow(p *plan.Plan) {
	for _, sp := range p.Services {
		if w.usable[sp.Key] == nil {
			w.usable[sp.Key] = set.Set[netip.AddrPort]{}
		}
		for _, to := range sp.All() {
			w.usable[sp.Key].Insert(to.Addr)
		}
		for _, from := range sp.Frontends {
			at := netip.AddrPortFrom(from.Addr, from.Port)
			if from.Kind == plan.NodePort {
				at = netip.AddrPortFrom(nodeAddress(sp.Key.Family), from.Port)
			}
			if w.owners[at] == nil {
				w.owners[at] = set.Set[plan.Key]{}
			}
			w.owners[at].Insert(sp.Key)
		}
	}
}

// allowed reports whether packets to a frontend may get to an endpoint.
func (w *world) allowed(from, to netip.AddrPort) bool {
	for k := range w.owners[from] {
		if w.usable[k].Has(to) {
			return true
		}
	}
	return false
}

// verified looks at what a verification says that it has repaired: a watch must have lost something of it, or the API be back in time.
func (w *world) verified(text string) {
	w.rules.Lock()
	defer w.rules.Unlock()
	w.cluster.Lock()
	defer w.cluster.Unlock()
	object, _, named := strings.Cut(strings.TrimPrefix(text, "a verification has repaired "), ": ")
	kind, name, _ := strings.Cut(object, " ")
	if named && (kind == "ServicePort" || !w.lost[name] && w.cluster.Lost == nil) {
		w.fail("%s, and nothing of that was lost", text)
	}
}

// disturb notes that the tables of a family may not be as the daemon has left them.
func (w *world) disturb(f plan.Family) {
	delete(w.alike, f)
	w.disturbed[f], w.flows.disturbed, w.tampered = time.Now(), time.Now(), true
	w.unsteady(f)
}

// unsteady notes that packets of a family may not get where they got.
func (w *world) unsteady(f plan.Family) {
	clear(w.heeded)
	for q := range w.steady {
		if q.to.Addr().Is4() == (f == plan.IPv4) {
			delete(w.steady, q)
		}
	}
}

// changed looks at tables that nodeproxy has changed. They are locked.
func (w *world) changed(f plan.Family, by ruleWriter, input string) {
	delete(w.alike, f)
	if w.rules.leftover(f) {
		w.flows.disturbed = time.Now()
		clear(w.heeded)
	}
	w.note("%s %q", f, input)
	if by.Dead() {
		w.disturb(f)
	}
	if now := w.rules.others(f); now != w.foreign[f] {
		w.fail("it has changed what others have: %s, which was %s", now, w.foreign[f])
	}
	rules, err := w.rules.packets(f)
	if err != nil {
		w.fail("%v", err)
		return
	}
	for q := range w.probes(f) {
		if w.failure != "" {
			return
		}
		w.send(q, rules)
	}
	w.flows.written = time.Now()
	w.talk(f, rules)
}

// send sends a packet.
func (w *world) send(q probe, rules *packetsim.Machine) {
	_, disturbed := w.disturbed[plan.FamilyOf(q.to.Addr())]
	_, tables := w.rules.(*xtablesRules)
	// Others may have changed to which endpoint an element leads, or added a real server.
	misled := disturbed && !tables
	// Rules of others may lead to Services that had the address once.
	led := strings.Contains(w.foreign[plan.FamilyOf(q.to.Addr())], stolen)
	outcomes, err := rules.Trace(q.packet(), thisNode)
	if err != nil {
		w.fail("packet %s: %v", q.packet(), err)
		return
	}
	for _, o := range outcomes {
		switch {
		case o.DNAT && !w.ever[q.to][o.Dst] && !misled:
			w.fail("packet %s gets to %s, which has never been an endpoint", q.packet(), o.Dst)
		case o.DNAT && !w.allowed(q.to, o.Dst) && !disturbed && !led:
			w.fail("packet %s gets to %s, which is no endpoint any more", q.packet(), o.Dst)
		case w.steady[q] && (!o.DNAT || o.Action != packetsim.Accept):
			w.fail("packet %s: %s, though there has been an endpoint all the time\n%s", q.packet(), o, strings.Join(o.Rules(), "\n"))
		case w.heeded[q] && !w.troubled && !o.DNAT && o.Action == packetsim.Accept:
			w.fail("packet %s is neither sent to an endpoint nor refused\n%s", q.packet(), strings.Join(o.Rules(), "\n"))
		}
	}
}

// end ends all trouble, and checks what holds then.
func (w *world) end() {
	w.calm()
	time.Sleep(repairTime) // in simulated time
	synctest.Wait()
	w.rules.Lock()
	w.look()
	w.rules.Unlock()
	wait := inTime
	if w.silent {
		wait = inTimeSilent
	}
	w.cluster.Lock()
	if len(w.lost) > 0 {
		wait += inTimeLost
	}
	if w.file != nil { // It is tried again.
		wait += lastReload
	}
	w.cluster.Unlock()
	time.Sleep(wait) // in simulated time
	synctest.Wait()
	if w.file != nil && !w.file.SameEffect(w.cfg) {
		w.fail("in the end: what the configuration file holds is not in force: %+v, which is %+v", w.file, w.cfg)
	}
	s := emptyState(w.cfg)
	w.cluster.Lock()
	all := batchOf(w.cluster, w.cluster.Version)
	w.cluster.Unlock()
	s.Apply(all)
	p, _ := s.Update()
	check := func(when string) {
		if why := w.reports(p); why != "" { // which may read the tables
			w.fail("%s: %s", when, why)
		}
		w.rules.Lock()
		defer w.rules.Unlock()
		if w.failure != "" {
			return
		}
		for _, f := range plan.Families {
			if why := cmp.Or(w.rules.differs(f, p, true), w.agrees(f, w.model(all))); why != "" {
				w.fail("%s: %s", when, why)
			}
			if why := w.staleFlow(f, w.model(all)); why != "" {
				w.fail("%s: %s", when, why)
			}
			if now := w.rules.others(f); now != w.foreign[f] {
				w.fail("%s: others have %s, which was %s", when, now, w.foreign[f])
			}
		}
		if missing := w.daemon.monitor.node.Missing(); len(missing) > 0 || !w.idle() {
			w.fail("%s: it says that it is not in sync: %v, the oldest change %v", when, missing, w.daemon.monitor.node.OldestChange())
		}
	}
	check("in the end")
	w.stop()
	w.start()
	time.Sleep(time.Minute) // in simulated time
	synctest.Wait()
	check("after another start")
	if n := w.process.Written(); n > 0 {
		w.fail("another start writes %d times", n)
	}
	w.stop()
}
