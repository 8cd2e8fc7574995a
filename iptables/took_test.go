package iptables

import (
	"context"
	"testing"
	"time"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
)

// slowKernel takes a while to be read.
type slowKernel struct {
	*xtablestest.Kernel
	takes time.Duration
}

func (k slowKernel) Save(ctx context.Context, t names.Table) (xtables.Content, error) {
	time.Sleep(k.takes)
	return k.Kernel.Save(ctx, t)
}

// TestTook: each family took as long as its own kernel tables did.
func TestTook(t *testing.T) {
	t.Parallel()
	const takes = 300 * time.Millisecond
	v4, _ := fakeEngine(plan.IPv4)
	v6, k6 := fakeEngine(plan.IPv6)
	v6.Kernel = slowKernel{k6, takes}
	b := &Backend{engines: []*engine{v4, v6}, watch: &xtables.Watch{}}
	if err := b.Sync(t.Context(), plan.New(plan.Node{Name: "n"}, plan.Settings{}), plan.Everything()); err != nil {
		t.Fatal(err)
	}
	if took := b.Took(); len(took) != 2 || took[plan.IPv4] <= 0 || took[plan.IPv4] >= takes || took[plan.IPv6] < takes {
		t.Errorf("took %v, want less than %v for IPv4 and that or more for IPv6", took, takes)
	}
}
