package flows

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/plan"
)

// fill puts n flows like e into the table of this thread's namespace, each from a source of its own.
func fill(t testing.TB, e entry, n int) {
	t.Helper()
	const most = 1000
	for i := 0; i < n; {
		var some []entry
		for last := min(i+most, n); i < last; i++ {
			src := netip.AddrFrom4([4]byte{172, 16 + byte(i>>24), byte(i >> 16), byte(i >> 8)})
			e.Src = fmt.Sprintf("%s:%d", src, 20000+i&255)
			some = append(some, e)
		}
		conntracktest.Inject(t, some...)
	}
}

// readNumber reads a sysctl of connection tracking.
func readNumber(t testing.TB, name string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(t, err)
	return n
}

// count returns how many flows this thread's namespace tracks.
func count(t testing.TB) int {
	t.Helper()
	return readNumber(t, "nf_conntrack_count")
}

// TestManyFlows: going through 200,000 flows takes no more memory than a few do; deleting all of them neither.
func TestManyFlows(t *testing.T) {
	nstest.Run(t, func() {
		n := min(200_000, readNumber(t, "nf_conntrack_max")/4*3) // small machines track fewer
		const dst, from = "10.96.0.10:53", "10.244.1.1:5353"
		start := time.Now()
		fill(t, entry{Protocol: protoUDP, Dst: dst, From: from}, n)
		t.Logf("made %d flows in %v", count(t), time.Since(start))
		var last Sweep
		r := newReconciler(func(c *Config) {
			c.Families = []plan.Family{plan.IPv4}
			c.Observe = func(s Sweep) { last = s }
		})
		p := plan.New(plan.Node{}, plan.Settings{})
		for i := range 1000 {
			p.Set(service(fmt.Sprint("s", i), plan.UDP, fmt.Sprintf("10.97.%d.%d:53", i>>8, i&255), from))
		}
		sp := service("dns", plan.UDP, dst, from)
		p.Set(sp)
		r.Update(p, plan.Everything())
		pass := func(what string, read, deleted int) {
			runtime.GC()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			mustPass(t, r)
			runtime.ReadMemStats(&after)
			allocated := after.TotalAlloc - before.TotalAlloc
			t.Logf("%s: read %d, deleted %d in %v (%v for each 100,000 in the table), %d kB allocated",
				what, last.Read, last.Deleted, last.Took, last.Took*100_000/time.Duration(n), allocated>>10)
			if last.Read < read || last.Deleted != deleted {
				t.Errorf("%s: read %d, deleted %d; want %d, %d", what, last.Read, last.Deleted, read, deleted)
			}
			// All that is allocated, though it is garbage at once. Other tests do not run meanwhile.
			if allocated > 1<<20 {
				t.Errorf("%s: %d bytes allocated", what, allocated)
			}
		}
		pass("full pass", n, 0)
		set(r, p, service("s0", plan.UDP, "10.97.0.0:53"))
		pass("change of another Service", 0, 0)
		if last.Read != 0 {
			t.Errorf("the kernel did not filter: %d flows read for a Service that has none", last.Read)
		}
		set(r, p, service("dns", plan.UDP, dst, "10.244.1.2:5353"))
		pass("endpoint replaced", n, n)
		if left := count(t); left != 0 {
			t.Errorf("%d flows are left", left)
		}
	})
}
