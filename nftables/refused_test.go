package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// socket is a socket of the kernel with faults.
type socket struct {
	netlink.Socket
	// refuses returns the error with which an element that is added is refused; 0 for none. named has the kernel say which it was.
	refuses func(set, key string) syscall.Errno
	named   bool
	answers [][]byte
	// received may change what arrives.
	received func(b []byte, n int, err error) (int, error)
	sends    int
}

// element begins at an offset in a message.
type elementIn struct {
	set, key string
	at       int
}

func elementsIn(h netlink.Header, body []byte) (out []elementIn) {
	if h.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM {
		return nil
	}
	const header = 4
	set := netlink.Text(netlink.Attribute(body[header:], unix.NFTA_SET_ELEM_LIST_SET))
	list := netlink.Attribute(body[header:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	at := len(body) - len(list)
	for _, raw := range netlink.Attributes(list) {
		key := netlink.Attribute(netlink.Attribute(raw, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE)
		out = append(out, elementIn{set, string(key), at})
		at += header + len(raw)
	}
	return out
}

func (s *socket) Send(b []byte) error {
	s.sends++
	var asks []uint32
	failed := false
	err := netlink.Messages(b, func(h netlink.Header, body []byte) {
		if h.Flags&unix.NLM_F_ACK != 0 && h.Flags&unix.NLM_F_DUMP != unix.NLM_F_DUMP {
			asks = append(asks, h.Seq)
		}
		for _, e := range elementsIn(h, body) {
			if s.refuses == nil {
				return
			}
			if no := s.refuses(e.set, e.key); no != 0 {
				s.answer(h, no, e.at)
				failed = true
				return
			}
		}
	})
	if err != nil || !failed {
		return errors.Join(err, s.Socket.Send(b))
	}
	for _, seq := range asks {
		s.answer(netlink.Header{Seq: seq}, 0, 0)
	}
	return nil
}

// answer prepares the answer to a message of which the kernel finds fault with what begins at an offset.
func (s *socket) answer(h netlink.Header, no syscall.Errno, at int) {
	body := binary.NativeEndian.AppendUint32(nil, uint32(-int32(no)))
	body = append(body, make([]byte, unix.SizeofNlMsghdr)...)
	m := netlink.Message{Type: unix.NLMSG_ERROR, Flags: unix.NLM_F_CAPPED}
	if s.named && no != 0 {
		const offset = 2
		body = netlink.Buffer(body).Uint32(offset, uint32(unix.SizeofNlMsghdr+at))
		m.Flags |= unix.NLM_F_ACK_TLVS
	}
	m.Body = body
	s.answers = append(s.answers, m.Append(nil, h.Seq))
}

func (s *socket) Receive(b []byte) (int, error) {
	if len(s.answers) > 0 {
		n := copy(b, s.answers[0])
		s.answers = s.answers[1:]
		return n, nil
	}
	n, err := s.Socket.Receive(b)
	if s.received != nil {
		n, err = s.received(b, n, err)
	}
	return n, err
}

// refuse has the kernel refuse elements with an error.
func (s *socket) refuse(with syscall.Errno, which func(set, key string) bool) {
	s.refuses = func(set, key string) syscall.Errno {
		if which(set, key) {
			return with
		}
		return 0
	}
}

// faultyEngine is an engine over the kernel of the namespace, with faults, and what it has reported to be refused.
func faultyEngine(t testing.TB, f plan.Family) (*engine, *socket, func() []plan.Refusal) {
	t.Helper()
	s := &socket{}
	e := newEngine(f, Options{MasqueradeBit: 14}, slog.New(slog.DiscardHandler), func() (kernel, error) {
		real, err := netlink.OpenLarge(unix.NETLINK_NETFILTER, 64<<20)
		s.Socket = real
		return nft.NewConn(s), err
	})
	var reported []plan.Refusal
	e.onRefused = func(_ plan.Family, list []plan.Refusal) { reported = list }
	t.Cleanup(func() {
		if e.kernel != nil {
			_ = e.kernel.Close()
		}
	})
	return e, s, func() []plan.Refusal { return reported }
}

// again lets everything that is refused be tried again.
func again(e *engine) {
	for _, r := range e.refused {
		r.again = time.Now().Add(-time.Second)
	}
}

// TestRefusedOne: a Service that the kernel refuses keeps what it had, everything else is written, and it is tried again.
func TestRefusedOne(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	for _, named := range []bool{true, false} {
		_ = Cleanup()
		e, s, reported := faultyEngine(t, plan.IPv4)
		p := plantest.Large(200, 2)
		synced(t, e, p, plan.Everything())
		s.named = named
		bad, good, fresh := plantest.LargeService(17, 1000, 3), plantest.LargeService(18, 1100, 4), plantest.LargeService(300, 1200, 2)
		before := p.Services[bad.Key]
		lost := nameOf(plan.IPv4, fresh.Frontends[0])
		name := nameOf(plan.IPv4, bad.Frontends[0])
		s.refuse(unix.EINVAL, func(_, key string) bool { return strings.HasPrefix(key, name) || strings.HasPrefix(key, lost) })
		changed := plan.Keys{}
		for _, sp := range []*plan.ServicePort{bad, good, fresh} {
			p.Set(sp)
			changed[sp.Key] = struct{}{}
		}
		for i := range 40 {
			sp := plantest.LargeService(50+i, 2000+3*i, 3)
			p.Set(sp)
			changed[sp.Key] = struct{}{}
		}
		s.sends = 0
		synced(t, e, p, plan.Only(changed))
		if most := map[bool]int{true: 8, false: 30}[named]; s.sends > most {
			t.Errorf("it took %d transactions to find what is refused (named: %t)", s.sends, named)
		}
		want := plan.New(p.Node, p.Settings)
		for _, sp := range p.Services {
			want.Set(sp)
		}
		want.Delete(fresh.Key)
		want.Set(before)
		effective := func() {
			t.Helper()
			holdsBut(t, e, want, fresh)
		}
		effective()
		list := reported()
		if len(list) != 2 || list[0].Key != bad.Key || !list[0].Kept || list[1].Key != fresh.Key || list[1].Kept || !errors.Is(list[0].Err, unix.EINVAL) {
			t.Fatalf("reported %v", list)
		}
		syncFindsNothing(t, e, p)
		effective()
		s.sends = 0
		other := plantest.LargeService(17, 1300, 5)
		p.Set(other)
		if err := e.Sync(ctx, p, plan.Only(plan.Keys{bad.Key: {}})); err != nil || s.sends > 1 {
			t.Errorf("other endpoints of what is refused were written %d times: %v", s.sends, err)
		}
		s.refuses = nil
		again(e)
		if err := e.Sync(ctx, p, plan.Only(plan.Keys{fresh.Key: {}})); err != nil || len(reported()) != 1 {
			t.Errorf("reported %v, %v", reported(), err)
		}
		if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(e.Found) > 0 || len(reported()) != 0 {
			t.Errorf("found %v, reported %v, %v", e.Found, reported(), err)
		}
		holds(t, e, p)
	}
}

// holdsBut is as holds, for a plan in which the kernel has refused some ServicePorts of which it has nothing but the cluster IPs.
func holdsBut(t rapid.TB, e *engine, p *plan.Plan, without ...*plan.ServicePort) {
	t.Helper()
	_, want, _ := desired(p, e.family, e.options)
	for _, sp := range without {
		for _, fe := range sp.Frontends {
			if fe.Kind == plan.ClusterIP {
				want[id{set: clusterIPs, key: string(fe.Addr.AsSlice())}] = value{}
			}
		}
	}
	if got, want := content(e.family, elementsOf(t, e)), content(e.family, want); got != want {
		t.Fatalf("the kernel has something else than it should:\n%s", difference(want, got))
	}
}

// elementsOf are all elements in the kernel.
func elementsOf(t rapid.TB, e *engine) map[id]value {
	t.Helper()
	c, err := nft.Dial()
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer c.Close()
	s, err := listing(e, c)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return s.have
}

// TestRefusedAtRandom: whatever is refused, and whenever, the rest is written, nothing is left for anybody who does not ask for it,
// comparisons find nothing, and in the end everything is in force.
func TestRefusedAtRandom(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	rapid.Check(t, func(rt *rapid.T) {
		f := rapid.SampledFrom(plan.Families[:]).Draw(rt, "family")
		_ = Cleanup()
		e, s, _ := faultyEngine(t, f)
		s.named = rapid.Bool().Draw(rt, "named")
		plans := rapid.SliceOfN(plantest.Plans(), 2, 5).Draw(rt, "plans")
		for i, p := range plans {
			e.most = rapid.SampledFrom([]int{mostInTransaction, 50, 1}).Draw(rt, "most in a transaction")
			readsByKey(rt, e)
			inSteps(rt, e)
			if p.Node = plans[0].Node; rapid.IntRange(0, 3).Draw(rt, "settings change") > 0 {
				p.Settings = plans[max(i-1, 0)].Settings
			}
			var bad []string
			list := p.Sorted(f)
			if i < len(plans)-1 && len(list) > 0 {
				for _, sp := range rapid.SliceOfN(rapid.SampledFrom(list), 0, 3).Draw(rt, "refused") {
					for _, fe := range sp.Frontends {
						bad = append(bad, nameOf(f, fe))
					}
				}
			}
			s.refuse(unix.EINVAL, func(set, key string) bool {
				return slices.ContainsFunc(bad, func(name string) bool { return strings.HasPrefix(key, name) })
			})
			changed := plan.Everything()
			if i > 0 {
				changed = plan.Only(plantest.Differing(plans[i-1], p))
			}
			if i == len(plans)-1 {
				again(e)
			}
			if rapid.IntRange(0, 4).Draw(rt, "sets change") == 0 { // The table is created anew.
				e.options.Count = true
				e.sets = e.options.sets(f)
				e.forget()
			}
			for _, c := range []plan.Change{changed, plan.EveryService(), plan.Everything()} {
				if err := syncWhole(e, p, c); err != nil || len(e.Found) > 0 {
					rt.Fatalf("step %d: found %v, %v", i, e.Found, err)
				}
				without := plan.New(p.Node, p.Settings)
				for _, sp := range p.Services {
					if e.refused[sp.Key] == nil {
						without.Set(sp)
					}
				}
				_, want, _ := desired(without, f, e.options)
				for _, sp := range p.Sorted(f) {
					for _, fe := range sp.Frontends {
						if fe.Kind == plan.ClusterIP {
							want[id{set: clusterIPs, key: string(fe.Addr.AsSlice())}] = value{}
						}
					}
				}
				for k, r := range e.refused {
					if p.Services[k] == nil {
						rt.Fatalf("%s is refused, and not in the plan", k)
					}
					maps.Copy(want, r.kept)
				}
				if got, want := content(f, elementsOf(rt, e)), content(f, want); got != want {
					rt.Fatalf("step %d: the kernel has something else than it should:\n%s", i, difference(want, got))
				}
				if found, _, err := e.CompareBeside(ctx); err != nil || len(found) > 0 {
					rt.Fatalf("step %d: a comparison beside syncs found %v, %v", i, found, err)
				}
			}
		}
		holds(rt, e, plans[len(plans)-1])
		_ = e.kernel.Close()
		e.kernel = nil
	})
}

// TestRefusedByKernel: the same where the real kernel refuses: a set is full.
func TestRefusedByKernel(t *testing.T) {
	nstest.Enter(t)
	e, _, reported := faultyEngine(t, plan.IPv4)
	e.sets = slices.Clone(e.sets)
	const room = 20
	e.sets[services].Size = room
	p := plantest.Large(room+3, 2)
	for range 2 {
		syncFindsNothing(t, e, p)
		if list := reported(); len(list) != 3 || list[0].Kept || !errors.Is(list[0].Err, unix.ENFILE) {
			t.Fatalf("reported %v", list)
		}
		counts := map[setID]int{}
		for i := range elementsOf(t, e) {
			counts[i.set]++
		}
		if counts[services] != room || counts[endpoints] != 2*room || counts[clusterIPs] != room+3 {
			t.Errorf("there are %v", counts)
		}
	}
	for _, sp := range p.Sorted(plan.IPv4)[:3] {
		if e.refused[sp.Key] == nil {
			p.Delete(sp.Key)
		}
	}
	again(e)
	synced(t, e, p, plan.Everything())
	if list := reported(); len(list) > 1 {
		t.Errorf("with more room, reported %v", list)
	}
}

// TestNamedByKernel: the kernel names the element that it refuses.
func TestNamedByKernel(t *testing.T) {
	nstest.Enter(t)
	c, err := nft.Dial()
	require.NoError(t, err)
	defer c.Close()
	s := sets(plan.IPv4)[clusterIPs]
	b := nft.NewBatch(plan.IPv4, "test")
	b.AddTable()
	b.AddSet(s)
	require.NoError(t, c.Commit(b))
	b = nft.NewBatch(plan.IPv4, "test")
	var list []nft.Element
	for i := range 1200 {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		list = append(list, nft.Element{Key: string(a.AsSlice()), Comment: "a comment"})
	}
	b.AddElements(s, list[:700])
	b.DeleteElements(s, list[900:1000])
	var refused *nft.RefusedError
	if err := c.Commit(b); !errors.As(err, &refused) || !errors.Is(err, unix.ENOENT) {
		t.Fatal(err)
	}
	if refused.Set != s.Name || refused.Element.Key != list[900].Key {
		t.Errorf("the kernel names %q of set %q", refused.Element.Key, refused.Set)
	}
}

// TestNobodyIsRefused: errors that say nothing about what a Service asks for make a sync fail, and are told of no Service.
func TestNobodyIsRefused(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	for _, no := range []syscall.Errno{unix.ENOMEM, unix.EPERM, unix.ENOENT, unix.EBUSY, unix.EINVAL} {
		_ = Cleanup()
		e, s, reported := faultyEngine(t, plan.IPv4)
		p := plantest.Large(40, 2)
		s.refuses = func(string, string) syscall.Errno { return no }
		if no == unix.EINVAL { // Where everything of Services is refused, it is no Service's fault.
			s.refuse(no, func(set, _ string) bool { return set == sets(plan.IPv4)[services].Name })
		}
		for range 2 {
			if err := e.Sync(ctx, p, plan.Everything()); !errors.Is(err, no) || len(reported()) > 0 {
				t.Errorf("%v: %v, reported %v", no, err, reported())
			}
		}
		s.refuses = nil
		if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(reported()) > 0 {
			t.Errorf("after %v: %v, reported %v", no, err, reported())
		}
		holds(t, e, p)
	}
	_ = Cleanup()
	e, s, reported := faultyEngine(t, plan.IPv4)
	p := plantest.Large(40, 2)
	name := nameOf(plan.IPv4, plantest.LargeService(7, 0, 1).Frontends[0])
	s.refuse(unix.EEXIST, func(_, key string) bool { return strings.HasPrefix(key, name) })
	if err := e.Sync(ctx, p, plan.Everything()); !errors.Is(err, unix.EEXIST) || len(reported()) > 0 {
		t.Errorf("what exists: %v, reported %v", err, reported())
	}
	if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(reported()) != 1 {
		t.Errorf("what exists though everything has been read: %v, reported %v", err, reported())
	}
}

// TestFlushedMeanwhile: where another program removes all tables in the middle of the first programming or of a change, no Service is to
// blame, and the next sync has everything.
func TestFlushedMeanwhile(t *testing.T) {
	nstest.Enter(t)
	for at := 1; at <= 6; at++ {
		_ = Cleanup()
		e, k := testEngine(t, plan.IPv4)
		e.most = 100
		e.onRefused = func(_ plan.Family, list []plan.Refusal) { t.Errorf("refused: %v", list) }
		k.fail = func(commit int) error {
			if commit == at {
				nstest.Exec(t, "nft", "flush ruleset")
			}
			return nil
		}
		before, p := plantest.Large(60, 3), plantest.Large(90, 2)
		for i, step := range []struct {
			p       *plan.Plan
			changed plan.Change
		}{{before, plan.Everything()}, {p, plan.Only(plantest.Differing(before, p))}} {
			for n := 0; e.Sync(context.Background(), step.p, step.changed) != nil; n++ {
				if step.changed = plan.Everything(); n > 1 {
					t.Fatalf("step %d, flushed before transaction %d: the sync goes on to fail", i, at)
				}
			}
			if k.commits >= at {
				_, again, err := e.CompareBeside(context.Background())
				if again {
					err = errors.Join(err, e.Sync(context.Background(), step.p, plan.Everything()))
				}
				require.NoError(t, err)
			}
			holds(t, e, step.p)
		}
	}
}

// watched calls after each transaction.
type watched struct {
	kernel
	after func()
}

func (w *watched) Commit(b *nft.Batch) error {
	defer w.after()
	return w.kernel.Commit(b)
}

// TestRefusedAnew: while a table is created anew, as its sets have another form, the kernel never has fewer Services than before, except
// those that it refuses. If it refuses all of many, the table stays.
func TestRefusedAnew(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	const count = 50
	for _, tc := range []struct{ named, all bool }{{named: true}, {}, {all: true}} {
		_ = Cleanup()
		p := plantest.Large(count, 2)
		uncounted, _, _ := faultyEngine(t, plan.IPv4)
		synced(t, uncounted, p, plan.Everything())
		e, s, reported := faultyEngine(t, plan.IPv4)
		e.options.Count, s.named = true, tc.named
		e.sets = e.options.sets(e.family)
		bad := plantest.LargeService(17, 0, 2)
		name := nameOf(plan.IPv4, bad.Frontends[0])
		s.refuse(unix.EINVAL, func(set, key string) bool { return strings.HasPrefix(key, name) || tc.all && set == names.NFTServices })
		least, dial := count, e.dial
		e.dial = func() (kernel, error) {
			k, err := dial()
			return &watched{k, func() {
				n := 0
				if err := k.Sample(e.family, names.NFTables, e.sets[services], func(nft.Element) error { n++; return nil }); err != nil {
					t.Error(err)
				}
				least = min(least, n)
			}}, err
		}
		err := e.Sync(ctx, p, plan.Everything())
		switch {
		case tc.all:
			if err == nil || least < count {
				t.Errorf("all are refused: %v, and the kernel has %d Services", err, least)
			}
			continue
		case err != nil || least < count-1:
			t.Errorf("%v, and the kernel had %d Services", err, least)
		}
		if list := reported(); len(list) != 1 || list[0].Key != bad.Key {
			t.Errorf("reported %v", list)
		}
		p.Delete(bad.Key)
		holdsBut(t, e, p, bad)
	}
}

// TestManyRefusedAndOneGone: where many are refused and nothing else is added, what is not wanted goes all the same.
func TestManyRefusedAndOneGone(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, s, _ := faultyEngine(t, plan.IPv4)
	p := plantest.Large(2*mostRefused, 2)
	synced(t, e, p, plan.Everything())
	want := plantest.Large(2*mostRefused, 2)
	gone := plantest.LargeService(2*mostRefused-1, 0, 2).Key
	p.Delete(gone)
	want.Delete(gone)
	changed := plan.Keys{gone: {}}
	for i := range mostRefused + 1 {
		sp := plantest.LargeService(i, 1000, 3)
		p.Set(sp)
		changed[sp.Key] = struct{}{}
	}
	s.refuse(unix.EINVAL, func(set, _ string) bool { return set == names.NFTServices })
	if err := e.Sync(ctx, p, plan.Only(changed)); err == nil {
		t.Error("nobody is told")
	}
	holdsBut(t, e, want)
}
