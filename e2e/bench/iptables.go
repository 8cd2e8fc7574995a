package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/kernel/netlink"
)

// The goals of scenario iptables, which bind the nft variant; the legacy variant is measured for the same table.
const (
	programmingGoal = 5 * time.Second
	changeGoal      = 50 * time.Millisecond
	restartGoal     = 3 * time.Second
	connectGoal     = 2.0 // times that of something else
	rateGoal        = 0.9 // of what it is without a proxy
)

// suites is the run of one variant of iptables: labs of their own for each suite, of which only one has a proxy where two are compared.
type suites struct {
	*options
	*table
	variant harness.Variant
}

// runSuites runs the suites, prints the table, and returns how many goals are missed. A suite that fails does not keep the others from
// being run.
func runSuites(_ context.Context, o *options) (missed int) {
	var errs []error
	r := &suites{options: o, table: newTable(os.Stdout)}
	r.line("iptables", "what", "goal", "measured", "ok?")
	for _, backend := range o.backends {
		r.variant = harness.Variant(backend)
		fmt.Printf("# iptables-%s; %s\n", backend, machine.State())
		for _, suite := range []struct {
			name string
			run  func()
		}{{"services", r.services}, {"endpoints", r.endpoints}, {"wide", r.wide}} {
			if !slices.Contains(o.only, suite.name) {
				continue
			}
			begun := time.Now()
			if err := attempt(suite.run); err != nil {
				r.line(backend, suite.name, "", "not measured", "ERROR")
				errs = append(errs, fmt.Errorf("%s, %s: %w", backend, suite.name, err))
			}
			fmt.Printf("# %s, %s: took %.1f s; %s\n", backend, suite.name, time.Since(begun).Seconds(), machine.LoadAverage())
		}
	}
	fmt.Println()
	_ = r.Flush()
	check(errors.Join(errs...))
	return r.missed
}

// note adds a line without a goal.
func (r *suites) note(what, measured string) {
	r.line(string(r.variant), what, "", measured, "")
	fmt.Printf("#   %s: %s\n", what, measured)
}

// judge adds a line with a goal.
func (r *suites) judge(what, goal, measured string, met bool) {
	verdict := "ok"
	if !met && r.variant == harness.NFT {
		verdict = r.verdict(met)
	} else if !met {
		verdict = "missed, does not bind"
	}
	r.line(string(r.variant), what, goal, measured, verdict)
	fmt.Printf("#   %s: %s (goal %s): %s\n", what, measured, goal, verdict)
}

// atMost judges a duration by an upper limit.
func (r *suites) atMost(what string, limit, got time.Duration, detail string) {
	r.judge(what, "<= "+duration(limit), strings.TrimSpace(duration(got)+" "+detail), got <= limit)
}

// connects judges the time of a connect by that of another.
func (r *suites) connects(what string, a, b time.Duration) {
	r.judge(what, fmt.Sprintf("<= %.0f x", connectGoal), by(a, b), float64(a)/float64(b) <= connectGoal)
}

func by(a, b time.Duration) string {
	return fmt.Sprintf("%s (%s)", times(float64(a)/float64(b)), duration(a))
}

func (r *suites) lab(sizes ...int) *manifestLab {
	return newManifestLab([]string{"--iptables-backend=" + string(r.variant)}, sizes...)
}

// services is the suite of many Services with two endpoints each.
func (r *suites) services() {
	var labs [3]*manifestLab // one without any rule, one that tracks connections, and the one with nodeproxy
	for i, n := range []int{0, 0, r.options.services[0]} {
		labs[i] = r.lab(slices.Repeat([]int{2}, n)...)
		defer func() { labs[i].close(recover()) }()
	}
	plain, tracked, l := labs[0], labs[1], labs[2]
	tracked.stage.masquerade(r.variant)
	r.program(l, fmt.Sprintf("%d services x 2 endpoints", len(l.services)))
	r.compare(plain.stage, tracked.stage, l)
	r.change(l)
	r.restart(l)
	r.restartAfterChange(l)
}

// program starts nodeproxy over an empty rule set, and checks that Services answer when it says so.
func (r *suites) program(l *manifestLab, what string) {
	took := l.start()
	l.check()
	saved := must(l.Node1().Output(r.variant.Tool("iptables")+"-save", "-t", "nat"))
	r.atMost("first programming of "+what, programmingGoal, took,
		fmt.Sprintf("(%d nat rules; %s of CPU in nodeproxy itself)", strings.Count(saved, "\n-A "), duration(must(l.daemon.CPUTime()))))
}

