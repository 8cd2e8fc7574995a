package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// A manyClients are the addresses that many clients of one family have, all of them at the outside client.
type manyClients struct {
	host  *harness.Host
	addrs []netip.Addr
}

// newManyClients gives the outside client addresses, and node1 a route to them.
func newManyClients(t *testing.T, w *harness.World, family, size int) *manyClients {
	t.Helper()
	all, bits := netip.MustParsePrefix("203.0.114.0/24"), "/32"
	if family == 6 {
		all, bits = netip.MustParsePrefix("2001:db8:d::/64"), "/128"
	}
	c := &manyClients{host: w.Client}
	run := func(h *harness.Host, args ...string) {
		t.Helper()
		if _, err := h.Output("ip", args...); err != nil {
			t.Fatal(err)
		}
	}
	run(w.Node1().Host, "route", "add", all.String(), "dev", "eth0")
	addr := all.Addr()
	for range size {
		addr = addr.Next()
		c.addrs = append(c.addrs, addr)
		add := []string{"address", "add", addr.String() + bits, "dev", "eth0"}
		if family == 6 {
			add = append(add, "nodad")
		}
		run(w.Client, add...)
	}
	return c
}

// ask has each client make one TCP connection, and returns by which server it was answered; the error says who was not.
func (c *manyClients) ask(to netip.AddrPort) (map[netip.Addr]string, error) {
	out := map[netip.Addr]string{}
	var failed []string
	for _, from := range c.addrs {
		var answer harness.Answer
		err := c.host.Do(func() error {
			d := net.Dialer{Timeout: harness.Brief, LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
			conn, err := d.Dial("tcp", to.String())
			if err != nil {
				return err
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(harness.Patient))
			answer = harness.Greeting(bufio.NewReader(conn))
			return answer.Err
		})
		if err != nil {
			failed = append(failed, fmt.Sprintf("%s: %v", from, err))
			continue
		}
		out[from] = answer.Server
	}
	if len(failed) > 0 {
		return out, fmt.Errorf("%d of %d clients of %s are not served, such as %s", len(failed), len(c.addrs), to, failed[0])
	}
	return out, nil
}

// TestIPVSDrainHashed: where a hash chooses the endpoint, no client is refused while one of the endpoints drains, the clients of the
// others stay with them, and connections to the one that drains go on. So it is at node ports with ClientIP affinity, and with
// the schedulers sh, mh and dh.
func TestIPVSDrainHashed(t *testing.T) {
	const clients = 24
	scheduler := func(name string) func(*v1.Service) {
		return func(s *v1.Service) { s.Annotations = map[string]string{"nodeproxy.io/ipvs-scheduler": name} }
	}
	cases := []struct {
		name    string
		change  func(*v1.Service)
		port    bool // of the node
		anybody bool // clients of other endpoints may move
	}{
		{"affinity", func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }, true, false},
		{"sh", scheduler("sh"), false, false},
		{"mh", scheduler("mh"), false, false},
		{"dh", scheduler("dh"), false, true},
	}
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		ready := w.Ready("n1a", "n2a", "n2b", "n3a")
		write := func(leaves string) {
			for i, c := range cases {
				endpoints := append([]harness.Endpoint(nil), ready...)
				for j := range endpoints {
					if endpoints[j].Name == leaves {
						endpoints[j].Conditions = discovery.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(false)}
					}
				}
				w.Write(t, c.name+".yaml", harness.Objects(harness.Service(c.name, i+1, c.change), endpoints...)...)
			}
		}
		write("")
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			many := newManyClients(t, w, family, clients)
			for i, c := range cases {
				to := clusterIP(i+1, family)
				if c.port {
					to = nodePort(w.Node1().IP(family), i+1)
				}
				// The endpoint that drained in the case before may not be back yet in this Service.
				eventually(t, c.name+": all endpoints", func() error {
					at := clusterIP(i+1, family)
					for _, ep := range ready {
						if got := realServer(t, w, at, w.Pod(ep.Name)); got != "-w 1" {
							return fmt.Errorf("%s of %s has %q", ep.Name, at, got)
						}
					}
					return nil
				})
				before, err := many.ask(to)
				require.NoError(t, err, "%s, before", c.name)
				open, err := w.Client.Converse(to)
				require.NoError(t, err)
				t.Cleanup(open.Close)
				leaves := open.With.Server
				write(leaves)
				eventually(t, c.name+": drains", func() error {
					at := clusterIP(i+1, family)
					if got := realServer(t, w, at, w.Pod(leaves)); got == "-w 1" {
						return fmt.Errorf("%s of %s has %q", leaves, at, got)
					}
					return nil
				})
				after, err := many.ask(to)
				assert.NoError(t, err, "%s, while %s drains", c.name, leaves)
				moved, wrong := 0, 0
				for from, server := range after {
					if server == leaves {
						wrong++
					}
					if before[from] != leaves && server != before[from] {
						moved++
					}
				}
				if wrong > 0 || moved > 0 && !c.anybody {
					t.Errorf("%s: while %s drains, %d clients get there; of others, %d move", c.name, leaves, wrong, moved)
				}
				assert.NoError(t, open.Echo("line"), "%s, a connection to the endpoint that drains", c.name)
				write("")
				eventually(t, c.name+": as before", func() error {
					again, err := many.ask(to)
					for from, server := range again {
						if err == nil && server != before[from] {
							err = fmt.Errorf("client %s gets %s, and got %s before", from, server, before[from])
						}
					}
					return err
				})
				assert.NoError(t, open.Echo("line"), "%s, a connection to the endpoint that is back", c.name)
			}
		}
	})
}
