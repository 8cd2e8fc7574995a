package ipvs

import (
	"testing"
	"time"

	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// slowServers take a while to be listed.
type slowServers struct {
	fakeServers
	takes time.Duration
}

func (s slowServers) List(f plan.Family) (map[ipvs.ServerID]*ipvs.ActualServer, error) {
	time.Sleep(s.takes)
	return s.fakeServers.List(f)
}

// TestTook: each family took as long as its own part of the kernel did, and not as long as the family before it.
func TestTook(t *testing.T) {
	t.Parallel()
	const takes = 300 * time.Millisecond
	v4, k4 := fakeEngine(plan.IPv4, Options{})
	v6, _ := fakeEngine(plan.IPv6, Options{})
	v4.machine.servers = slowServers{fakeServers{k4}, takes}
	b := &Backend{engines: []*engine{v4, v6}}
	if err := b.Sync(t.Context(), plan.New(plan.Node{Name: "n"}, plan.Settings{}), plan.Everything()); err != nil {
		t.Fatal(err)
	}
	if took := b.Took(); len(took) != 2 || took[plan.IPv4] < takes || took[plan.IPv6] <= 0 || took[plan.IPv6] >= takes {
		t.Errorf("took %v, want %v or more for IPv4 and less for IPv6", took, takes)
	}
}
