package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
)

// TestBetweenLookups: a transaction that is carried out between any two lookups of a packet, for each of which the kernel decides anew
// which transactions it sees, never has the packet go on untranslated that both before and after belongs to a Service, nor anywhere
// that neither the plan before nor the one after sends it. It may be let in by the source ranges of either, be treated as the policies of
// either say, and go to an endpoint of either.
func TestBetweenLookups(t *testing.T) {
	t.Parallel()
	switches := 0
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		next := c.Edited(t)
		giveWeights(next, rapid.Uint32().Draw(t, "weights after"))
		for _, sp := range next.Sorted(plan.IPv4) {
			if rapid.IntRange(0, 9).Draw(t, "removed") == 9 {
				next.Delete(sp.Key)
			}
		}
		placed := map[plan.Key]written{}
		for k, sp := range c.Plan.Services {
			placed[k] = place(written{}, sp)
		}
		before, after := plan.NewEvaluator(c.Plan), plan.NewEvaluator(next)
		var mixed []*plan.Evaluator
		both := []*plan.Plan{c.Plan, next}
		for _, p := range both {
			for _, policies := range both {
				for _, ranges := range both {
					mixed = append(mixed, plan.NewEvaluator(treatedAs(policies, ranges, p)))
				}
			}
		}
		for _, f := range plan.Families {
			r, then := rulesetOf(c.Plan, f, Options{}, nil), rulesetOf(next, f, Options{}, placed)
			for name := range then.chains { // For a packet that came before the transaction, a new chain has no rules.
				if _, is := r.chains[name]; !is {
					r.chains[name] = nft.Chain{Name: name}
				}
			}
			for range packetsPerPlan / 8 {
				pkt := c.Packets(f).Draw(t, "packet")
				clear(r.clients)
				r.next = nil
				if known := r.trace(pkt, c.Local); rapid.Bool().Draw(t, "known") {
					r.clients = known[0].State.(state).clients
				}
				v, w := before.Verdict(pkt), after.Verdict(pkt)
				verdicts := make([]plan.Verdict, len(mixed))
				for i, e := range mixed {
					verdicts[i] = e.Verdict(pkt)
				}
				r.next, r.since = then, 0
				for last := false; !last; {
					r.since++
					last = true
					for _, o := range r.trace(pkt, c.Local) {
						last = last && o.State.(state).lookups < r.since
						if !between(o, verdicts...) {
							t.Fatalf("packet: %s\nbefore: %s\nafter: %s\nchanged at lookup %d:\n%s", pkt, v, w, r.since,
								text([]packetsim.Outcome{o}))
						}
					}
					switches++
				}
			}
		}
	})
	if switches == 0 {
		t.Error("no packet met a transaction")
	}
}

// treatedAs returns a plan whose ServicePorts have the policies and the source ranges that they have in others.
func treatedAs(policies, ranges, p *plan.Plan) *plan.Plan {
	out := plan.New(p.Node, p.Settings)
	for key, sp := range p.Services {
		treated := *sp
		if o := policies.Services[key]; o != nil {
			treated.InternalPolicy, treated.ExternalPolicy = o.InternalPolicy, o.ExternalPolicy
		}
		if o := ranges.Services[key]; o != nil {
			treated.SourceRanges = o.SourceRanges
		}
		out.Set(&treated)
	}
	return out
}

// between reports whether a packet may end like that where one verdict holds when it comes, and then another one. It may always be
// dropped: its client sends it again.
func between(o packetsim.Outcome, verdicts ...plan.Verdict) bool {
	return o.Action == packetsim.Drop || slices.ContainsFunc(verdicts, func(v plan.Verdict) bool {
		switch {
		case o.DNAT:
			return slices.ContainsFunc(v.Targets, func(x plan.Target) bool { return x.Addr == o.Dst })
		case o.Action == packetsim.Reject:
			return v.Action == plan.Reject || v.Action == plan.Pass
		}
		return v.Action == plan.Pass
	})
}

