package harness

import (
	"errors"
	"net"
	"net/netip"
	"testing"
)

// Swarm is a pod that answers at every address of a range of each family, in place of as many pods. Its server's name is
// the address at which the client reached it.
type Swarm struct {
	*Pod
	Range4, Range6 netip.Prefix
}

// Addr returns the i-th address of a family, for i from 0 to 65533.
func (s *Swarm) Addr(family, i int) netip.Addr { return nth(pick(family, s.Range4, s.Range6), 1+i) }

// AddSwarm makes a Swarm on node1 that serves TCP on a port.
func (w *World) AddSwarm(t testing.TB, port uint16) *Swarm {
	t.Helper()
	p := w.AddPod(t, w.Node1(), "swarm", "10.250.255.254")
	s := &Swarm{Pod: p, Range4: netip.MustParsePrefix("10.251.0.0/16"), Range6: netip.MustParsePrefix("fd00:10:251::/112")}
	if err := errors.Join(p.Take(s.Range4), p.Take(s.Range6)); err != nil {
		t.Fatalf("harness: addresses of the swarm: %v", err)
	}
	l, err := In(p.Netns, func() (*net.TCPListener, error) { return net.ListenTCP("tcp", &net.TCPAddr{Port: int(port)}) })
	if err != nil {
		t.Fatalf("harness: server of the swarm: %v", err)
	}
	w.serve(l, func(c *net.TCPConn) string { return c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().String() }, port)
	return s
}
