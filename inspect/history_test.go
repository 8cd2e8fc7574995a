package inspect

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
	"nodeproxy/proxier"
)

// aSync is a sync that changed n Services s-FIRST and so on.
func aSync(first, n int, reasons ...proxier.Reason) Sync {
	r := proxier.Result{Began: time.Now(), Reasons: reasons, Backend: time.Millisecond}
	r.Difference.Changed = n
	for i := first; i < first+n; i++ {
		r.Difference.Services = append(r.Difference.Services, proxier.ServiceDifference{Service: plan.Service{Namespace: "default", Name: fmt.Sprintf("s-%05d", i)}, Ports: 1})
	}
	if n > proxier.MostNamed {
		r.Difference.Services, r.Difference.Others = r.Difference.Services[:proxier.MostNamed], n-proxier.MostNamed
	}
	return NewSync(plan.Everything(), r, map[string]int{})
}

// TestHistoryIsBounded: however many and large the syncs, the history takes no more memory than it says.
func TestHistoryIsBounded(t *testing.T) {
	h := &History{}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range 3000 {
		s := aSync(i*1000, 1000, proxier.Arrived)
		s.Error = cut(strings.Repeat("x", 10000))
		h.Add(s)
	}
	if after := heap(); after > before+1<<20 {
		t.Errorf("it takes %d bytes", after-before)
	}
	if n := len(h.Syncs()); n != 16 {
		t.Errorf("%d syncs of %d named Services are kept", n, proxier.MostNamed)
	}
	for i := range 3000 {
		h.Add(aSync(i, 1, proxier.Arrived))
	}
	list := h.Syncs()
	if len(list) != mostSyncs || list[0].Number != 6000-mostSyncs+1 || h.named != mostSyncs {
		t.Errorf("%d syncs are kept from number %d on, of %d Services", len(list), list[0].Number, h.named)
	}
}

