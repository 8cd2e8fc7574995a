package ipvs

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/internal/set"
	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

// portsPlan has n ServicePorts, each with the external IPs that are given for it, at port 80 and the following ones.
func portsPlan(f plan.Family, externals ...[]netip.Addr) *plan.Plan {
	p := plan.New(plan.Node{Name: "node", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}},
		plan.Settings{})
	for i, list := range externals {
		sp := &plan.ServicePort{Key: plan.Key{Service: plan.Service{Namespace: "a", Name: fmt.Sprint("s", i)}, Protocol: plan.TCP, Family: f}}
		for _, a := range list {
			sp.Frontends = append(sp.Frontends,
				plan.Frontend{Kind: plan.ExternalIP, Addr: a, Protocol: plan.TCP, Port: uint16(80 + i)})
		}
		sp.Endpoints = plan.Endpoints{Any: true, Cluster: []plan.Endpoint{{Addr: netip.AddrPortFrom(externalIP(f, 200), 8080)}}}
		p.Set(sp)
	}
	return p
}

// externalIP is one of many.
func externalIP(f plan.Family, n byte) netip.Addr {
	if f == plan.IPv6 {
		return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: n})
	}
	return netip.AddrFrom4([4]byte{198, 51, 100, n})
}

// TestPorts: what a change of external IPs costs, and in which order it is done.
func TestPorts(t *testing.T) {
	t.Parallel()
	f := plan.IPv4
	a, b := externalIP(f, 1), externalIP(f, 2)
	loadBalancer := func(p *plan.Plan) {
		sp := *p.Services[p.Sorted(f)[0].Key]
		sp.Frontends = append(slices.Clone(sp.Frontends), plan.Frontend{Kind: plan.LoadBalancerIP, Addr: a, Protocol: plan.TCP, Port: 443})
		p.Set(&sp)
	}
	e, k := fakeEngine(f, testOptions)
	for _, step := range []struct {
		what      string
		externals [][]netip.Addr
		change    func(*plan.Plan)
		want      []string
	}{
		{"one", [][]netip.Addr{{a}}, nil,
			[]string{"add port routes [198.51.100.1]", "write ports [{198.51.100.1 TCP 80}]", "add unrouted [198.51.100.1]"}},
		{"another port", [][]netip.Addr{{a}, {a}}, nil, []string{"add ports [{198.51.100.1 TCP 81}]"}},
		{"another address for it", [][]netip.Addr{{a}, {b}}, nil,
			[]string{"add port routes [198.51.100.2]", "add ports [{198.51.100.2 TCP 81}]", "add unrouted [198.51.100.2]",
				"remove ports [{198.51.100.1 TCP 81}]"}},
		{"a load balancer IP too", [][]netip.Addr{{a}, {b}}, loadBalancer,
			[]string{"add addresses [198.51.100.1]", "route addresses [198.51.100.1]", "remove ports [{198.51.100.1 TCP 80}]",
				"remove port routes [198.51.100.1]"}},
		{"and no more", [][]netip.Addr{{a}, {b}}, nil,
			[]string{"add port routes [198.51.100.1]", "add ports [{198.51.100.1 TCP 80}]", "add unrouted [198.51.100.1]"}},
		{"none", [][]netip.Addr{{}, {}}, nil,
			[]string{"clear ports", "remove port routes [198.51.100.1 198.51.100.2]",
				"remove addresses [198.51.100.1 198.51.100.2]"}},
	} {
		k.Calls = nil
		p := portsPlan(f, step.externals...)
		if step.change != nil {
			step.change(p)
		}
		require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys(set.Keys(p.Services)))))
		got := slices.DeleteFunc(slices.Clone(k.Calls), func(c string) bool {
			return !strings.Contains(c, "ports") && !strings.Contains(c, "routes [") && !strings.Contains(c, "unrouted") &&
				!strings.Contains(c, "addresses")
		})
		if !slices.Equal(got, step.want) {
			t.Errorf("%s: it took\n%s\nwant\n%s", step.what, strings.Join(got, "\n"), strings.Join(step.want, "\n"))
		}
	}
}

