package proxier

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// TestReasons: each sync says why it was made, what had come and for how long that had waited.
func TestReasons(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, seen := &recorder{start: time.Now(), takes: time.Second}, &results{}
		p, stop := start(t, Config{Backend: r, CompareEvery: time.Hour, Observer: seen})
		expect := func(what string, in Input, waited time.Duration, suspicion string, want ...Reason) {
			t.Helper()
			time.Sleep(10 * time.Second)
			synctest.Wait()
			list := seen.take()
			if len(list) == 0 {
				t.Fatalf("%s: no sync", what)
			}
			if got := list[0]; !reflect.DeepEqual(got.Reasons, want) || got.In != in || got.Waited != waited || got.Suspicion != suspicion {
				t.Errorf("%s: %v, %+v, waited %s, %q", what, got.Reasons, got.In, got.Waited, got.Suspicion)
			}
			if len(list) > 1 && len(list[1].Reasons) != 1 {
				t.Errorf("%s: the sync after it: %v", what, list[1].Reasons)
			}
		}
		p.Apply(batch("a", 80, false))
		time.Sleep(3 * time.Second)
		p.Apply(batch("b", 80, true))
		expect("the first", Input{Services: 2}, 3*time.Second, "", Start)
		p.Apply(batch("b", 81, false))
		expect("a change", Input{Services: 1}, 0, "", Arrived)
		p.Apply(noService("a"))
		expect("a deletion", Input{Services: 1, Gone: 1}, 0, "", Arrived)
		p.Resync()
		expect("a resync", Input{}, 0, "", Resync)
		p.Suspect("table nat was flushed")
		expect("a suspicion", Input{}, 0, "table nat was flushed", Drift)
		p.Reserve([]netip.AddrPort{})
		expect("reserved addresses", Input{}, 0, "", Arrived)
		r.fail = 1
		p.Apply(batch("c", 80, false))
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		if list := seen.take(); len(list) != 1 || list[0].Err == nil || len(list[0].Difference.Services) != 1 {
			t.Errorf("a failure: %+v", list)
		}
		expect("the attempt after a failure", Input{}, 0, "", Retry)
		time.Sleep(time.Hour)
		expect("a comparison that was due", Input{}, 0, "", Compare)
		stop()
	})
}

// text sums up a difference.
func (d Difference) all() string {
	var out []string
	for _, s := range d.Services {
		out = append(out, fmt.Sprintf("%s %d +%d/-%d %t %t", s.Service.Name, s.Ports, s.EndpointsAdded, s.EndpointsRemoved, s.Added, s.Removed))
	}
	return fmt.Sprintf("%d/%d/%d +%d/-%d: %s and %d", d.Added, d.Changed, d.Removed, d.EndpointsAdded, d.EndpointsRemoved, strings.Join(out, ", "), d.Others)
}

// TestDifference: a sync of changes and one of everything find the same difference, against what was published before.
func TestDifference(t *testing.T) {
	t.Parallel()
	p := plantest.Large(4, 3)
	published := &plan.Publisher{}
	if d := difference(nil, p, plan.Everything()); d.Added != 4 || d.EndpointsAdded != 12 || !d.Services[0].Added || d.Changed+d.Removed > 0 {
		t.Errorf("the first: %s", d.all())
	}
	published.Publish(p, plan.Everything())
	if d := difference(published.Latest(), p, plan.Everything()); d.Added+d.Changed+d.Removed > 0 || d.Services != nil {
		t.Errorf("none: %s", d.all())
	}
	var list []*plan.ServicePort
	for i := range 6 {
		list = append(list, plantest.LargeService(i, 3*i, 3))
	}
	changed := *list[1]
	changed.Cluster = changed.Cluster[1:]
	moved := *list[2]
	moved.Cluster = plantest.LargeService(2, 100, 5).Cluster
	same := *list[3]
	change := plan.Keys{}
	for _, sp := range []*plan.ServicePort{&changed, &moved, &same, list[4], list[5]} {
		p.Set(sp)
		change.Add(sp.Key)
	}
	p.Delete(list[0].Key)
	change.Add(list[0].Key)
	want := fmt.Sprintf("2/2/1 +11/-7: %s 1 +0/-3 false true, %s 1 +0/-1 false false, %s 1 +5/-3 false false, %s 1 +3/-0 true false, %s 1 +3/-0 true false and 0",
		list[0].Key.Service.Name, list[1].Key.Service.Name, list[2].Key.Service.Name, list[4].Key.Service.Name, list[5].Key.Service.Name)
	for _, c := range []plan.Change{plan.Only(change), plan.Everything()} {
		if d := difference(published.Latest(), p, c); d.all() != want {
			t.Errorf("everything %t: got\n%s, want\n%s", c.All(), d.all(), want)
		}
	}
	if d := difference(nil, plantest.Large(1000, 1), plan.Everything()); len(d.Services) != MostNamed || d.Others != 1000-MostNamed || d.Added != 1000 {
		t.Errorf("many: %d, and %d others, of %d", len(d.Services), d.Others, d.Added)
	}
}

// BenchmarkDifference is what it costs to tell what has changed among 10,000 Services of ten endpoints.
func BenchmarkDifference(b *testing.B) {
	p := plantest.Large(10000, 10)
	published := &plan.Publisher{}
	published.Publish(p, plan.Everything())
	sp := *plantest.LargeService(7, 70, 10)
	sp.Cluster = sp.Cluster[1:]
	p.Set(&sp)
	for name, change := range map[string]plan.Change{"one": plan.Only(plan.Keys{sp.Key: {}}), "everything": plan.Everything()} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if d := difference(published.Latest(), p, change); d.Changed != 1 {
					b.Fatal(d)
				}
			}
		})
	}
}
