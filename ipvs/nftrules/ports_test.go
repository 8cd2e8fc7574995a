package nftrules

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/internal/set"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

func ok(t *testing.T, err error) {
	t.Helper()
	require.NoError(t, err)
}

// TestPorts: of an address with ports that are diverted, these are local and others are not; at no time is the whole address. What others
// have changed is seen, and nothing stays.
func TestPorts(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	nstest.Exec(t, "ip", "link", "add", "eth0", "type", "dummy")
	nstest.Exec(t, "ip", "link", "set", "eth0", "up")
	for _, tc := range []struct {
		family                plan.Family
		node, external, route string
	}{
		{plan.IPv4, "192.0.2.1", "198.51.100.7", "0.0.0.0/0"},
		{plan.IPv6, "2001:db8::1", "2001:db8:1::7", "::/0"},
	} {
		src, a := netip.MustParseAddr(tc.node), netip.MustParseAddr(tc.external)
		nstest.Exec(t, "ip", "addr", "add", netip.PrefixFrom(src, src.BitLen()).String(), "dev", "eth0", "nodad")
		nstest.Exec(t, "ip", "route", "add", tc.route, "dev", "eth0")
		x, err := OpenPorts(tc.family)
		ok(t, err)
		t.Cleanup(func() { _ = x.Close() })
		leads := func(when string, mark bool, local bool) {
			t.Helper()
			args := []string{"route", "get", tc.external}
			if mark {
				args = append(args, "mark", fmt.Sprint(names.PortsMark))
			}
			got := nstest.Exec(t, "ip", args...)
			if strings.Contains(got, "local "+tc.external) != local {
				t.Errorf("%s: the route to %s, with mark %t, is %q, local: want %t", when, tc.external, mark, got, local)
			}
		}
		list := []plan.Address{{Addr: a, Protocol: plan.TCP, Port: 80}, {Addr: a, Protocol: plan.UDP, Port: 53},
			{Addr: a, Protocol: plan.SCTP, Port: 80}}
		holds := func(when string, ports []plan.Address, complete bool, routes int, unrouted ...netip.Addr) {
			t.Helper()
			got, exists, gotComplete, err := x.List()
			ok(t, err)
			want := set.Set[plan.Address]{}
			for _, p := range ports {
				want.Insert(p)
			}
			gotRoutes, err := d.PortRoutes(tc.family)
			ok(t, err)
			gotUnrouted, err := d.UnroutedAddresses(tc.family)
			ok(t, err)
			if !maps.Equal(got, want) || len(gotRoutes) != routes || gotComplete != complete || exists != (complete || len(ports) > 0) ||
				!slices.Equal(slices.Collect(maps.Keys(gotUnrouted)), unrouted) {
				t.Errorf("%s: the kernel holds %v (exists %t, complete %t), routes %v, without routes %v", when, got, exists, gotComplete,
					gotRoutes, gotUnrouted)
			}
		}
		holds("at first", nil, false, 0)
		leads("at first", true, false)
		for range 2 { // The second time nothing is to be done.
			ok(t, d.AddPortRoutes([]netip.Addr{a}))
			ok(t, x.Write(list[:1]))
			ok(t, x.Add(list[1:]))
		}
		var unrouted []netip.Addr
		if tc.family == plan.IPv4 {
			for range 2 {
				ok(t, d.AddUnrouted([]netip.Addr{a}))
			}
			unrouted = []netip.Addr{a}
		}
		holds("with ports", list, true, 1, unrouted...)
		leads("with ports", true, true)
		leads("with ports", false, false)
		if families, err := PortsFamilies(); !slices.Equal(families, []plan.Family{tc.family}) || err != nil {
			t.Errorf("there are ports of %v (%v), want %s", families, err, tc.family)
		}
		ok(t, x.Remove(list[:1]))
		holds("without TCP", list[1:], true, 1, unrouted...)
		flushChain(t, x.table, "divert")
		holds("without a chain's rules", list[1:], false, 1, unrouted...)
		ok(t, x.Write(list))
		family := map[plan.Family]string{plan.IPv4: "-4", plan.IPv6: "-6"}[tc.family]
		nstest.Exec(t, "ip", family, "rule", "del", "pref", fmt.Sprint(names.PortsRulePriority))
		holds("without a routing rule", list, false, 1, unrouted...)
		nstest.Exec(t, "ip", family, "rule", "add", "pref", "91", "fwmark", "7", "lookup", fmt.Sprint(names.PortsRouteTable))
		holds("with another routing rule", list, false, 1, unrouted...)
		ok(t, x.Write(list))
		holds("written anew", list, true, 1, unrouted...)
		if tc.family == plan.IPv4 {
			ok(t, d.RouteAddresses([]netip.Addr{a}))
			leads("with its route", false, true)
			ok(t, d.AddUnrouted([]netip.Addr{a})) // as one that an older start has left
			leads("without its route again", false, false)
			// Where the address becomes the node's own, all of it is at once.
			nstest.Exec(t, "ip", "addr", "add", tc.external+"/32", "dev", "eth0")
			ok(t, d.RemoveAddresses([]netip.Addr{a}))
			leads("as an address of the node's own", false, true)
			nstest.Exec(t, "ip", "addr", "del", tc.external+"/32", "dev", "eth0")
		}
		var many []plan.Address
		for port := range uint16(3000) {
			many = append(many, plan.Address{Addr: a, Protocol: plan.TCP, Port: 1000 + port})
		}
		ok(t, x.Write(many))
		if got, _, complete, err := x.List(); len(got) != len(many) || !complete || err != nil {
			t.Errorf("of %d ports, %d are there; %v", len(many), len(got), err)
		}
		if tc.family == plan.IPv4 {
			ok(t, x.Clear())
		} else {
			ok(t, RemovePorts())
		}
		ok(t, x.Clear()) // There is nothing.
		ok(t, d.RemovePortRoutes([]netip.Addr{a}))
		ok(t, d.RemovePortRoutes([]netip.Addr{a}))
		holds("at last", nil, false, 0)
		if families, err := PortsFamilies(); len(families) > 0 || err != nil {
			t.Errorf("at last there are ports of %v, %v", families, err)
		}
	}
	if got := nstest.Exec(t, "ip", "route", "show", "table", "local", "type", "throw"); got != "" {
		t.Errorf("AddUnrouted has left %q", got)
	}
	if got := nstest.Exec(t, "nft", "list", "tables"); got != "" {
		t.Errorf("tables are left: %q", got)
	}
}

