package nftables

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

func weightedEndpoints(weights ...uint16) []plan.Endpoint {
	var out []plan.Endpoint
	for i, w := range weights {
		out = append(out, plan.Endpoint{Addr: podAddress(i), Weight: w})
	}
	return out
}

func shares(list []netip.AddrPort) map[netip.AddrPort]int {
	out := map[netip.AddrPort]int{}
	for _, a := range list {
		out[a]++
	}
	return out
}

// TestWeights: an endpoint has as many numbers as its weight says, in as few as possible, and at least one.
func TestWeights(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		scheduler string
		weights   []uint16
		want      []int
	}{
		{"wrr", []uint16{0, 2, 3}, []int{1, 2, 3}},
		{"wrr", []uint16{100, 300}, []int{1, 3}},
		{"wrr", []uint16{7, 7, 7}, []int{1, 1, 1}},
		{"wrr", []uint16{65535, 1}, []int{255, 1}},
		{"wrr", []uint16{65535, 32768}, []int{170, 85}},
		{"wlc", []uint16{1, 2}, []int{1, 2}},
		{"lc", []uint16{1, 2}, []int{1, 1}},
		{"", []uint16{1, 2}, []int{1, 1}},
	} {
		sp := &plan.ServicePort{Scheduler: plan.Scheduler{Name: tc.scheduler}}
		got := shares(numbered(nil, sp, weightedEndpoints(tc.weights...)))
		for i, n := range tc.want {
			if got[podAddress(i)] != n {
				t.Errorf("%s: of weights %v, that of %d makes %d numbers, want %d", tc.scheduler, tc.weights, tc.weights[i], got[podAddress(i)], n)
			}
		}
	}
	sp := &plan.ServicePort{Scheduler: plan.Scheduler{Name: "wrr"}}
	before := numbered(nil, sp, weightedEndpoints(1, 2, 3))
	after := numbered(before, sp, weightedEndpoints(1, 3, 3))
	changed := 0
	for i := range before {
		if before[i] != after[i] {
			changed++
		}
	}
	if changed > 0 || len(after) != 7 {
		t.Errorf("one weight more changes %d of %d numbers", changed, len(after))
	}
}

// TestConsistent: a hash gives each endpoint about its share, whatever the order of endpoints, and when one comes or goes, few clients of
// the others move.
func TestConsistent(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 10, 15, 50, 200} {
		all := weightedEndpoints(make([]uint16, n)...)
		mh := plan.Scheduler{Name: "mh"}
		table := consistent(all, mh, maxCount, mostSlots)
		for a, slots := range shares(table) {
			if mean := float64(len(table)) / float64(n); math.Abs(float64(slots)-mean) > 1 {
				t.Errorf("of %d endpoints, %s has %d numbers of %d", n, a, slots, len(table))
			}
		}
		reversed := slices.Clone(all)
		slices.Reverse(reversed)
		if !slices.Equal(consistent(reversed, mh, maxCount, mostSlots), table) {
			t.Errorf("the order of %d endpoints matters", n)
		}
		fewer := consistent(slices.Delete(slices.Clone(all), n/2, n/2+1), mh, maxCount, mostSlots)
		moved := 0
		for i := range table {
			if table[i] != all[n/2].Addr && fewer[i] != table[i] {
				moved++
			}
		}
		if moved == 0 && n > 3 || float64(moved) > 0.1*float64(len(table)) {
			t.Errorf("when one of %d endpoints goes, %d of %d numbers of the others change", n, moved, len(table))
		}
	}
	all := weightedEndpoints(1, 2, 5)
	for a, slots := range shares(consistent(all, plan.Scheduler{Name: "sh"}, maxCount, mostSlots)) {
		i := slices.IndexFunc(all, func(ep plan.Endpoint) bool { return ep.Addr == a })
		if want := 251 * float64(all[i].Weight) / 8; math.Abs(float64(slots)-want) > 3 {
			t.Errorf("weight %d has %d numbers of 251", all[i].Weight, slots)
		}
	}
	if got := consistent(all[:1], plan.Scheduler{Name: "mh"}, maxCount, mostSlots); !slices.Equal(got, []netip.AddrPort{all[0].Addr}) {
		t.Errorf("the table of one endpoint is %v", got)
	}
	for _, n := range []int{1, 1000, maxSticky, 70000} { // It ends, and stays within bounds.
		list := make([]plan.Endpoint, n)
		for i := range list {
			list[i].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
		}
		sp := &plan.ServicePort{Scheduler: plan.Scheduler{Name: "mh"}, Affinity: 1}
		if got := numbered(nil, sp, list); len(got) > maxSticky {
			t.Errorf("%d endpoints make a table of %d", n, len(got))
		}
		sp.Affinity = 0
		for _, frontends := range []int{1, 10, 100, 1000} {
			sp.Frontends = make([]plan.Frontend, frontends)
			got := numbered(nil, sp, list)
			if len(got) < min(n, 65521) || len(got)*frontends > mostSlots && len(got) > max(251, 5*n) {
				t.Errorf("%d endpoints of %d frontends make tables of %d", n, frontends, len(got))
			}
		}
	}
}

