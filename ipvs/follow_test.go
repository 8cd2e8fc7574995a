package ipvs

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
)

// TestFollow: of the node's own addresses, only those that a Service has too, and the source of routes, cost anything when they come
// or go, and that is what depends on them and nothing more.
func TestFollow(t *testing.T) {
	t.Parallel()
	e, k := fakeEngine(plan.IPv4, testOptions)
	node, external := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.9")
	p := large(50)
	p.Node.IPs = []netip.Addr{node}
	p.Settings.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
	sp := *p.Services[p.Sorted(plan.IPv4)[0].Key]
	sp.Frontends = append(slices.Clone(sp.Frontends), plan.Frontend{Kind: plan.ExternalIP, Addr: external, Protocol: plan.TCP, Port: 80})
	p.Set(&sp)
	k.HostAddrs.Insert(node)
	require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
	for _, step := range []struct {
		what   string
		change func()
		want   string // what each call begins with
	}{
		{"nothing changes", func() {}, ""},
		{"a pod's interface", func() { k.HostAddrs[netip.MustParseAddr("10.244.0.1")] = struct{}{} }, ""},
		{"a Service's address comes", func() { k.HostAddrs.Insert(external) }, "clear ports,remove port routes,remove addresses"},
		{"and goes", func() { delete(k.HostAddrs, external) }, "add port routes,write ports,add unrouted"},
		{"the node's address goes", func() { delete(k.HostAddrs, node) }, "add route"},
		{"and comes", func() { k.HostAddrs.Insert(node) }, "add route"},
	} {
		k.Calls = nil
		step.change()
		if e.follow() {
			t.Errorf("%s: everything is to be synced anew", step.what)
		}
		var want []string
		if step.want != "" {
			want = strings.Split(step.want, ",")
		}
		if !slices.EqualFunc(k.Calls, want, strings.HasPrefix) {
			t.Errorf("%s: it took %q, want %q", step.what, k.Calls, want)
		}
		fresh, other := fakeEngine(plan.IPv4, testOptions)
		other.HostAddrs = k.HostAddrs
		require.NoError(t, fresh.Sync(context.Background(), p, plan.Everything()))
		if k.Text() != other.Text() {
			t.Errorf("%s: the kernel holds\n%s\ninstead of\n%s", step.what, k.Text(), other.Text())
		}
	}
	k.Fail = "remove addresses"
	k.HostAddrs.Insert(external)
	if !e.follow() || e.desired != nil {
		t.Error("after a failure everything is to be synced anew")
	}
}

// TestMasqueradeBitChanges: a start with another bit for masquerading takes over the virtual servers that marks of the old one led to.
func TestMasqueradeBitChanges(t *testing.T) {
	t.Parallel()
	p := large(3)
	for i, key := range p.Sorted(plan.IPv4) {
		sp := *p.Services[key.Key]
		sp.Frontends = append(slices.Clone(sp.Frontends), plan.Frontend{Kind: plan.NodePort, Protocol: plan.TCP, Port: uint16(30001 + i)})
		p.Set(&sp)
	}
	for _, before := range []int{0, 14, 27, 28, 29, 30, 31} {
		for _, after := range []int{0, 14, 15, 28, 29, 30, 31} {
			old, next := testOptions, testOptions
			old.MasqueradeBit, next.MasqueradeBit = before, after
			first, k := fakeEngine(plan.IPv4, old)
			require.NoError(t, first.Sync(context.Background(), p, plan.Everything()))
			second := engineOver(k, next)
			held := maps.Clone(k.Virtual)
			for _, v := range held {
				for a := range v.RealServers {
					k.Connections[a] = 1
				}
			}
			require.NoError(t, second.Sync(context.Background(), p, plan.Everything()))
			require.NoError(t, second.drain(time.Now()))
			for id := range held {
				if k.Virtual[id] == nil {
					t.Errorf("from bit %d to bit %d, virtual server %s goes with its connections", before, after, id)
				}
			}
			clear(k.Connections)
			require.NoError(t, second.drain(time.Now()))
			fresh, want := fakeEngine(plan.IPv4, next)
			require.NoError(t, fresh.Sync(context.Background(), p, plan.Everything()))
			if k.Text() != want.Text() {
				t.Errorf("from bit %d to bit %d, the kernel holds\n%s\ninstead of\n%s", before, after, k.Text(), want.Text())
			}
		}
	}
}
