package proxier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/source"
)

// recorder is a Backend that notes when it was called, and for what.
type recorder struct {
	start time.Time
	calls []string
	takes time.Duration
	fail  int // how many calls are still to fail
}

func (r *recorder) Sync(_ context.Context, p *plan.Plan, changed plan.Keys) error {
	what := "all"
	if changed != nil {
		what = fmt.Sprint(len(changed))
	}
	r.calls = append(r.calls, fmt.Sprintf("%v: %s of %d", time.Since(r.start), what, len(p.Services)))
	time.Sleep(r.takes)
	if r.fail > 0 {
		r.fail--
		return errors.New("the kernel is busy")
	}
	return nil
}

// run starts a Proxier over r, lets a test do what it does, and returns the calls.
func run(t *testing.T, r *recorder, minSyncPeriod time.Duration, do func(p *Proxier)) []string {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r.start = time.Now()
		p := New(Config{NodeName: "me", Families: plan.Families[:], Backend: r, MinSyncPeriod: minSyncPeriod,
			Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			p.Run(ctx)
			close(ended)
		}()
		do(p)
		synctest.Wait()
		cancel()
		<-ended
	})
	return r.calls
}

// batch sets a Service to a port.
func batch(name string, port int32, synced bool) source.Batch {
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: v1.ServiceSpec{
		ClusterIP: fmt.Sprintf("10.96.0.%d", name[0]), Ports: []v1.ServicePort{{Port: port}}}}
	return source.Batch{Services: map[types.NamespacedName]*v1.Service{{Namespace: "ns", Name: name}: svc}, Synced: synced}
}

func expect(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}

func TestNothingIsWrittenBeforeEverythingIsKnown(t *testing.T) {
	calls := run(t, &recorder{}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, false))
		time.Sleep(time.Minute)
		p.Apply(batch("b", 80, true))
		time.Sleep(time.Minute)
		p.Apply(batch("b", 81, false))
		time.Sleep(time.Minute)
		p.Apply(batch("b", 81, false)) // says nothing new
	})
	expect(t, calls, "1m0s: all of 2", "2m0s: 1 of 2")
}

func TestChangesDuringASyncGoTogether(t *testing.T) {
	calls := run(t, &recorder{takes: time.Second}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(100 * time.Millisecond)
		for i := range int32(5) {
			p.Apply(batch("b", 80+i, false))
			p.Apply(batch("c", 80+i, false))
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
	})
	expect(t, calls, "0s: all of 1", "1s: 2 of 3")
}

func TestAfterAFailureNothingIsAssumed(t *testing.T) {
	calls := run(t, &recorder{fail: 3}, 0, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		time.Sleep(300 * time.Millisecond) // the second try has failed too
		p.Apply(batch("b", 80, false))     // waits for the third
		time.Sleep(time.Minute)
		p.Apply(batch("b", 81, false))
	})
	expect(t, calls, "0s: all of 1", "200ms: all of 1", "600ms: all of 2", "1.4s: all of 2", "1m0.3s: 1 of 2")
}

func TestMinSyncPeriod(t *testing.T) {
	calls := run(t, &recorder{}, time.Second, func(p *Proxier) {
		p.Apply(batch("a", 80, true))
		for i := range int32(15) {
			time.Sleep(100 * time.Millisecond)
			p.Apply(batch("a", 81+i, false))
		}
		time.Sleep(time.Minute)
	})
	expect(t, calls, "0s: all of 1", "1s: 1 of 1", "2s: 1 of 1")
}
