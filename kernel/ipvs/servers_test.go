package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	moby "github.com/moby/ipvs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

func openServers(t testing.TB) *Servers {
	t.Helper()
	nstest.Enter(t)
	s, err := OpenServers()
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func at(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func id(protocol plan.Protocol, s string) ServerID {
	a := at(s)
	return ServerID{Family: plan.FamilyOf(a.Addr()), Protocol: protocol, Addr: a.Addr(), Port: a.Port()}
}

// check compares what the kernel has of a server, by List and by Get, with what it should.
func check(t *testing.T, s *Servers, want Server, realServers ...RealServer) {
	t.Helper()
	h := &ActualServer{Server: want, RealServers: map[netip.AddrPort]ActualRealServer{}}
	for _, d := range realServers {
		h.RealServers[d.Addr] = ActualRealServer{RealServer: d}
	}
	got, err := s.Get(want.ID)
	if err != nil || !reflect.DeepEqual(got, h) {
		t.Errorf("Get: %+v, %v; want %+v", got, err, h)
	}
	list, err := s.List(want.ID.Family)
	if err != nil || !reflect.DeepEqual(list[want.ID], h) {
		t.Errorf("List: %+v, %v; want %+v", list[want.ID], err, h)
	}
}

func TestServersReadBack(t *testing.T) {
	s := openServers(t)
	ids := []ServerID{
		id(plan.TCP, "10.96.0.1:443"), id(plan.UDP, "10.96.0.1:443"), id(plan.SCTP, "10.96.0.1:443"), id(plan.TCP, "[fd00::1]:443"),
		id(plan.UDP, "[fd00::1]:53"), {Family: plan.IPv4, Mark: 0x90007530}, {Family: plan.IPv6, Mark: 0x90007530},
	}
	shapes := []Server{
		{Scheduler: "rr"}, {Scheduler: "wrr", Persistence: 3 * time.Hour},
		{Scheduler: "mh", Ports: true}, {Scheduler: "sh", Fallback: true},
		{Scheduler: "mh", Ports: true, Fallback: true, Persistence: time.Second},
	}
	realServers := func(id ServerID) []RealServer {
		if id.Family == plan.IPv6 {
			return []RealServer{{at("[fd00:1::1]:8080"), 1}, {at("[fd00:1::2]:8080"), 0}}
		}
		return []RealServer{{at("10.1.0.1:8080"), 1}, {at("10.1.0.2:8080"), 100_000}}
	}
	for i, id := range ids {
		want := shapes[0]
		want.ID = id
		require.NoError(t, s.Add(want))
		for _, d := range realServers(id) {
			require.NoError(t, s.AddRealServer(id, d))
		}
		check(t, s, want, realServers(id)...)
		for _, shape := range append(shapes[1:], shapes[i%len(shapes)]) {
			shape.ID = id
			require.NoError(t, s.Update(shape))
			check(t, s, shape, realServers(id)...)
		}
	}
	for _, f := range plan.Families {
		list, err := s.List(f)
		require.NoError(t, err)
		for id := range list {
			if id.Family != f {
				t.Errorf("%s is in the list of %s", id, f)
			}
			require.NoError(t, s.Delete(id))
		}
		if list, err := s.List(f); err != nil || len(list) != 0 {
			t.Errorf("after deleting all: %v, %v", list, err)
		}
	}
}

func TestServersRepeat(t *testing.T) {
	s := openServers(t)
	v := Server{ID: id(plan.TCP, "10.96.0.1:80"), Scheduler: "rr"}
	d := RealServer{at("10.1.0.1:80"), 1}
	do := func(what string, errs ...error) {
		t.Helper()
		for i, err := range errs {
			assert.NoError(t, err, "%s, %d", what, i)
		}
	}
	if got, err := s.Get(v.ID); got != nil || err != nil {
		t.Errorf("Get of what is not there: %v, %v", got, err)
	}
	do("delete what is not there", s.Delete(v.ID))
	if err := s.DeleteRealServer(v.ID, d.Addr); !errors.Is(err, unix.ESRCH) {
		t.Errorf("delete a real server of a virtual server that is not there: %v", err)
	}
	if err := s.AddRealServer(v.ID, d); !errors.Is(err, unix.ESRCH) || !strings.Contains(err.Error(), "no such virtual server") {
		t.Errorf("a real server without a virtual server: %v", err)
	}
	if err := s.Update(v); !errors.Is(err, unix.ESRCH) {
		t.Errorf("update a virtual server that is not there: %v", err)
	}
	do("update a real server that is not there", s.Add(v), s.UpdateRealServer(v.ID, d))
	check(t, s, v, d)
	v.Scheduler, d.Weight = "wrr", 7
	do("add what is there", s.Add(v), s.AddRealServer(v.ID, d))
	check(t, s, v, d)
	do("delete the real server", s.DeleteRealServer(v.ID, d.Addr), s.DeleteRealServer(v.ID, d.Addr))
	check(t, s, v)
}

func TestApply(t *testing.T) {
	s := openServers(t)
	var ops []Op
	want := map[ServerID]*ActualServer{}
	for i := range 700 {
		v := Server{ID: id(plan.TCP, fmt.Sprintf("10.96.%d.%d:80", i>>8, i&255)), Scheduler: "rr"}
		d := RealServer{at("10.1.0.1:80"), uint32(i)}
		ops = append(ops, Op{Kind: AddServer, Server: v}, Op{AddRealServer, Server{ID: v.ID}, d})
		want[v.ID] = &ActualServer{Server: v, RealServers: map[netip.AddrPort]ActualRealServer{d.Addr: {RealServer: d}}}
	}
	for range 2 { // The second time, everything is there: as many errors of the kernel as there are ops.
		if errs := s.Apply(ops); errs != nil {
			t.Fatalf("%.500v", errors.Join(errs...))
		}
		if got, err := s.List(plan.IPv4); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("List: %d servers, %v; want the %d that were made", len(got), err, len(want))
		}
	}

	// What is wrong with one must not concern its neighbours.
	lacking := Server{ID: id(plan.TCP, "10.97.0.1:80"), Scheduler: "xx"}
	good, none := Server{ID: id(plan.TCP, "10.97.0.2:80"), Scheduler: "rr"}, Server{ID: id(plan.TCP, "10.97.0.3:80")}
	d := RealServer{at("10.1.0.1:80"), 1}
	errs := s.Apply([]Op{
		{Kind: AddServer, Server: lacking}, {AddRealServer, lacking, d},
		{Kind: UpdateServer, Server: none}, {UpdateRealServer, none, d},
		{Kind: AddServer, Server: good}, {UpdateRealServer, good, d},
		{AddRealServer, good, RealServer{at("10.1.0.2:80"), 1}},
		{DeleteRealServer, none, d}, {Kind: DeleteServer, Server: none},
	})
	if len(errs) != 9 || errs[0] == nil || errs[1] == nil || !errors.Is(errs[2], unix.ESRCH) || !errors.Is(errs[3], unix.ESRCH) ||
		errors.Join(errs[4:]...) != nil {
		t.Fatalf("errors: %q", errs)
	}
	if !strings.Contains(errs[0].Error(), "lacks this scheduler") || !strings.Contains(errs[0].Error(), "ip_vs_xx") {
		t.Errorf("error for a scheduler that is not there: %v", errs[0])
	}
	check(t, s, good, d, RealServer{at("10.1.0.2:80"), 1})

	// The last op about an object has the last word, also where others have to be tried again.
	gone, kept, back := RealServer{at("10.1.0.3:80"), 1}, RealServer{at("10.1.0.1:80"), 7}, RealServer{at("10.1.0.2:80"), 8}
	first := ops[0].Server
	if errs := s.Apply([]Op{
		{UpdateRealServer, good, gone}, {DeleteRealServer, good, gone}, {AddRealServer, good, kept}, {Kind: UpdateServer, Server: good},
		{DeleteRealServer, good, back}, {AddRealServer, good, back},
		{Kind: AddServer, Server: first}, {UpdateRealServer, first, gone}, {Kind: DeleteServer, Server: first},
	}); errs != nil {
		t.Fatal(errors.Join(errs...))
	}
	check(t, s, good, kept, back)
	if h, err := s.Get(first.ID); h != nil || err != nil {
		t.Errorf("a server that was deleted in the end: %v, %v", h, err)
	}

	for i, o := range ops {
		ops[i].Kind = DeleteServer
		if o.Kind == AddRealServer {
			ops[i].Kind = DeleteRealServer
		}
	}
	slices.Reverse(ops) // real servers first
	ops = append(ops, Op{Kind: DeleteServer, Server: good})
	if errs := s.Apply(ops); errs != nil {
		t.Fatalf("%.500v", errors.Join(errs...))
	}
	if got, err := s.List(plan.IPv4); err != nil || len(got) != 0 {
		t.Errorf("%d servers after deleting all, %v", len(got), err)
	}
}

func TestForeignServers(t *testing.T) {
	s := openServers(t)
	handle, err := moby.New("")
	require.NoError(t, err)
	defer handle.Close()
	service := func(port uint16) *moby.Service {
		return &moby.Service{
			Address: []byte{10, 96, 0, 1}, Port: port, Protocol: unix.IPPROTO_UDP, SchedName: "rr",
			AddressFamily: unix.AF_INET, Netmask: 0xffffffff,
		}
	}
	local := &moby.Destination{Address: []byte{127, 0, 0, 1}, Port: 80, Weight: 1, AddressFamily: unix.AF_INET}
	tunnel := *local
	tunnel.Address, tunnel.ConnectionFlags = []byte{10, 1, 0, 1}, moby.ConnectionFlagTunnel
	threshold := *local
	threshold.UpperThreshold = 5
	other := tunnel
	other.Address, other.AddressFamily = netip.MustParseAddr("fd00::1").AsSlice(), unix.AF_INET6
	onePacket, wide := service(2), service(3)
	onePacket.Flags, wide.Netmask = 4, 0xffff
	for _, c := range []struct {
		service     *moby.Service
		destination *moby.Destination
		want        bool
	}{
		{service(1), local, false}, {onePacket, local, true}, {wide, local, true},
		{service(4), &tunnel, true}, {service(5), &threshold, true}, {service(6), &other, true},
	} {
		require.NoError(t, errors.Join(handle.NewService(c.service), handle.NewDestination(c.service, c.destination)))
		got, err := s.Get(id(plan.UDP, fmt.Sprintf("10.96.0.1:%d", c.service.Port)))
		if err != nil || got.Foreign != c.want {
			t.Fatalf("port %d: %+v, %v; want foreign: %v", c.service.Port, got, err, c.want)
		}
		list, err := s.List(plan.IPv4)
		if listed := list[got.ID]; err != nil || len(got.RealServers) != 1 || !reflect.DeepEqual(listed, got) {
			t.Errorf("port %d: List: %+v, %v; want %+v", c.service.Port, listed, err, got)
		}
	}
}

func TestSchedulers(t *testing.T) {
	s := openServers(t)
	for _, name := range plan.Schedulers {
		if !s.HasScheduler(name) || !s.makeWith(name) {
			t.Errorf("no scheduler %s", name)
		}
	}
	for _, name := range []string{"", "xx", "none-of-that-name"} {
		if s.HasScheduler(name) || s.makeWith(name) {
			t.Errorf("there is a scheduler %q", name)
		}
	}
	for _, f := range plan.Families {
		if list, err := s.List(f); err != nil || len(list) != 0 {
			t.Errorf("looking for schedulers left %v, %v", list, err)
		}
	}
}

// TestSchedulerProbe: packets never see that somebody looks for a scheduler, not even where IPVS is built without IPv6: there is no
// virtual server at an address, at any time.
func TestSchedulerProbe(t *testing.T) {
	s := openServers(t)
	stop, watched := make(chan struct{}), make(chan error, 1)
	other := openServers(t)
	go func() {
		for {
			select {
			case <-stop:
				watched <- nil
				return
			default:
			}
			list, err := other.dumps.services(other.family)
			for _, v := range list {
				if v.ID.Mark == 0 {
					err = errors.Join(err, fmt.Errorf("there is a virtual server %s", v.ID))
				}
			}
			if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
				watched <- err
				return
			}
		}
	}()
	for range 3000 {
		if !s.makeWith("rr") {
			t.Error("no scheduler rr")
			break
		}
	}
	close(stop)
	require.NoError(t, <-watched)
}

