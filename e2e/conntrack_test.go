package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"nodeproxy/e2e/harness"
)

// A talker is a UDP client that goes on sending from one port, many times a second, whatever happens.
type talker struct {
	name string
	conn net.Conn

	mu   sync.Mutex
	said []string // what each packet led to since the last reset: the server's name, refused, or silence
}

const (
	// talkPause is the time from one packet of a talker to the next.
	talkPause = 10 * time.Millisecond
	// talkPatience is how long it waits for an answer before it sends the next.
	talkPatience = 100 * time.Millisecond

	refused = "refused"
	silence = "silence"
)

// talk starts a talker that ends with the test.
func talk(t *testing.T, from *harness.Host, to netip.AddrPort) *talker {
	t.Helper()
	conn, err := from.Dial("udp", to, time.Now().Add(time.Hour))
	require.NoError(t, err)
	k := &talker{name: fmt.Sprintf("%s to %s", from.Name, to), conn: conn}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2048)
		for {
			what := k.exchange(buf)
			if what == "" {
				return
			}
			k.mu.Lock()
			k.said = append(k.said, what)
			k.mu.Unlock()
			time.Sleep(talkPause) // between two packets
		}
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return k
}

// exchange sends one packet and says what it led to; nothing once the socket is closed.
func (k *talker) exchange(buf []byte) string {
	if _, err := k.conn.Write([]byte("?\n")); errors.Is(err, net.ErrClosed) {
		return ""
	}
	if err := k.conn.SetReadDeadline(time.Now().Add(talkPatience)); err != nil {
		return ""
	}
	n, err := k.conn.Read(buf)
	switch {
	case err == nil:
		name, _, _ := strings.Cut(string(buf[:n]), " ")
		return name
	case errors.Is(err, net.ErrClosed):
		return ""
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	}
	return silence
}

// hears returns a check that the last few packets all led to one of these.
func (k *talker) hears(want ...string) func() error {
	const few = 5
	return func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		if len(k.said) < few {
			return fmt.Errorf("%s: %d packets so far", k.name, len(k.said))
		}
		last := k.said[len(k.said)-few:]
		for _, s := range last {
			if !slices.Contains(want, s) {
				return fmt.Errorf("%s: %v, want %v", k.name, last, want)
			}
		}
		return nil
	}
}

// forget forgets what was heard so far.
func (k *talker) forget() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.said = nil
}

// heard counts what was heard since forget. Silence is left out: on a busy machine an answer may come late.
func (k *talker) heard() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[string]int{}
	for _, s := range k.said {
		if s != silence {
			out[s]++
		}
	}
	return out
}

// talkers starts one talker for each frontend of Service 1, from the outside client and from a pod.
func talkers(t *testing.T, w *harness.World) []*talker {
	t.Helper()
	var out []*talker
	for _, family := range families {
		for _, to := range frontends(w, 1, family) {
			out = append(out, talk(t, w.Client, to), talk(t, w.Pod("n1c").Host, to))
		}
	}
	return out
}

// allHear waits until all talkers hear nothing but one of these.
func allHear(t *testing.T, what string, all []*talker, want ...string) {
	t.Helper()
	var took time.Duration
	for _, k := range all {
		took += eventually(t, what, k.hears(want...))
	}
	t.Logf("%s took effect for all clients after %v", what, took.Round(time.Millisecond))
}

// TestUDPClientsFollowEndpoints: UDP clients that keep their port, and never pause, follow each change of endpoints: to
// another one, to none (kubernetes/kubernetes#139628), back to one, and from before the Service existed.
func TestUDPClientsFollowEndpoints(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		set := func(pods ...string) { w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pods...)...)...) }
		w.Run(t, variant, clusterCIDR)
		all := talkers(t, w)
		allHear(t, "no Service", all, silence, refused) // a node port's packets reach the node itself, which refuses them
		set("n1a")
		allHear(t, "the Service's creation", all, "n1a")
		set("n2a")
		allHear(t, "another endpoint", all, "n2a")
		set("n2a", "n3a")
		set("n3a")
		allHear(t, "a third endpoint", all, "n3a")
		set()
		allHear(t, "scaling to zero", all, refused)
		set("n2a")
		allHear(t, "scaling from zero", all, "n2a")
	})
}

// TestUDPEndpointReturns: UDP clients come back to an endpoint that has left for a moment, however often that happens, though
// answers of its are on their way when it leaves.
func TestUDPEndpointReturns(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		set := func(pods ...string) { w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pods...)...)...) }
		set("n2a")
		w.Run(t, variant, clusterCIDR)
		all := talkers(t, w)
		allHear(t, "the start", all, "n2a")
		for range 8 {
			set("n3a")
			allHear(t, "another endpoint", all, "n3a")
			set()
			allHear(t, "scaling to zero", all, refused)
			set("n2a")
			allHear(t, "scaling from zero", all, "n2a")
		}
	})
}