// counting counts and drops packets right after services have been translated: those that were, to the port of pods, and those that were not, to
// the ports given.
const counting = `
	table ip behind {
		counter translated {}
		counter untranslated {}
		chain count {
			udp dport 8080 counter name translated drop
			udp dport { %s } counter name untranslated drop
		}
		chain sent { type filter hook output priority -50; jump count; }
		chain received { type filter hook prerouting priority -50; jump count; }
	}`

// behind reads the counters.
func behind(t *testing.T) (translated, untranslated int) {
	t.Helper()
	for name, to := range map[string]*int{"translated": &translated, "untranslated": &untranslated} {
		_, after, _ := strings.Cut(nstest.Exec(t, "nft", "list", "counter", "ip", "behind", name), "packets ")
		if _, err := fmt.Sscan(after, to); err != nil {
			t.Fatal(err)
		}
	}
	return translated, untranslated
}

// TestUntranslated: while a Service changes, the kernel lets none of its packets pass untranslated. Without -short, there are enough
// packets to notice one in a million.
func TestUntranslated(t *testing.T) {
	nstest.Enter(t)
	startPods(t, 3)
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
	nstest.Exec(t, "nft", fmt.Sprintf(counting, "80, 30000"))
	packets := int64(1_000_000)
	if testing.Short() {
		packets = 40_000
	}
	cluster := netip.MustParseAddrPort("10.96.0.10:80")
	port := plan.Frontend{Kind: plan.NodePort, Protocol: plan.UDP, Port: 30000}
	for _, tc := range []struct {
		name string
		to   netip.AddrPort
		make func(sp *plan.ServicePort, odd bool)
	}{
		{"endpoints", cluster, func(sp *plan.ServicePort, odd bool) {}},
		{"affinity", cluster, func(sp *plan.ServicePort, odd bool) { sp.Affinity = time.Hour }},
		{"node port", netip.MustParseAddrPort("192.0.2.1:30000"), func(sp *plan.ServicePort, odd bool) { sp.Frontends = append(sp.Frontends, port) }},
		{"policy", netip.MustParseAddrPort("192.0.2.1:30000"), func(sp *plan.ServicePort, odd bool) {
			sp.Frontends = append(sp.Frontends, port)
			if odd {
				sp.ExternalPolicy = plan.Local
			}
		}},
	} {
		_ = Cleanup()
		e, _ := testEngine(t, plan.IPv4)
		p, changes := plantest.Large(0, 0), 0
		sync := func() {
			t.Helper()
			sp := (&pods{}).service([]int{0, 1, 2}[:3-changes%2]...)
			sp.Endpoints.Local = sp.Endpoints.Cluster
			tc.make(sp, changes%2 == 1)
			p.Set(sp)
			change := plan.Only(plan.Keys{sp.Key: {}})
			if changes++; changes == 1 {
				change = plan.Everything()
			}
			synced(t, e, p, change)
		}
		for range 2 { // Then all kinds have their chains.
			sync()
		}
		was, wasNot := behind(t)
		sendAll(t, tc.to, packets, sync)
		yes, no := behind(t)
		yes, no = yes-was, no-wasNot
		result := fmt.Sprintf("%s, %d changes: of %d packets, %d were translated and %d were not", tc.name, changes, packets, yes, no)
		if t.Log(result); no > 0 || yes == 0 {
			t.Error(result)
		}
	}
}

// sendAll sends first packets of connections of many clients, by two threads, and calls meanwhile until all are sent. The packets are dropped before connection
// tracking knows them, so that each is the first again.
func sendAll(t *testing.T, to netip.AddrPort, packets int64, meanwhile func()) {
	t.Helper()
	var left atomic.Int64
	left.Store(packets)
	var threads sync.WaitGroup
	for range 2 {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		require.NoError(t, err)
		require.NoError(t, unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}))
		threads.Go(func() {
			defer unix.Close(fd)
			for n := left.Add(-1); n >= 0; n = left.Add(-1) {
				from := unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte{127, 1, byte(n >> 8), byte(n)}})
				if _, err := unix.SendmsgN(fd, []byte("x"), from, nil, 0); err != nil && err != unix.EPERM { // as where a rule drops it
					t.Error(err)
					left.Store(0)
				}
			}
		})
	}
	for left.Load() > 0 {
		meanwhile()
	}
	threads.Wait()
}
