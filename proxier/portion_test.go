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

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// services is a batch of n Services from the first-th on.
func services(first, n int, port int32) (b source.Batch) {
	for i := first; i < first+n; i++ {
		b.Merge(ofService(named(fmt.Sprintf("s%03d", i), fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250), ports(v1.ServicePort{Port: port}))))
	}
	return b
}

// runPortions runs a Proxier with portions of 20 chains over a backend that takes a second for each, after a Service of its own.
func runPortions(t *testing.T, observer Observer, backend backendFunc) (p *Proxier, stop func()) {
	p, stop = start(t, Config{Families: plan.Families[:1], Backend: backend, MostAtOnce: 20, Observer: observer})
	first := services(900, 1, 80)
	first.Synced = true
	p.Apply(first)
	time.Sleep(10 * time.Second) // simulated time
	return p, stop
}

// TestSmallChangeGoesBetween: a change that arrives while a large one is programmed waits for one portion of it, not for all.
func TestSmallChangeGoesBetween(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []string
		begin := time.Now()
		programmed := map[string]time.Duration{}
		p, stop := runPortions(t, nil, func(_ context.Context, p *plan.Plan, change plan.Change) error {
			time.Sleep(time.Second)
			calls = append(calls, fmt.Sprint(len(change.Keys()), " of ", len(p.Services)))
			for k := range change.Keys() {
				programmed[k.Service.Name] = time.Since(begin)
			}
			return nil
		})
		begin = time.Now()
		p.Apply(services(0, 100, 80))
		time.Sleep(1500 * time.Millisecond)
		p.Apply(services(900, 1, 81))
		time.Sleep(20 * time.Second)
		stop()
		want := []string{"0 of 1", "20 of 21", "20 of 41", "21 of 61", "20 of 81", "20 of 101"}
		if !slices.Equal(calls, want) {
			t.Errorf("the backend was called for %v, want %v", calls, want)
		}
		if at := programmed["s900"]; at != 3*time.Second {
			t.Errorf("the small change was programmed after %v", at)
		}
	})
}

// TestCancelledBetweenPortions: a sync that is cancelled in the middle of a large change writes the current portion, and no other,
// and waits for nothing.
func TestCancelledBetweenPortions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []int
		p, stop := runPortions(t, nil, func(_ context.Context, p *plan.Plan, _ plan.Change) error {
			time.Sleep(time.Second)
			calls = append(calls, len(p.Services))
			return nil
		})
		p.Apply(services(0, 100, 80))
		time.Sleep(1500 * time.Millisecond)
		begin := time.Now()
		stop()
		if took := time.Since(begin); took != 500*time.Millisecond {
			t.Errorf("it took %v to stop", took)
		}
		if want := []int{1, 21, 41}; !slices.Equal(calls, want) {
			t.Errorf("the backend was called for plans of %v, want %v", calls, want)
		}
	})
}

// TestPortionsAndComparisons: where a portion fails, or everything is to be compared, all that waits is programmed with the rest.
func TestPortionsAndComparisons(t *testing.T) {
	for name, disturb := range map[string]func(p *Proxier) error{
		"a portion fails":   func(*Proxier) error { return errors.New("refused") },
		"a full comparison": func(p *Proxier) error { p.Resync(); return nil },
		"a suspicion":       func(p *Proxier) error { p.Suspect("a test"); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var p *Proxier
				var calls []string
				p, stop := runPortions(t, nil, func(_ context.Context, desired *plan.Plan, change plan.Change) error {
					time.Sleep(time.Second)
					calls = append(calls, fmt.Sprint(change.All(), " ", len(desired.Services)))
					if len(calls) == 2 {
						return disturb(p)
					}
					return nil
				})
				p.Apply(services(0, 100, 80))
				time.Sleep(20 * time.Second)
				stop()
				if calls[0] != "true 1" || calls[1] != "false 21" || calls[len(calls)-1] != "true 101" || len(calls) > 4 {
					t.Errorf("the backend was called for %q, want everything at once soon after the first portion", calls)
				}
			})
		})
	}
}

// TestPortionsAreObserved: while a part of a change waits, that is reported, and its triggers do not count as programmed.
func TestPortionsAreObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := &results{}
		p, stop := runPortions(t, seen, func(context.Context, *plan.Plan, plan.Change) error {
			time.Sleep(time.Second)
			return nil
		})
		seen.take() // the first sync
		begin := time.Now()
		b := services(0, 50, 80)
		slice := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "s049-1", Labels: map[string]string{discovery.LabelServiceName: "s049"},
			Annotations: map[string]string{v1.EndpointsLastChangeTriggerTime: begin.Format(time.RFC3339Nano)},
		}}
		b.Merge(ofSlice(slice))
		p.Apply(b)
		time.Sleep(20 * time.Second)
		stop()
		list := seen.take()
		for i, r := range list {
			if last := i == len(list)-1; (r.Waiting == 0) != last || (len(r.Triggers) == 1) != last {
				t.Errorf("portion %d of %d: %d wait, triggers %v", i+1, len(list), r.Waiting, r.Triggers)
			}
		}
		if len(list) != 3 {
			t.Errorf("%d portions, want 3", len(list))
		}
	})
}

// results is an Observer that keeps the results.
type results struct {
	mu       sync.Mutex
	list     []Result
	compared []string // the suspicions of comparisons beside syncs
}

func (r *results) Compared(why string, _ time.Time, _ time.Duration, _ bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.compared = append(r.compared, why)
}

func (r *results) Queued(Input, bool) {}
func (r *results) Taken()             {}
func (r *results) Synced(_ *plan.Plan, _ plan.Change, got Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, got)
}

// take returns the results since the last call.
func (r *results) take() []Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.list
	r.list = nil
	return list
}

type backendFunc func(ctx context.Context, p *plan.Plan, change plan.Change) error

func (f backendFunc) Sync(ctx context.Context, p *plan.Plan, change plan.Change) error {
	return f(ctx, p, change)
}