func TestTimeouts(t *testing.T) {
	s := openServers(t)
	handle, err := moby.New("")
	require.NoError(t, err)
	defer handle.Close()
	before, err := handle.GetConfig()
	require.NoError(t, err)
	require.NoError(t, s.SetTimeouts(0, 0, 0))
	require.NoError(t, s.SetTimeouts(0, 17*time.Second, 1500*time.Millisecond))
	want := moby.Config{TimeoutTCP: before.TimeoutTCP, TimeoutTCPFin: 17 * time.Second, TimeoutUDP: 2 * time.Second}
	if got, err := handle.GetConfig(); err != nil || *got != want {
		t.Errorf("timeouts are %v, %v; want %v", got, err, want)
	}
}

func TestServersFromManyGoroutines(t *testing.T) {
	s := openServers(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			v := Server{ID: id(plan.TCP, fmt.Sprintf("10.96.0.%d:80", i+1)), Scheduler: "rr"}
			for range 20 {
				assert.NoError(t, s.Add(v))
				if _, err := s.List(plan.IPv4); err != nil {
					t.Error(err)
				}
				if err := s.Stats(func(ServerID, Traffic) {}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	list, err := s.List(plan.IPv4)
	if err != nil || len(list) != 8 {
		t.Errorf("%v, %v; want eight servers", maps.Keys(list), err)
	}
}

// TestListWhileOthersChange lists servers while those of another network namespace come and go.
func TestListWhileOthersChange(t *testing.T) {
	s := openServers(t)
	const n = 500
	if errs := s.Apply(bulk(n)); errs != nil {
		t.Fatal(errs[0])
	}
	done, stop := make(chan error), make(chan struct{})
	go func() {
		done <- func() error {
			runtime.LockOSThread()
			ns, err := netns.New()
			if err != nil {
				return err
			}
			defer ns.Close()
			other, err := OpenServers()
			if err != nil {
				return err
			}
			defer other.Close()
			for round := time.Duration(1); ; round++ {
				for _, kind := range []OpKind{AddServer, DeleteServer} {
					var ops []Op
					for i := range 100 {
						v := Server{ID: id(plan.TCP, fmt.Sprintf("10.97.0.%d:80", i)), Scheduler: "rr"}
						ops = append(ops, Op{Kind: kind, Server: v})
					}
					if errs := other.Apply(ops); errs != nil {
						return errs[0]
					}
					select {
					case <-stop:
						return nil
					case <-time.After(round * time.Millisecond): // In the end, however slow this machine is, a read fits in between.
					}
				}
			}
		}()
	}()
	read := 0
	for i := 0; i < 50 || read == 0; i++ {
		got, err := s.List(plan.IPv4)
		switch {
		case errors.Is(err, netlink.ErrInterrupted): // No two dumps came between changes.
		case err != nil || len(got) != n:
			t.Fatalf("%d servers, %v; want %d", len(got), err, n)
		default:
			read++
		}
	}
	close(stop)
	require.NoError(t, <-done)
}

// bulk is what programs n virtual servers with two real servers each.
func bulk(n int) []Op {
	var ops []Op
	for i := range n {
		v := Server{Scheduler: "rr", ID: ServerID{
			Family: plan.IPv4, Protocol: plan.TCP, Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80,
		}}
		ops = append(ops, Op{Kind: AddServer, Server: v})
		for j := range 2 {
			a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(j), byte(i >> 8), byte(i)}), 8080)
			ops = append(ops, Op{AddRealServer, Server{ID: v.ID}, RealServer{a, 1}})
		}
	}
	return ops
}

