package proxier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/plan"
)

// snapshotText is such as "generation 2 of ns/a 80, ns/b 80".
func snapshotText(s *plan.Snapshot) string {
	if s == nil {
		return "none"
	}
	text := fmt.Sprintf("generation %d of", s.Generation)
	for svc, ports := range s.Services() {
		for _, sp := range ports {
			text += fmt.Sprintf(" %s:%d", svc, sp.Frontends[0].Port)
		}
	}
	return text
}

// TestSnapshotAfterSync: the snapshot is of what the kernel has been made equal to, not of what is being written or could not be; one
// that was taken before does not change.
func TestSnapshotAfterSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var mu sync.Mutex
		var seen []string
		var fail error
		var p *Proxier
		look := func(when string) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, when+": "+snapshotText(p.Snapshot()))
			return fail
		}
		setFail := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			fail = err
		}
		p, stop := start(t, Config{Families: plan.Families[:1], MostAtOnce: 20, Backend: backendFunc(
			func(context.Context, *plan.Plan, plan.Change) error {
				time.Sleep(time.Second)
				return look("while writing")
			})})
		_ = look("at first")
		p.Apply(batch("a", 80, true))
		time.Sleep(2 * time.Second)
		_ = look("written")
		first := p.Snapshot()
		if at := first.Time.Sub(begin); at != time.Second || first.Node.Name != "me" || first.Partial {
			t.Errorf("the first snapshot is of %s after %v", first.Node.Name, at)
		}
		setFail(errors.New("the kernel is busy"))
		p.Apply(batch("a", 81, false))
		p.Apply(batch("b", 80, false))
		time.Sleep(time.Second)
		synctest.Wait()
		_ = look("failed")
		setFail(nil)
		time.Sleep(5 * time.Second)
		_ = look("tried again")
		p.Apply(batch("b", 80, false)) // says nothing new
		time.Sleep(time.Second)
		_ = look("nothing new")
		p.Apply(batch("b", 81, false))
		time.Sleep(2 * time.Second)
		_ = look("changed")
		stop()
		seen = append(seen, "the first: "+snapshotText(first))
		want := []string{
			"at first: none",
			"while writing: none",
			"written: generation 1 of ns/a:80",
			"while writing: generation 1 of ns/a:80",
			"failed: generation 1 of ns/a:80",
			"while writing: generation 1 of ns/a:80",
			"tried again: generation 2 of ns/a:81 ns/b:80",
			"nothing new: generation 2 of ns/a:81 ns/b:80",
			"while writing: generation 2 of ns/a:81 ns/b:80",
			"changed: generation 3 of ns/a:81 ns/b:81",
			"the first: generation 1 of ns/a:80",
		}
		if !slices.Equal(seen, want) {
			t.Errorf("saw\n%q\nwant\n%q", seen, want)
		}
	})
}

// TestSnapshotWhileChanging takes snapshots while changes are programmed, in portions and whole. It is for the race detector.
func TestSnapshotWhileChanging(t *testing.T) {
	for _, most := range []int{0, 20} {
		p, stop := start(t, Config{Families: plan.Families[:1], MostAtOnce: most, Backend: backendFunc(
			func(context.Context, *plan.Plan, plan.Change) error { return nil })})
		all := services(0, 100, 1)
		all.Synced = true
		p.Apply(all)
		var readers sync.WaitGroup
		const last = 30
		for range 3 {
			readers.Go(func() {
				generation, done := uint64(0), false
				for limit := time.Now().Add(time.Minute); !done; {
					s := p.Snapshot()
					if s == nil {
						continue
					}
					n := 0
					done = true
					for _, ports := range s.Services() {
						n++
						done = done && ports[0].Frontends[0].Port == last
					}
					if s.Generation < generation || n != 100 || time.Now().After(limit) {
						t.Errorf("generation %d after %d, with %d Services", s.Generation, generation, n)
						return
					}
					generation = s.Generation
				}
			})
		}
		for port := range int32(last) {
			p.Apply(services(0, 100, 1+port))
			time.Sleep(time.Millisecond) // between two batches
		}
		readers.Wait()
		stop()
	}
}
