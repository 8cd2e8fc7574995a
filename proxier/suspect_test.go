package proxier

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// compare runs a Proxier whose syncs take as long as r says, and returns how many compared everything while do ran.
func compare(t *testing.T, r *recorder, every time.Duration, do func(p *Proxier)) (all int) {
	t.Helper()
	runWith(t, r, Config{CompareEvery: every}, func(p *Proxier) {
		p.Apply(batch("a", 1, true))
		time.Sleep(r.takes + time.Millisecond)
		synctest.Wait()
		do(p)
	})
	r.calls = r.calls[1:] // without the first sync
	for _, c := range r.calls {
		if strings.Contains(c, ": all") {
			all++
		}
	}
	return all
}

// TestSuspicion: what may have changed in the kernel is looked at soon, once for many suspicions, and without waiting for
// those that never end.
func TestSuspicion(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		every time.Duration // between suspicions
		n     int
		most  time.Duration // until the comparison
	}{
		{"one", 0, 1, debounce},
		{"many", 10 * time.Millisecond, 10, debounce + 90*time.Millisecond},
		{"without end", debounce / 2, int(2 * debounceMost / debounce), debounceMost},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := &recorder{takes: time.Millisecond}
			var begin time.Time
			n := compare(t, r, 0, func(p *Proxier) {
				begin = time.Now()
				for range tc.n {
					p.Suspect("a test says so")
					time.Sleep(tc.every)
				}
				time.Sleep(10 * time.Second)
			})
			if n != 1 || len(r.calls) != 1 {
				t.Fatalf("want one comparison, and nothing else: %q", r.calls)
			}
			if took := at(t, r.calls[0]) - begin.Sub(r.start); took > tc.most {
				t.Errorf("it came after %v, want %v", took, tc.most)
			}
		})
	}
}

// TestSuspicionsWithoutEnd: however many there are, comparing takes one part in 25 of the time.
func TestSuspicionsWithoutEnd(t *testing.T) {
	t.Parallel()
	r := &recorder{takes: time.Second}
	n := compare(t, r, 0, func(p *Proxier) {
		for range 100000 {
			p.Suspect("a test says so")
			time.Sleep(10 * time.Millisecond)
		}
	})
	if n < 36 || n > 40+suspectBurst {
		t.Errorf("in 1000 s there were %d comparisons of a second each, want some 40: %q", n, r.calls)
	}
}

// TestSuspicionDuringComparison: what happens while everything is compared may have come too late for it.
func TestSuspicionDuringComparison(t *testing.T) {
	t.Parallel()
	r := &recorder{takes: time.Second}
	n := compare(t, r, 0, func(p *Proxier) {
		p.Suspect("a test says so")
		time.Sleep(debounce + 500*time.Millisecond)
		p.Suspect("a test says so")
		time.Sleep(10 * time.Second)
	})
	if n != 2 {
		t.Errorf("want two comparisons: %q", r.calls)
	}
}

// TestCompareEvery: without any suspicion everything is compared now and then; less often where that takes long.
func TestCompareEvery(t *testing.T) {
	t.Parallel()
	const long = 100 * time.Millisecond
	for _, tc := range []struct {
		takes, lasts time.Duration
		want         int
	}{{time.Millisecond, 305 * time.Second, 10}, {long, 7 * compareShare * long / 2, 3}} {
		r := &recorder{takes: tc.takes}
		if n := compare(t, r, 30*time.Second, func(*Proxier) { time.Sleep(tc.lasts) }); n != tc.want {
			t.Errorf("of %v each: %d in %v, want %d: %q", tc.takes, n, tc.lasts, tc.want, r.calls)
		}
	}
}

// TestSuspicionAfterMany: who changes the kernel again and again is followed up less often, but what one comparison takes
// decides how long that is, not what many took.
func TestSuspicionAfterMany(t *testing.T) {
	t.Parallel()
	r := &recorder{takes: time.Second}
	var last time.Time
	n := compare(t, r, 0, func(p *Proxier) {
		for range suspectBurst - 1 { // The first sync was one too.
			p.Suspect("a test says so")
			time.Sleep(3 * time.Second)
		}
		last = time.Now()
		p.Suspect("a test says so")
		time.Sleep(1000 * time.Second)
	})
	if n != suspectBurst {
		t.Fatalf("want %d comparisons: %q", suspectBurst, r.calls)
	}
	if waited := at(t, r.calls[n-1]) - last.Sub(r.start); waited > suspectShare*r.takes {
		t.Errorf("the last suspicion waits %v for a comparison that takes %v", waited, r.takes)
	}
}

// TestSlowComparison: one comparison that took long, as while another program had the lock, delays no later one.
func TestSlowComparison(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{0, 30 * time.Second} {
		r := &recorder{takes: 10 * time.Millisecond}
		var last time.Time
		n := compare(t, r, every, func(p *Proxier) {
			for range suspectBurst {
				p.Suspect("a test says so")
				time.Sleep(2 * time.Second)
			}
			synctest.Wait() // until nobody reads takes
			r.takes = 10 * time.Second
			p.Suspect("a test says so")
			time.Sleep(11 * time.Second)
			synctest.Wait()
			r.takes = 10 * time.Millisecond
			last = time.Now()
			p.Suspect("a test says so")
			time.Sleep(20 * time.Second)
		})
		if n < suspectBurst+2 {
			t.Errorf("compared every %v: nothing within 20 s after a comparison that took 10 s: %q", every, r.calls)
		} else if waited := at(t, r.calls[n-1]) - last.Sub(r.start); waited > time.Second {
			t.Errorf("compared every %v: a suspicion waits %v after a comparison that took 10 s", every, waited)
		}
	}
}