// TestUDPServiceRecreated: when a Service is deleted, its UDP clients no longer reach its endpoint; when it is made anew,
// with the same addresses and another endpoint, they reach that one (kubernetes/kubernetes#141371).
func TestUDPServiceRecreated(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		w.Run(t, variant, clusterCIDR)
		all := talkers(t, w)
		allHear(t, "the start", all, "n1a")
		w.Remove(t, "s.yaml")
		allHear(t, "deletion", all, silence, refused)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n2a")...)...)
		allHear(t, "recreation", all, "n2a")
	})
}

// TestUDPServiceDeletedWhileDown: of what changed while no proxy ran, the next one removes the flows at its start: to an
// endpoint that was replaced, and to the cluster IP of a Service that was deleted.
func TestUDPServiceDeletedWhileDown(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		kept, deleted := harness.Service("kept", 1), harness.Service("deleted", 2)
		w.Write(t, "kept.yaml", harness.Objects(kept, w.Ready("n1a")...)...)
		w.Write(t, "deleted.yaml", harness.Objects(deleted, w.Ready("n1a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		all := talkers(t, w)
		var toDeleted []*talker
		for _, family := range families {
			toDeleted = append(toDeleted, talk(t, w.Client, clusterIP(2, family)))
		}
		allHear(t, "the start", slices.Concat(all, toDeleted), "n1a")
		require.NoError(t, d.Stop())
		w.Remove(t, "deleted.yaml")
		w.Write(t, "kept.yaml", harness.Objects(kept, w.Ready("n2a")...)...)
		time.Sleep(200 * time.Millisecond) // The objects change while no proxy runs: nothing is to happen.
		allHear(t, "no proxy", slices.Concat(all, toDeleted), "n1a")
		w.Run(t, variant, clusterCIDR)
		allHear(t, "an endpoint replaced before the start", all, "n2a")
		allHear(t, "a Service deleted before the start", toDeleted, silence)
	})
}

// TestUDPFlowsStay: a flow stays with an endpoint that is terminating but still serves, with one that policy Local leaves
// out from now on, and with any while the daemon restarts; new flows go where they should.
func TestUDPFlowsStay(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n2a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		all := talkers(t, w)
		allHear(t, "the start", all, "n2a")
		for _, k := range all {
			k.forget()
		}
		stay := func(what string) {
			t.Helper()
			time.Sleep(300 * time.Millisecond) // The flows are to go on as they do, and there is no sign of that.
			for _, k := range all {
				eventually(t, what, k.hears("n2a"))
				heard := k.heard()
				if delete(heard, "n2a"); len(heard) > 0 {
					t.Errorf("%s: %s heard also %v", what, k.name, heard)
				}
			}
		}
		w.Write(t, "s.yaml", harness.Objects(s, append(w.Ready("n1a"), w.Terminating("n2a")...)...)...)
		for _, family := range families {
			eventually(t, "new flows", func() error { return serversOf(w.Client, "udp", clusterIP(1, family), "n1a") })
		}
		stay("terminating but serving")
		require.NoError(t, d.Stop())
		w.Run(t, variant, clusterCIDR)
		stay("restart")
		local := harness.Service("s", 1, harness.Policies("Local", "Local"))
		w.Write(t, "s.yaml", harness.Objects(local, w.Ready("n1a", "n2a")...)...)
		for _, family := range families {
			eventually(t, "new flows", func() error { return serversOf(w.Client, "udp", clusterIP(1, family), "n1a") })
		}
		stay("policy Local")
		w.Write(t, "s.yaml", harness.Objects(local, w.Ready("n1a")...)...)
		allHear(t, "the end of the endpoint", all, "n1a")
	})
}