// check asks the first, the last and some of the Services between for an answer, and checks that one of their own endpoints gives it.
func (l *manifestLab) check() {
	l.stage.inClient(func() {
		for i := len(l.services) - 1; i >= 0; i -= max(1, len(l.services)/200) {
			s := l.services[i]
			from, err := ask(s.frontend(), untimed)
			if err == nil && !s.has(from) {
				err = fmt.Errorf("%s answered, which is none of its endpoints", from)
			}
			check(err, "service "+s.name)
		}
	})
}

// compare compares connections. What stands for "no proxy" with new connections per second is the node that tracks connections: the
// kernel's connection tracking costs the same with and without a proxy. How much that is, the comparison with a node without any rule shows.
func (r *suites) compare(plain, tracked *stage, l *manifestLab) {
	first, last := l.ends()
	toLast := l.stage.target("last service", last.frontend())
	t := connectTimes(r.options, plain.pod("pod, no proxy"), toLast, l.stage.target("first service", first.frontend()), l.stage.pod("pod"))
	r.note("connect to a pod, no proxy", duration(t[0]))
	r.connects(fmt.Sprintf("connect to the last of %d services, by pod without proxy", len(l.services)), t[1], t[0])
	r.note("connect to the first service", by(t[2], t[0]))
	r.note("connect to a pod beside the services", by(t[3], t[0]))

	v := rates(r.options, plain.pod("no rules"), tracked.pod("no proxy"), l.stage.pod("proxy"), toLast)
	by := func(i, j int) string { return fmt.Sprintf("%s (%s)", times(v[i]/v[j]), perSecond(v[i])) }
	r.note("new connections/s to a pod, no rule and no connection tracking", perSecond(v[0]))
	r.note("the same, no proxy, connection tracking and one MASQUERADE rule, by no rule", by(1, 0))
	r.note(fmt.Sprintf("the same beside %d services, by no rule", len(l.services)), by(2, 0))
	r.judge(fmt.Sprintf("the same beside %d services, by no proxy", len(l.services)), fmt.Sprintf(">= %.1f x", rateGoal), by(2, 1),
		v[2] >= rateGoal*v[1])
	r.note("new connections/s to the last service, by no proxy", by(3, 1))
}

// change replaces one endpoint of a Service by a new one, again and again, each time of another Service in another file, and takes the time
// from the moment the manifest is in place until the new endpoint answers a new connection. From then on the old one must not answer.
func (r *suites) change(l *manifestLab) {
	before, cpuBefore := r.state(l), must(l.daemon.CPUTime())
	var all []time.Duration
	for range r.changes {
		s, was, replace := l.manifests.change()
		begun := time.Now()
		check(replace())
		all = append(all, l.await(begun, s, s.endpoints[0]))
		l.never(s, was)
		time.Sleep(150 * time.Millisecond) // So that the next finds nodeproxy at rest.
	}
	after, cpu := r.state(l), must(l.daemon.CPUTime())
	if r.verbose {
		fmt.Printf("#     changes: %v\n", all)
	}
	r.atMost(fmt.Sprintf("one endpoint of %d services changed, effective: p50", len(l.services)), changeGoal, percentile(all, 0.5),
		fmt.Sprintf("(p90 %s, max %s; of %d)", duration(percentile(all, 0.9)), duration(percentile(all, 1)), len(all)))
	cost := fmt.Sprintf("%s of CPU in nodeproxy itself", duration((cpu-cpuBefore)/time.Duration(r.changes)))
	if r.variant == harness.NFT {
		if after.generation == before.generation {
			check(errors.New("the endpoints changed, but the generation of nf_tables did not"))
		}
		cost += fmt.Sprintf(", %.1f transactions", float64(after.generation-before.generation)/float64(r.changes))
	}
	r.note("each such change", cost)
}

// await waits until an endpoint of a Service answers.
func (l *manifestLab) await(begun time.Time, s *service, endpoint netip.Addr) time.Duration {
	took, err := l.stage.await(prober, begun, s, 1, harness.Limit, func(from netip.Addr) bool { return from == endpoint })
	check(err, "service "+s.name)
	return took
}

// never checks that an endpoint does not answer any more.
func (l *manifestLab) never(s *service, was netip.Addr) {
	l.stage.inClient(func() {
		for range 20 {
			from, err := ask(s.frontend(), untimed)
			if from == was {
				err = fmt.Errorf("%s still answers, beside the endpoint that replaces it", from)
			}
			check(err, "service "+s.name)
		}
	})
}