// TestHistoryOf: a Service's history has the syncs that changed it, and those that may have, as they changed too many to name.
func TestHistoryOf(t *testing.T) {
	t.Parallel()
	h := &History{}
	h.Add(aSync(0, 1000, proxier.Start))
	h.Add(aSync(5, 1, proxier.Arrived))
	h.Add(aSync(600, 1, proxier.Arrived))
	of := func(name string) (out []string) {
		for _, s := range h.Of(plan.Service{Namespace: "default", Name: name}) {
			out = append(out, s.servicesText(3))
		}
		return out
	}
	for name, want := range map[string][]string{
		"s-00005": {"default/s-00005 and 999 more", "default/s-00005"}, "s-00600": {"1000 Services", "default/s-00600"}, "s-00007": {"default/s-00007 and 999 more"}, "a": nil,
	} {
		if got := of(name); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// TestHistoryRepeats: syncs in a row that find nothing to do are one entry, and what another program has changed ends that.
func TestHistoryRepeats(t *testing.T) {
	t.Parallel()
	h := &History{}
	h.Add(aSync(0, 1, proxier.Start))
	for range 5 {
		h.Add(aSync(0, 0, proxier.Compare))
	}
	h.Drifted(3, "chain KUBE-SERVICES: missing")
	h.Add(aSync(0, 0, proxier.Drift))
	for range 2 {
		h.Add(aSync(0, 0, proxier.Compare))
	}
	h.Add(aSync(0, 0, proxier.Arrived))
	h.Add(aSync(0, 1, proxier.Start))
	var got []string
	for _, s := range h.Syncs() {
		got = append(got, fmt.Sprintf("%d %s %d %d %s", s.Number, s.why(), s.Repeated, s.Drift, s.DriftDetail))
	}
	want := []string{"1 start 0 0 ", "6 compare 4 0 ", "7 drift 0 3 chain KUBE-SERVICES: missing", "9 compare 1 0 ", "10 change 0 0 ", "11 config 0 0 "}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestWriteHistory pins the text of a history.
func TestWriteHistory(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	svc := func(name string) plan.Service { return plan.Service{Namespace: "default", Name: name} }
	first := NewSync(plan.Everything(), proxier.Result{
		Began: now.Add(-time.Hour), Reasons: []proxier.Reason{proxier.Start}, In: proxier.Input{Services: 5, EndpointSlices: 6}, Waited: time.Second,
		Apply: 100 * time.Microsecond, Plan: 200 * time.Microsecond, Backend: 1234567 * time.Microsecond,
		Difference: proxier.Difference{Added: 5, EndpointsAdded: 9, Others: 1, Services: []proxier.ServiceDifference{
			{Service: svc("a"), Added: true}, {Service: svc("b"), Added: true}, {Service: svc("c"), Added: true}, {Service: svc("d"), Added: true},
		}},
	}, map[string]int{"rule": 20, "chain": 1, "virtual_server": 2})
	failed := NewSync(plan.Only(nil), proxier.Result{
		Began: now.Add(-time.Minute), Reasons: []proxier.Reason{proxier.Retry, proxier.Arrived}, In: proxier.Input{Services: 1, Gone: 1}, Err: errors.New("no\nmemory"),
		Backend: 2 * time.Millisecond, Waiting: 7, Difference: proxier.Difference{Removed: 1, EndpointsRemoved: 2, Services: []proxier.ServiceDifference{{Service: svc("a"), Removed: true}}},
	}, nil)
	idle := NewSync(plan.Everything(), proxier.Result{Began: now.Add(-40 * time.Second), Reasons: []proxier.Reason{proxier.Compare}, Backend: 5 * time.Millisecond}, nil)
	h := &History{}
	for _, s := range []Sync{first, failed, idle, idle} {
		h.Add(s)
	}
	h.Drifted(1, "chain X: missing")
	drifted := NewSync(plan.Everything(), proxier.Result{Began: now.Add(-time.Second), Reasons: []proxier.Reason{proxier.Drift}, Suspicion: "table nat changed", Backend: time.Millisecond}, map[string]int{"chain": 1})
	h.Add(drifted)
	for wide, want := range map[bool]string{
		false: `AGE   WHY            CAME-IN                        SERVICES                                                           ENDPOINTS   TOOK     RESULT
60m   start          5 Services, 6 EndpointSlices   default/a (new), default/b (new), default/c (new) and 2 more      +9/-0       1.23s    in sync
60s   retry,change   1 Service, 1 gone             default/a (gone)                                                  +0/-2       2ms      failed: no\nmemory; 7 ServicePorts left to the next sync
40s   compare        <none>                         <none>                                                            <none>      5ms      nothing to do, 2 times since 2026-01-02T03:03:25Z
1s    drift          <none>                         <none>                                                            <none>      1ms      repaired: 1 thing changed by another program: chain X: missing
`,
		true: `2026-01-02T02:04:05Z | start | 5 Services, 6 EndpointSlices | default/a (new), default/b (new), default/c (new), default/d (new) and 1 more | +9/-0 | 1s | 300µs | 1.23s | <none> | 1 chain, 20 rules, 2 virtual servers | in sync`,
	} {
		var b strings.Builder
		require.NoError(t, WriteHistory(&b, h.Syncs(), wide, now))
		got := b.String()
		if wide {
			got = tableCells(strings.Split(got, "\n")[1])
		} else {
			got, want = tableCells(got), tableCells(want)
		}
		if got != want {
			t.Errorf("wide %t: got\n%s\nwant\n%s", wide, got, want)
		}
	}
}

// tableCells separates the cells of a table by bars, whatever their width.
func tableCells(s string) string {
	for strings.Contains(s, "    ") {
		s = strings.ReplaceAll(s, "    ", "   ")
	}
	return strings.ReplaceAll(s, "   ", " | ")
}

// BenchmarkHistoryAdd is what a sync of one Service costs more because it is recorded.
func BenchmarkHistoryAdd(b *testing.B) {
	h := &History{}
	b.ReportAllocs()
	for b.Loop() {
		h.Add(aSync(1, 1, proxier.Arrived))
	}
}
