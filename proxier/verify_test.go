package proxier

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestVerifyFindsNothing: whatever events came, in whatever groups, what was made of the objects is what is made of them anew.
func TestVerifyFindsNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, s := newCluster(), newTestState(nil)
		s.Apply(source.Batch{Synced: true})
		var published plan.Publisher
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			s.Apply(c.drawEvent(t))
			if rapid.Bool().Draw(t, "update") {
				published.Publish(s.Update())
			}
			for id := range s.services {
				if _, found := s.verify(id, nil); len(found) > 0 {
					t.Fatalf("found %v", found)
				}
			}
		}
		published.Publish(s.Update())
		for id := range s.services {
			if _, found := s.verify(id, published.Latest()); len(found) > 0 {
				t.Fatalf("found %v", found)
			}
		}
	})
}

// TestVerifyRepairs: whatever of the plan is not as its objects make it is found, named, and repaired.
func TestVerifyRepairs(t *testing.T) {
	t.Parallel()
	key := func(p *plan.Plan, name string) plan.Key {
		return p.KeysOf(plan.Service{Namespace: "ns", Name: name})[0]
	}
	for what, c := range map[string]struct {
		change      func(p *Proxier)
		field, said string
	}{
		"gone": {func(p *Proxier) { p.state.plan.Delete(key(p.state.plan, "a")) }, "", "the plan lacks it"},
		"left": {func(p *Proxier) {
			sp := *p.state.plan.Services[key(p.state.plan, "a")]
			sp.Key.Service.Name = "left"
			p.state.plan.Set(&sp)
		}, "", "the plan has it, and there are no objects of it"},
		"changed": {func(p *Proxier) {
			sp := *p.state.plan.Services[key(p.state.plan, "a")]
			sp.Affinity = time.Hour
			p.state.plan.Set(&sp)
		}, "Affinity", "the plan has it otherwise than its objects make it"},
		"not programmed": {func(p *Proxier) {
			sp := *p.state.plan.Services[key(p.state.plan, "a")]
			sp.Affinity = time.Hour
			desired := p.published.Latest().Plan()
			desired.Set(&sp)
			p.published.Publish(desired, plan.Only(plan.Keys{sp.Key: struct{}{}}))
		}, "Affinity", "it was programmed otherwise than the plan has it"},
		"misowned": {func(p *Proxier) { clear(p.state.claims.owners) }, "", "another owner is noted than the objects make"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := &recorder{start: time.Now()}
				p, stop := start(t, Config{Backend: r, Families: plan.Families[:1]})
				defer stop()
				p.Apply(batch("a", 1, true))
				time.Sleep(time.Second) // in simulated time: it is programmed
				if n, found, err := p.Verify(t.Context()); n != 1 || len(found) > 0 || err != nil {
					t.Fatalf("at first, of %d ServicePorts: %v, %v", n, found, err)
				}
				p.stateMu.Lock()
				c.change(p)
				p.stateMu.Unlock()
				synctest.Wait()
				calls := len(r.calls)
				_, found, err := p.Verify(t.Context())
				if len(found) != 1 || found[0].Detail != c.said || c.field != "" && found[0].Field != c.field || err != nil {
					t.Errorf("found %v, %v", found, err)
				}
				time.Sleep(time.Second) // in simulated time: it is repaired
				synctest.Wait()
				if len(r.calls) == calls {
					t.Error("nothing is programmed")
				}
				if _, found, _ := p.Verify(t.Context()); len(found) > 0 {
					t.Errorf("after the repair, found %v", found)
				}
			})
		})
	}
}

// TestCompareWhenAsked: who asks for a comparison waits for one that begins after that, also where the backend's are syncs.
func TestCompareWhenAsked(t *testing.T) {
	t.Parallel()
	for _, beside := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var compared []time.Duration
			cfg, began := Config{Backend: &recorder{start: time.Now(), takes: time.Second}, CompareEvery: time.Hour}, time.Now()
			if beside {
				cfg.Compare = func(context.Context) bool {
					compared = append(compared, time.Since(began))
					time.Sleep(time.Second)
					return false
				}
			}
			p, stop := start(t, cfg)
			defer stop()
			p.Apply(batch("a", 1, true))
			time.Sleep(5 * time.Second)
			if err := p.Compare(t.Context()); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took < 6*time.Second || took > 7*time.Second {
				t.Errorf("beside: %t, it took %v", beside, took)
			}
			if want := []time.Duration{5*time.Second + debounce}; beside && !slices.Equal(compared, want) {
				t.Errorf("compared at %v, want %v", compared, want)
			}
		})
	}
}

// TestVerifyBesideSyncs: verifications beside changes and syncs, of which some fail and others program parts of a change, find nothing.
func TestVerifyBesideSyncs(t *testing.T) {
	t.Parallel()
	var calls int
	backend := backendFunc(func(context.Context, *plan.Plan, plan.Change) error {
		if calls++; calls > 1 && calls%3 == 0 {
			return errors.New("the kernel is busy")
		}
		return nil
	})
	p, stop := start(t, Config{Families: plan.Families[:1], Backend: backend, MostAtOnce: 20})
	first := services(0, 100, 80)
	first.Synced = true
	p.Apply(first)
	var verifying sync.WaitGroup
	applied := make(chan struct{})
	verifying.Go(func() {
		for {
			if n, found, err := p.Verify(t.Context()); len(found) > 0 || err != nil {
				t.Errorf("of %d ServicePorts, found %v, %v", n, found, err)
			}
			select {
			case <-applied:
				return
			default:
			}
		}
	})
	for i := range 200 {
		b := services(i%100, 1+i%90, int32(81+i))
		if i%5 == 0 { // They are gone.
			for name := range b.Services {
				b.Services[name] = nil
			}
		}
		p.Apply(b)
		p.Reserve([]netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(i))})
		runtime.Gosched()
	}
	close(applied)
	verifying.Wait()
	stop()
}