// BenchmarkServers programs virtual servers with two real servers each, and reads them.
func BenchmarkServers(b *testing.B) {
	const n = 1000
	ops := bulk(n)
	flush := func(b *testing.B, s *Servers) {
		b.Helper()
		h, err := moby.New("")
		require.NoError(b, err)
		defer h.Close()
		require.NoError(b, h.Flush())
	}
	b.Run("at once", func(b *testing.B) {
		s := openServers(b)
		for b.Loop() {
			if errs := s.Apply(ops); errs != nil {
				b.Fatal(errs[0])
			}
			b.StopTimer()
			flush(b, s)
			b.StartTimer()
		}
	})
	b.Run("one by one", func(b *testing.B) {
		s := openServers(b)
		for b.Loop() {
			for _, o := range ops {
				require.NoError(b, s.apply(o))
			}
			b.StopTimer()
			flush(b, s)
			b.StartTimer()
		}
	})
	b.Run("moby", func(b *testing.B) {
		s := openServers(b)
		handle, err := moby.New("")
		require.NoError(b, err)
		defer handle.Close()
		for b.Loop() {
			for _, o := range ops {
				v := &moby.Service{
					Address: o.Server.ID.Addr.AsSlice(), Port: 80, Protocol: unix.IPPROTO_TCP, SchedName: "rr",
					AddressFamily: unix.AF_INET, Netmask: 0xffffffff,
				}
				var err error
				if o.Kind == AddServer {
					err = handle.NewService(v)
				} else {
					d := &moby.Destination{Address: o.RealServer.Addr.Addr().AsSlice(), Port: 8080, Weight: 1, AddressFamily: unix.AF_INET}
					err = handle.NewDestination(v, d)
				}
				require.NoError(b, err)
			}
			b.StopTimer()
			flush(b, s)
			b.StartTimer()
		}
	})
	b.Run("list", func(b *testing.B) {
		s := openServers(b)
		if errs := s.Apply(ops); errs != nil {
			b.Fatal(errs[0])
		}
		for b.Loop() {
			if l, err := s.List(plan.IPv4); err != nil || len(l) != n {
				b.Fatal(len(l), err)
			}
		}
	})
	b.Run("stats", func(b *testing.B) {
		s := openServers(b)
		if errs := s.Apply(ops); errs != nil {
			b.Fatal(errs[0])
		}
		for b.Loop() {
			read := 0
			if err := s.Stats(func(ServerID, Traffic) { read++ }); err != nil || read != n {
				b.Fatal(read, err)
			}
		}
	})
	b.Run("one real server", func(b *testing.B) {
		s := openServers(b)
		if errs := s.Apply(ops); errs != nil {
			b.Fatal(errs[0])
		}
		for b.Loop() {
			require.NoError(b, s.UpdateRealServer(ops[0].Server.ID, RealServer{ops[1].RealServer.Addr, 5}))
		}
	})
}