// restart stops nodeproxy and starts it again over the rules that are in place.
func (r *suites) restart(l *manifestLab) {
	check(l.daemon.Stop())
	before := r.state(l)
	took := l.start()
	after := r.state(l)
	l.check()
	what := fmt.Sprintf("restart over %d unchanged services", len(l.services))
	r.atMost(what+", in sync", restartGoal, took, "")
	written := "no rule rewritten"
	if before.rules != after.rules {
		written = "rules rewritten"
	}
	if r.variant == harness.NFT {
		written += fmt.Sprintf(" (%d transactions)", after.generation-before.generation)
	}
	r.judge(what+", rules written", "none", written, before.rules == after.rules)
}

// restartAfterChange restarts nodeproxy once more, with an endpoint changed while nothing watched.
func (r *suites) restartAfterChange(l *manifestLab) {
	check(l.daemon.Stop())
	before := r.state(l)
	i := len(l.services) / 2
	s := l.services[i]
	s.endpoints[1] = l.fresh()
	l.write(i)
	begun := time.Now()
	l.daemon = must(l.StartDaemon(l.Node1(), l.flags...))
	r.atMost("restart, an endpoint changed meanwhile, effective", restartGoal, l.await(begun, s, s.endpoints[1]), "")
	if before.rules == r.state(l).rules {
		check(errors.New("an endpoint changed, and the fingerprint of the rules did not: it proves nothing"))
	}
}

// endpoints is the suite that compares a Service of many endpoints with one of two, and says how evenly its endpoints got requests.
func (r *suites) endpoints() {
	l := r.lab(2, r.options.endpoints)
	defer func() { l.close(recover()) }()
	l.start()
	l.check()
	few, many := l.services[0], l.services[1]
	t := connectTimes(r.options, l.stage.target("2 endpoints", few.frontend()), l.stage.target("many endpoints", many.frontend()))
	r.connects(fmt.Sprintf("connect to a service of %d endpoints, by one of 2", r.options.endpoints), t[1], t[0])
	const perEndpoint = 20
	got := map[netip.Addr]int{}
	l.stage.inClient(func() {
		for range perEndpoint * len(many.endpoints) {
			got[must(ask(many.frontend(), untimed))]++
		}
	})
	var requests []int
	for _, e := range many.endpoints {
		requests = append(requests, got[e])
	}
	r.note(fmt.Sprintf("spread over %d endpoints, %d requests each on average", len(requests), perEndpoint),
		fmt.Sprintf("%d to %d each", slices.Min(requests), slices.Max(requests)))
}

// wide is the suite of fewer Services with many endpoints each.
func (r *suites) wide() {
	const endpoints = 50
	l := r.lab(slices.Repeat([]int{endpoints}, r.options.wide)...)
	defer func() { l.close(recover()) }()
	r.program(l, fmt.Sprintf("%d services x %d endpoints", len(l.services), endpoints))
}

// ruleState is what the kernel has of rules.
type ruleState struct {
	// generation is the number of the nf_tables rule set's: each transaction that is committed in the namespace increments it, whatever it
	// changed.
	generation uint32
	// rules identifies them in such a way that a rule which is replaced by an equal one changes it: on the nft variant by the rules'
	// handles, on the legacy variant by their packet counters, which start again from zero.
	rules [sha256.Size]byte
}

func (r *suites) state(l *manifestLab) (s ruleState) {
	node := l.Node1().Netns
	var text strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		for _, table := range []string{"nat", "filter"} {
			var out string
			var err error
			if r.variant == harness.NFT {
				// Handles, numeric, and stateless: counters may move while nobody writes.
				out, err = node.Output("nft", "-a", "-nn", "-s", "list", "table", family, table)
				if err != nil && strings.Contains(err.Error(), "No such file or directory") {
					err = nil
				}
			} else {
				out, err = node.Output(r.variant.Tool(family+"tables")+"-save", "-c", "-t", table)
			}
			check(err)
			for line := range strings.Lines(out) {
				// Base chains of the legacy variant count every packet that passes, and their first rules with them.
				if r.variant == harness.NFT || strings.Contains(line, " -A KUBE-SVC-") || strings.Contains(line, " -A KUBE-SEP-") {
					text.WriteString(line)
				}
			}
		}
	}
	s.rules = sha256.Sum256([]byte(text.String()))
	if r.variant == harness.NFT {
		s.generation = generation(node)
	}
	return s
}

func generation(n *harness.Netns) uint32 {
	c := must(harness.In(n, func() (*netlink.Conn, error) { return netlink.Dial(unix.NETLINK_NETFILTER) }))
	defer c.Close()
	header := make([]byte, 4) // that of nfnetlink, which is zero in a request that concerns no family
	answer := must(c.Ask(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Body: header}))
	value := netlink.Attribute(answer[min(len(header), len(answer)):], unix.NFTA_GEN_ID)
	if len(value) != 4 {
		check(errors.New("no generation of nf_tables in the answer"))
	}
	return binary.BigEndian.Uint32(value)
}