// TestUDPFlowToNodePortNumberElsewhere: a pod's UDP flow to a host outside, on the number of a node port, is not touched
// when that node port's endpoints change (kubernetes/kubernetes#49881). The node masquerades such flows here, to a random
// port each, so a flow that was removed shows as another source port.
func TestUDPFlowToNodePortNumberElsewhere(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		set := func(pods ...string) { w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pods...)...)...) }
		set("n1a")
		w.Run(t, variant, clusterCIDR)
		pod := w.Pod("n1c")
		number := harness.AddressesOf(1).NodePort
		for i, tool := range []string{"iptables", "ip6tables"} {
			_, err := w.Node1().Output(variant.Tool(tool), "-w", "-t", "nat", "-A", "POSTROUTING", "-p", "udp",
				"-s", pod.IP(families[i]).String(), "-d", w.Client.IP(families[i]).String(), "-j", "MASQUERADE", "--random-fully")
			require.NoError(t, err)
		}
		for _, family := range families {
			to := netip.AddrPortFrom(w.Client.IP(family), number)
			serveSourcePort(t, w.Client.Netns, to)
			outside, ours := talk(t, pod.Host, to), talk(t, pod.Host, nodePort(w.Node1().IP(family), 1))
			eventually(t, "the flow outside", func() error {
				if len(outside.heard()) == 0 {
					return fmt.Errorf("%s heard nothing", outside.name)
				}
				return nil
			})
			for _, pods := range [][]string{{"n2a"}, {}, {"n1a"}, {"n1a", "n2a"}, {"n2a"}} {
				set(pods...)
				if len(pods) == 0 {
					pods = []string{refused}
				}
				eventually(t, "node port", ours.hears(pods...))
			}
			if got := outside.heard(); len(got) != 1 {
				t.Errorf("%s came from several ports, so its flow was removed: %v", outside.name, got)
			}
		}
	})
}

// serveSourcePort answers UDP packets with the port that they come from, until the test ends.
func serveSourcePort(t *testing.T, n *harness.Netns, at netip.AddrPort) {
	t.Helper()
	var c *net.UDPConn
	err := n.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 2048)
		for {
			_, from, err := c.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = c.WriteToUDPAddrPort(fmt.Appendf(nil, "port%d \n", from.Port()), from)
			}
		}
	}()
}

// TestSCTPFlows: SCTP flows to an endpoint that is gone are removed, and those to one in use are not. This is about the
// kernel's entries alone, since few kernels have SCTP sockets.
func TestSCTPFlows(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1, func(s *v1.Service) {
			s.Spec.Ports = []v1.ServicePort{{Name: "sctp", Protocol: v1.ProtocolSCTP, Port: harness.ServicePort,
				TargetPort: intstr.FromInt32(8080), NodePort: int32(harness.AddressesOf(1).NodePort)}}
		})
		set := func(pods ...string) { w.Write(t, "s.yaml", harness.Objects(s, w.Ready(pods...)...)...) }
		set("n1a", "n2a")
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			for i, to := range frontends(w, 1, family) {
				for j, pod := range []string{"n1a", "n2a"} {
					track(t, w, syscall.IPPROTO_SCTP, uint16(1000+10*i+j), to, netip.AddrPortFrom(w.Pod(pod).IP(family), 8080))
				}
			}
		}
		tracked := func(family int) map[string]int {
			out := map[string]int{}
			flows, err := w.Node1().Netlink().ConntrackTableList(netlink.ConntrackTable, netlinkFamily(family))
			require.NoError(t, err)
			for _, f := range flows {
				if f.Forward.Protocol == syscall.IPPROTO_SCTP {
					out[f.Reverse.SrcIP.String()]++
				}
			}
			return out
		}
		left := func(want map[string]int) {
			t.Helper()
			for _, family := range families {
				byAddr := map[string]int{}
				for pod, n := range want {
					byAddr[w.Pod(pod).IP(family).String()] = n
				}
				eventually(t, "SCTP flows", func() error {
					if got := tracked(family); fmt.Sprint(got) != fmt.Sprint(byAddr) {
						return fmt.Errorf("by endpoint: %v, want %v", got, byAddr)
					}
					return nil
				})
			}
		}
		left(map[string]int{"n1a": 4, "n2a": 4})
		set("n2a")
		left(map[string]int{"n2a": 4})
		set()
		left(nil)
	})
}

func netlinkFamily(family int) netlink.InetFamily {
	if family == 6 {
		return syscall.AF_INET6
	}
	return syscall.AF_INET
}

// track makes node1's kernel track a flow of the outside client, from a port of its.
func track(t *testing.T, w *harness.World, protocol uint8, port uint16, to, endpoint netip.AddrPort) {
	t.Helper()
	family := 4
	if to.Addr().Is6() {
		family = 6
	}
	client := w.Client.IP(family).AsSlice()
	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(netlinkFamily(family)),
		Forward: netlink.IPTuple{SrcIP: client, DstIP: to.Addr().AsSlice(), SrcPort: port, DstPort: to.Port(),
			Protocol: protocol},
		Reverse: netlink.IPTuple{SrcIP: endpoint.Addr().AsSlice(), DstIP: client, SrcPort: endpoint.Port(), DstPort: port,
			Protocol: protocol},
		TimeOut: 600,
	}
	if err := w.Node1().Netlink().ConntrackCreate(netlink.ConntrackTable, netlinkFamily(family), flow); err != nil {
		t.Fatalf("tracking a flow of protocol %d to %s: %v", protocol, to, err)
	}
}
