package proxier

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"log/slog"

	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
	"nodeproxy/proxier/source"
)

// services is a batch of n Services from the first-th on.
func services(first, n int, port int32) source.Batch {
	b := source.Batch{Services: map[types.NamespacedName]*v1.Service{}}
	for i := first; i < first+n; i++ {
		name := types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("s%03d", i)}
		b.Services[name] = &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
			Spec: v1.ServiceSpec{ClusterIP: fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250), Ports: []v1.ServicePort{{Port: port}}}}
	}
	return b
}

// TestSmallChangeGoesBetween: a change that arrives while a large one is programmed waits for one portion of it, not for all.
func TestSmallChangeGoesBetween(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []string
		begin := time.Now()
		programmed := map[string]time.Duration{}
		backend := backendFunc(func(_ context.Context, p *plan.Plan, changed plan.Keys) error {
			time.Sleep(time.Second)
			calls = append(calls, fmt.Sprint(len(changed), " of ", len(p.Services)))
			for k := range changed {
				programmed[k.Service.Name] = time.Since(begin)
			}
			return nil
		})
		p := New(Config{NodeName: "me", Families: plan.Families[:1], Backend: backend, MostAtOnce: 20, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			p.Run(ctx)
			close(ended)
		}()
		first := services(900, 1, 80)
		first.Synced = true
		p.Apply(first)
		time.Sleep(10 * time.Second)
		begin = time.Now()
		p.Apply(services(0, 100, 80))
		time.Sleep(1500 * time.Millisecond)
		p.Apply(services(900, 1, 81))
		time.Sleep(20 * time.Second)
		cancel()
		<-ended
		want := []string{"0 of 1", "20 of 21", "20 of 41", "21 of 61", "20 of 81", "20 of 101"}
		if !slices.Equal(calls, want) {
			t.Errorf("the backend was called for %v, want %v", calls, want)
		}
		if at := programmed["s900"]; at != 3*time.Second {
			t.Errorf("the small change was programmed after %v", at)
		}
	})
}

type backendFunc func(ctx context.Context, p *plan.Plan, changed plan.Keys) error

func (f backendFunc) Sync(ctx context.Context, p *plan.Plan, changed plan.Keys) error {
	return f(ctx, p, changed)
}

// TestPortions: whatever changes come in whatever portions, each plan differs from the one before in what is said and no more, has
// one owner for each frontend, never takes one away that has an owner before and after, and the last one is what is desired.
func TestPortions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plans := rapid.SliceOfN(plantest.Plans(), 2, 5).Draw(t, "plans")
		x := &portions{most: rapid.IntRange(1, 40).Draw(t, "most")}
		held := plan.New(plans[0].Node, plans[0].Settings)
		owners := func(p *plan.Plan) map[claim]plan.Key {
			out := map[claim]plan.Key{}
			for k, sp := range p.Services {
				for _, f := range sp.Frontends {
					c := claimOf(f, k.Family)
					if other, taken := out[c]; taken && other != k {
						t.Fatalf("%s and %s have %s", k, other, f)
					}
					out[c] = k
				}
			}
			return out
		}
		desired := plans[0]
		x.next(desired, nil)
		held = copyOf(x.plan)
		step := func(changed plan.Keys) {
			before := owners(held)
			p, keys := x.next(desired, changed)
			for k := range plantest.Differing(held, p) {
				if _, told := keys[k]; !told {
					t.Fatalf("%s differs, and is not told", k)
				}
			}
			held = copyOf(p)
			now, then := owners(held), owners(desired)
			for c, k := range before {
				if _, has := now[c]; !has && then[c] != (plan.Key{}) {
					t.Fatalf("%v of %s is nobody's, and is to be %s's", c, k, then[c])
				}
			}
		}
		for _, next := range plans[1:] {
			changed := plantest.Differing(desired, next)
			desired = next
			step(changed)
			for range rapid.IntRange(0, 3).Draw(t, "portions before the next change") {
				step(plan.Keys{})
			}
		}
		for range 1000 {
			if len(x.waiting) == 0 {
				break
			}
			step(plan.Keys{})
		}
		if left := plantest.Differing(held, desired); len(left) > 0 {
			t.Fatalf("in the end these differ: %v", left)
		}
	})
}

// TestPortionsKeepWhatThePlanSays: what is said of a plan as a whole is said of the one that the backend gets, too.
func TestPortionsKeepWhatThePlanSays(t *testing.T) {
	x := &portions{most: 20}
	for _, partial := range []bool{true, false} {
		desired := plan.New(plan.Node{Name: "me"}, plan.Settings{ResetTCP: partial})
		desired.Partial = partial
		if p, _ := x.next(desired, nil); p.Partial != partial || p.Settings.ResetTCP != partial || p.Node.Name != "me" {
			t.Errorf("the backend gets a plan with Partial=%v, want %v", p.Partial, partial)
		}
	}
}

func copyOf(p *plan.Plan) *plan.Plan {
	out := plan.New(p.Node, p.Settings)
	for _, sp := range p.Services {
		out.Set(sp)
	}
	return out
}
