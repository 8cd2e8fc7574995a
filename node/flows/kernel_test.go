package flows

import (
	"encoding/binary"
	"log/slog"
	"net/netip"
	"os/exec"
	"syscall"
	"testing"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// entry describes a flow that inject makes.
type entry struct {
	protocol uint8
	src, dst string // of the original direction
	from, to string // source and destination of the replies; where empty, those of a flow that is not translated
	zone     uint16
	replied  bool
	state    byte // of TCP
}

func (e entry) tuples() (src, dst, from, to netip.AddrPort) {
	src, dst = netip.MustParseAddrPort(e.src), netip.MustParseAddrPort(e.dst)
	from, to = dst, src
	if e.from != "" {
		from = netip.MustParseAddrPort(e.from)
	}
	if e.to != "" {
		to = netip.MustParseAddrPort(e.to)
	}
	return src, dst, from, to
}

func appendTuple(m message, typ uint16, protocol uint8, src, dst netip.AddrPort) message {
	v4 := src.Addr().Is4()
	return m.nest(typ, func(m message) message {
		m = m.nest(attrTupleIP, func(m message) message {
			if v4 {
				return m.attr(attrIPv4Src, src.Addr().AsSlice()...).attr(attrIPv4Dst, dst.Addr().AsSlice()...)
			}
			return m.attr(attrIPv6Src, src.Addr().AsSlice()...).attr(attrIPv6Dst, dst.Addr().AsSlice()...)
		})
		return m.nest(attrTupleProto, func(m message) message {
			return m.attr(attrProtoNum, protocol).port(attrSrcPort, src.Port()).port(attrDstPort, dst.Port())
		})
	})
}

// create appends a message that puts a flow into the kernel's table for ten minutes.
func (e entry) create(m message, flags uint16, seq uint32) message {
	const attrTimeout = 7
	src, dst, from, to := e.tuples()
	start := len(m)
	m = m.start(msgNew, syscall.NLM_F_REQUEST|syscall.NLM_F_CREATE|syscall.NLM_F_EXCL|flags, seq, plan.FamilyOf(src.Addr()))
	m = appendTuple(m, attrOrig, e.protocol, src, dst)
	m = appendTuple(m, attrReply, e.protocol, from, to)
	m = m.attr(attrTimeout, binary.BigEndian.AppendUint32(nil, 600)...)
	if e.zone != 0 {
		m = m.port(attrZone, e.zone)
	}
	if e.replied {
		const confirmed = 1 << 3
		m = m.attr(attrStatus, 0, 0, 0, statusReplied|confirmed)
	}
	if e.state != 0 {
		m = m.nest(attrProtoInfo, func(m message) message {
			return m.nest(attrProtoInfoTCP, func(m message) message { return m.attr(attrTCPState, e.state) })
		})
	}
	m.finish(start)
	return m
}

// inject puts flows into the kernel's table of this thread's namespace.
func inject(t testing.TB, entries ...entry) {
	t.Helper()
	c, err := openSocket()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	buf := make([]byte, receiveBuffer)
	for i, e := range entries {
		if err := c.Send(e.create(nil, syscall.NLM_F_ACK, uint32(i))); err != nil {
			t.Fatal(err)
		}
		n, err := c.Receive(buf)
		if err == nil {
			err = messages(buf[:n], func(_ header, payload []byte) error { return errnoOf(payload) })
		}
		if err != nil {
			t.Fatalf("making the flow %+v: %v", e, err)
		}
	}
}

// held returns the sources of the flows in the table of this thread's namespace that one of the entries describes.
func held(t testing.TB, entries []entry) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	noFilter := true
	for _, f := range plan.Families {
		for _, p := range protocols {
			table, err := openTable(openSocket, &noFilter)
			if err != nil {
				t.Fatal(err)
			}
			_, _, err = table.removeIf(t.Context(), filter{family: f, protocol: protocolNumber(p)}, func(fl *flow) bool {
				var orig tuple
				orig.parse(fl.orig)
				for _, e := range entries {
					src, dst, from, _ := e.tuples()
					if src == orig.src() && dst == fl.dst && from == fl.from && e.protocol == fl.protocol {
						out[e.src] = true
					}
				}
				return false
			})
			table.close()
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return out
}

// wantHeld checks which of the entries are left, by their sources.
func wantHeld(t testing.TB, entries []entry, want ...string) {
	t.Helper()
	got := held(t, entries)
	for _, w := range want {
		if !got[w] {
			t.Errorf("the flow from %s was removed, but should have stayed", w)
		}
		delete(got, w)
	}
	for s := range got {
		t.Errorf("the flow from %s is still there", s)
	}
}

func newReconciler(change func(*Config)) *Reconciler {
	cfg := Config{Families: plan.Families[:], Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	return New(cfg)
}

// mustPass does one pass.
func mustPass(t testing.TB, r *Reconciler) {
	t.Helper()
	if _, err := r.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func sh(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

// service makes a ServicePort with a cluster IP and endpoints in use.
func service(name string, protocol plan.Protocol, clusterIP string, endpoints ...string) *plan.ServicePort {
	at := netip.MustParseAddrPort(clusterIP)
	sp := &plan.ServicePort{
		Key: plan.Key{Service: plan.Service{Namespace: "default", Name: name}, Protocol: protocol,
			Family: plan.FamilyOf(at.Addr())},
		Frontends: []plan.Frontend{
			{Kind: plan.ClusterIP, Addr: at.Addr(), Protocol: protocol, Port: at.Port()},
		},
	}
	for _, e := range endpoints {
		sp.Cluster = append(sp.Cluster, plan.Endpoint{Addr: netip.MustParseAddrPort(e)})
	}
	sp.Any = len(endpoints) > 0
	return sp
}

func withNodePort(sp *plan.ServicePort, port uint16) *plan.ServicePort {
	sp.Frontends = append(sp.Frontends, plan.Frontend{Kind: plan.NodePort, Protocol: sp.Key.Protocol, Port: port})
	return sp
}

// TestFilters: the kernel hands over all flows that a filter is for. It may hand over more.
func TestFilters(t *testing.T) {
	t.Parallel()
	for f, a := range byFamily {
		nstest.Run(t, func() {
			wanted := entry{protocol: protoUDP, src: a.client + ":4001", dst: a.clusterIP + ":53"}
			inject(t, wanted,
				entry{protocol: protoUDP, src: a.one + ":4002", dst: a.clusterIP + ":54"},
				entry{protocol: protoUDP, src: a.client + ":4003", dst: a.two + ":53"},
				entry{protocol: protoSCTP, src: a.client + ":4004", dst: a.clusterIP + ":53"})
			client, clusterIP := parseAddr(a.client), parseAddr(a.clusterIP)
			for _, want := range []filter{
				{}, {dst: part{clusterIP, 53}}, {dst: part{clusterIP, 0}}, {dst: part{port: 53}},
				{src: part{client, 4001}}, {src: part{client, 0}}, {src: part{port: 4001}},
				{src: part{client, 4001}, dst: part{clusterIP, 53}},
			} {
				want.family, want.protocol = f, protoUDP
				noFilter, found := false, false
				table, err := openTable(openSocket, &noFilter)
				if err != nil {
					t.Fatal(err)
				}
				_, _, err = table.removeIf(t.Context(), want, func(fl *flow) bool {
					found = found || fl.src.String() == wanted.src
					return false
				})
				table.close()
				if err != nil || !found || noFilter {
					t.Errorf("%+v: found %v, without a filter %v, %v", want, found, noFilter, err)
				}
			}
		})
	}
}

// TestDeletesThatEntryOnly: a flow that was made anew since it was read, with the same addresses and ports, is not
// deleted in the place of the one that was read.
func TestDeletesThatEntryOnly(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		flows := fromPort("10.244.1.9", []entry{{protocol: protoUDP, dst: "10.96.0.10:53"}}, 1)
		inject(t, flows...)
		noFilter := false
		remove := func(change func(*flow)) (read, deleted int) {
			table, err := openTable(openSocket, &noFilter)
			if err != nil {
				t.Fatal(err)
			}
			defer table.close()
			read, deleted, err = table.removeIf(t.Context(), filter{family: plan.IPv4, protocol: protoUDP}, func(fl *flow) bool {
				if len(fl.id) == 0 {
					t.Error("the kernel gives no id")
				}
				change(fl)
				return true
			})
			if err != nil {
				t.Error(err)
			}
			return read, deleted
		}
		other := func(fl *flow) { fl.id = []byte{fl.id[0] ^ 1, fl.id[1], fl.id[2], fl.id[3]} }
		if read, deleted := remove(other); read != 1 || deleted != 0 {
			t.Errorf("with another id: read %d, deleted %d", read, deleted)
		}
		wantHeld(t, flows, flows[0].src)
		if read, deleted := remove(func(*flow) {}); read != 1 || deleted != 1 {
			t.Errorf("with its id: read %d, deleted %d", read, deleted)
		}
		wantHeld(t, flows)
	})
}