// TestUnroutedIsNeverLocal: however often an address comes and goes, nobody ever sees a local route to it.
func TestUnroutedIsNeverLocal(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	nstest.Exec(t, "ip", "link", "add", "eth0", "type", "dummy")
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "eth0")
	nstest.Exec(t, "ip", "link", "set", "eth0", "up")
	a := netip.MustParseAddr("192.0.2.7")
	x, err := OpenPorts(plan.IPv4)
	ok(t, err)
	defer x.Close()
	ok(t, x.Write([]plan.Address{{Addr: a, Protocol: plan.TCP, Port: 80}})) // The first rule parts tables local and main.
	other, err := links.NewHandle(unix.NETLINK_ROUTE)
	ok(t, err)
	defer other.Close()
	device, err := other.LinkByName(names.Device)
	ok(t, err)
	done, looks := make(chan struct{}), 0
	go func() {
		defer close(done)
		for range 300 {
			if d.AddUnrouted([]netip.Addr{a}) != nil || d.RemoveAddresses([]netip.Addr{a}) != nil {
				t.Error("it failed")
			}
		}
	}()
	for {
		select {
		case <-done:
			if looks == 0 {
				t.Error("nobody looked")
			}
			return
		default:
		}
		routes, err := other.RouteGet(a.AsSlice())
		if err != nil || len(routes) != 1 || routes[0].LinkIndex == device.Attrs().Index || routes[0].Type != 1 {
			t.Fatalf("look %d: %v, %v", looks, routes, err)
		}
		looks++
	}
}

// TestPortsWatch: the removal of the routing rule and of a route is noticed.
func TestPortsWatch(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	for _, f := range plan.Families {
		a := map[plan.Family]netip.Addr{plan.IPv4: netip.MustParseAddr("198.51.100.7"), plan.IPv6: netip.MustParseAddr("2001:db8::7")}[f]
		x, err := OpenPorts(f)
		ok(t, err)
		defer x.Close()
		ok(t, d.AddPortRoutes([]netip.Addr{a}))
		ok(t, x.Write([]plan.Address{{Addr: a, Protocol: plan.UDP, Port: 53}}))
		watch, err := host.WatchDevice(names.Device)
		ok(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		changes := make(chan host.DeviceChange, 10)
		go watch(ctx, func(c host.DeviceChange) { changes <- c })
		for _, step := range []struct {
			do   func() error
			want host.DeviceChange
		}{
			{x.Clear, host.DeviceChange{PortRule: true, Family: f, Gone: true}},
			{func() error { return d.RemovePortRoutes([]netip.Addr{a}) },
				host.DeviceChange{Route: netip.PrefixFrom(a, a.BitLen()), ByPort: true, Gone: true}},
		} {
			ok(t, step.do())
			select {
			case got := <-changes:
				if got != step.want {
					t.Errorf("reported %+v, want %+v", got, step.want)
				}
			case <-ctx.Done():
				t.Fatalf("nothing was reported, want %s", step.want)
			}
		}
	}
}