// TestHashOfTheKernel: the kernel sends clients where the table says, and when an endpoint goes, few elements change, in one transaction.
func TestHashOfTheKernel(t *testing.T) {
	nstest.Enter(t)
	world := startPods(t, 6)
	e, k := testEngine(t, plan.IPv4)
	p := plantest.Large(0, 0)
	sp := world.service(0, 1, 2, 3, 4, 5)
	sp.Scheduler.Name = "mh"
	sync := func(change plan.Change) {
		t.Helper()
		p.Set(sp)
		k.commits, k.most = 0, 0
		synced(t, e, p, change)
		table := numbered(nil, sp, sp.Endpoints.Cluster)
		for i := range 8 {
			from := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
			n := uint64(jhash(from.AsSlice(), hashSeed)) * uint64(len(table)) >> 32
			if got := world.goes(t, net.IP(from.AsSlice())); podAddress(got) != table[n] {
				t.Errorf("%s goes to %s, want %s", from, podAddress(got), table[n])
			}
		}
		if out := nstest.Exec(t, "nft", "list", "ruleset"); !strings.Contains(out, fmt.Sprintf("jhash ip saddr mod %d", len(table))) {
			t.Errorf("nft lists\n%s", out)
		}
	}
	for i := range 8 {
		nstest.Exec(t, "ip", "addr", "add", fmt.Sprintf("192.0.2.%d/32", i+1), "dev", "lo")
	}
	sync(plan.Everything())
	fewer := world.service(0, 1, 2, 4, 5)
	fewer.Scheduler = sp.Scheduler
	sp = fewer
	sync(plan.Only(plan.Keys{sp.Key: {}}))
	if k.commits != 1 || k.most > 2*251/4 {
		t.Errorf("one endpoint fewer made %d transactions, the largest with %d elements", k.commits, k.most)
	}
	holds(t, e, p)
}

// TestRenderSchedules: what is printed shows weights, hashes and tables. A scheduler that the mode does not have is named once.
func TestRenderSchedules(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		scheduler plan.Scheduler
		rule      string
		numbers   int // of endpoints
	}{
		{plan.Scheduler{}, "meta priority set numgen random mod 3 goto to-endpoint\n", 3},
		{plan.Scheduler{Name: "wrr"}, "meta priority set numgen random mod 6 goto to-endpoint\n", 6},
		{plan.Scheduler{Name: "mh"}, "meta priority set jhash ip saddr mod 251 seed 0x6e6f6465 goto to-endpoint\n", 251},
		{plan.Scheduler{Name: "sh", Ports: true}, "meta priority set jhash ip saddr . th sport mod 251 seed 0x6e6f6465 goto to-endpoint\n", 251},
	} {
		p := plantest.Large(0, 0)
		sp := plantest.LargeService(0, 0, 3)
		sp.Scheduler = tc.scheduler
		for i := range sp.Endpoints.Cluster {
			sp.Endpoints.Cluster[i].Weight = uint16(i + 1)
		}
		p.Set(sp)
		out := Render(p, plan.IPv4, Options{})
		if n := strings.Count(out, "\t\t\t10.96.0.10 . tcp . 80 . "); !strings.Contains(out, tc.rule) || n != tc.numbers {
			t.Errorf("scheduler %+v: %d numbers, want %d, and rule %q:\n%s", tc.scheduler, n, tc.numbers, tc.rule, out)
		}
	}
	var said []string
	a := &askedFor{warn: func(s string) { said = append(said, s) }, known: map[string]bool{}}
	for _, name := range []string{"", "lc", "mh", "rr", "lc", "sh", "wrr"} {
		a.note(name)
	}
	if want := []string{`mode nftables has no scheduler "lc"; Services that ask for it get their endpoints at random`}; !slices.Equal(said, want) {
		t.Errorf("it warns of %q, want %q", said, want)
	}
}

// TestEachHasANumber: whatever the weights, each endpoint has a number, and no more are used than there may be.
func TestEachHasANumber(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.SampledFrom([]int{1, 2, 300, 4000, maxSticky, maxSticky + 10}).Draw(t, "endpoints")
		list := make([]plan.Endpoint, n)
		for i := range list {
			list[i] = plan.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80), Weight: 1}
		}
		for range rapid.IntRange(0, 5).Draw(t, "heavy") {
			i := rapid.IntRange(0, n-1).Draw(t, "which")
			list[i].Weight = rapid.SampledFrom([]uint16{2, 100, 1000, 65535}).Draw(t, "weight")
		}
		sp := &plan.ServicePort{Scheduler: plan.Scheduler{Name: "wrr"}, Affinity: time.Duration(rapid.IntRange(0, 1).Draw(t, "affinity"))}
		most := maxCount
		if sp.Affinity > 0 {
			most = maxSticky
		}
		got := numbered(nil, sp, list)
		if has := len(shares(got)); len(got) > most || has != min(n, most) {
			t.Fatalf("%d of %d endpoints have numbers, of which there are %d", has, n, len(got))
		}
	})
}
