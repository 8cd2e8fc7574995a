package proxier

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestObjects: whatever comes before there is a Proxier, before all has been delivered and after that, the plan is the one that the final
// objects give, in the families that the backend has. What there is to say of objects is said once there is a Proxier, if it is still true.
func TestObjects(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		settings := newTestState(nil).plan.Settings
		families := rapid.SampledFrom([][]plan.Family{plan.Families[:], {plan.IPv4}, {plan.IPv6}}).Draw(t, "families")
		c, o := newCluster(), NewObjects("me", netip.Addr{}, settings, plan.Families[:])
		events := func(what string) {
			for range rapid.IntRange(0, 15).Draw(t, what) {
				o.Apply(c.drawEvent(t))
			}
		}
		events("early")
		var said []source.Finding
		p := New(Config{NodeName: "me", Settings: settings, Families: families, Log: slog.New(slog.DiscardHandler),
			Report: func(f source.Finding) { said = append(said, f) }})
		o.PassTo(p)
		atOnce := func(synced bool) *State {
			s, b := NewState("me", settings, families, nil), c.all()
			b.Synced = synced
			s.Apply(b)
			return s
		}
		if got, want := fmt.Sprint(said), fmt.Sprint(atOnce(false).Findings()); got != want {
			t.Fatalf("said was %s, want %s", got, want)
		}
		events("before all is delivered")
		select {
		case <-o.Synced():
			t.Fatal("synced too early")
		default:
		}
		o.Apply(source.Batch{Synced: true})
		<-o.Synced()
		o.Apply(source.Batch{Synced: true}) // Another one does no harm.
		events("later")
		b, _, _, _ := p.take()
		p.state.Apply(b)
		p.state.Update()
		want := atOnce(true)
		want.Update()
		if got, want := dump(p.state.Plan()), dump(want.Plan()); got != want {
			t.Fatalf("by way of Objects:\n%s\nat once:\n%s", got, want)
		}
		if got, want := fmt.Sprint(p.state.Findings()), fmt.Sprint(want.Findings()); got != want {
			t.Fatalf("findings are %s, want %s", got, want)
		}
		if !p.state.Synced() {
			t.Fatal("not synced")
		}
		checkOneOwner(t, p.state.Plan())
		checkForgets(t, c, p.state)
	})
}

// TestObjectsKeepNothing: what comes and goes while there is no Proxier leaves nothing behind.
func TestObjectsKeepNothing(t *testing.T) {
	t.Parallel()
	o := NewObjects("me", netip.Addr{}, plan.Settings{}, plan.Families[:])
	o.Apply(source.Batch{Synced: true})
	for n := range 100 {
		svc := makeService()
		svc.Name = fmt.Sprint("s", n)
		name := types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}
		o.Apply(source.Batch{Services: map[types.NamespacedName]*v1.Service{name: svc}})
		o.Apply(source.Batch{Services: map[types.NamespacedName]*v1.Service{name: nil}})
	}
	if s := o.state; len(s.dirty)+len(s.services)+len(s.claims.owners)+len(s.triggers)+len(s.reported) > 0 {
		t.Errorf("kept are %d touched Services, %d Services, %d claims, %d triggers and %v", len(s.dirty), len(s.services), len(s.claims.owners),
			len(s.triggers), s.reported)
	}
}

// TestPassedOnMeanwhile: objects that come while they are passed on, and while the Proxier runs and is asked, are all programmed.
func TestPassedOnMeanwhile(t *testing.T) {
	t.Parallel()
	const n = 300
	o := NewObjects("me", netip.Addr{}, plan.Settings{}, plan.Families[:])
	began, all := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(all)
		for i := range n {
			svc := makeService()
			svc.Name, svc.Spec.ClusterIP, svc.Spec.ClusterIPs = fmt.Sprint("s", i), fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), nil
			name := types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}
			o.Apply(source.Batch{Services: map[types.NamespacedName]*v1.Service{name: svc}, Synced: i == n-10})
			if i == n/3 {
				close(began)
			}
		}
	}()
	p := New(Config{NodeName: "me", Families: plan.Families[:], Log: slog.New(slog.DiscardHandler),
		Backend: backendFunc(func(context.Context, *plan.Plan, plan.Change) error { return nil })})
	<-began
	o.PassTo(p)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { p.Run(ctx); close(ended) }()
	<-all
	for programmed := 0; programmed < n; time.Sleep(time.Millisecond) {
		p.View(func(s *State) { _ = s.Services() })
		if s := p.Snapshot(); s != nil {
			programmed = 0
			for _, ports := range s.Services() {
				programmed += min(1, len(slices.Clone(ports)))
			}
		}
	}
	cancel()
	<-ended
}