// TestPortsAreExact: whatever came before, and whatever the node's addresses are, the kernel holds what a fresh start would make of
// the last plan; a comparison finds nothing to change and writes nothing, and what somebody has removed or added is put right.
func TestPortsAreExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(t, "family")
		e, k := fakeEngine(f, testOptions)
		k.Before = func() {
			for p := range k.Ports {
				if k.Virtual[ipvs.ServerID{Family: f, Protocol: p.Protocol, Addr: p.Addr, Port: p.Port}] == nil {
					t.Errorf("after %q, %v is diverted, and has no virtual server", k.Calls, p)
				}
			}
		}
		var p *plan.Plan
		for range rapid.IntRange(2, 4).Draw(t, "steps") {
			externals := rapid.SliceOfN(rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) netip.Addr {
				return externalIP(f, byte(rapid.IntRange(10, 14).Draw(t, "address")))
			}), 0, 3, rapid.ID), 4, 4).Draw(t, "external IPs")
			p = portsPlan(f, externals...)
			clear(k.HostAddrs)
			if rapid.Bool().Draw(t, "the node has an external IP") {
				k.HostAddrs[externalIP(f, 10)] = struct{}{}
			}
			e.follow()
			require.NoError(t, e.Sync(context.Background(), p, plan.Only(plan.Keys(set.Keys(p.Services)))))
			e.follow()
		}
		fresh, want := fakeEngine(f, testOptions)
		want.HostAddrs = k.HostAddrs
		require.NoError(t, fresh.Sync(context.Background(), p, plan.Everything()))
		if k.Text() != want.Text() {
			t.Fatalf("the kernel holds\n%s\ninstead of\n%s", k.Text(), want.Text())
		}
		k.Calls = nil
		require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
		if len(e.Found) != 0 || !slices.Equal(k.Calls, []string{"list servers", "rules"}) {
			t.Fatalf("a second comparison found %s, and wrote %q", e.Found.Words(5), k.Calls)
		}
		k.Before = nil
		found := disturb(t, k, f)
		k.Calls = nil
		require.NoError(t, e.Sync(context.Background(), p, plan.Everything()))
		if k.Text() != want.Text() || len(e.Found) != found {
			t.Fatalf("%d changes of others: found %s, and the kernel holds\n%s\ninstead of\n%s", found, e.Found.Words(5), k.Text(), want.Text())
		}
	})
}

// disturb changes what another program may change, and returns how many differences are to be found.
func disturb(t *rapid.T, k *ipvstest.Kernel, f plan.Family) int {
	if k.Ports == nil {
		return 0
	}
	some := slices.SortedFunc(maps.Keys(k.Ports), comparePorts)[0]
	switch rapid.IntRange(0, 5).Draw(t, "disturbance") {
	case 0:
		delete(k.Ports, some)
	case 1:
		k.Ports[plan.Address{Addr: externalIP(f, 77), Protocol: plan.UDP, Port: 7}] = struct{}{}
	case 2:
		n := len(k.Ports)
		k.Ports = nil
		return n + 1
	case 3:
		k.BrokenPorts = true
	case 4:
		delete(k.PortRoutes, some.Addr)
	default:
		if f == plan.IPv6 {
			return 0
		}
		delete(k.Unrouted, some.Addr) // Somebody has made its route anew.
		return 2                      // an address without a route less, and one with a route more
	}
	return 1
}

// TestPortsTakeOver: an older start has all of an address on the device. Its ports are local before the rest of it is not.
func TestPortsTakeOver(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		a := externalIP(f, 7)
		p := portsPlan(f, []netip.Addr{a})
		whole := testOptions
		whole.WholeAddresses = true
		old, k := fakeEngine(f, whole)
		require.NoError(t, old.Sync(context.Background(), p, plan.Everything()))
		k.Before = func() {
			_, is := k.Addresses[a]
			_, unrouted := k.Unrouted[a]
			if (!is || unrouted) && len(k.Ports) == 0 {
				t.Errorf("%s: neither the address nor its port is local after %q", f, k.Calls)
			}
		}
		require.NoError(t, engineOver(k, testOptions).Sync(context.Background(), p, plan.Everything()))
		require.NoError(t, engineOver(k, whole).Sync(context.Background(), p, plan.Everything()))
	}
}
