package packetsim

import (
	"net/netip"
	"slices"
)

// ServerKey identifies a virtual server: a firewall mark, or a protocol, an address and a port. Port 0 stands for every port.
type ServerKey struct {
	Mark     uint32
	Protocol string
	Addr     netip.AddrPort
}

// Text is what names a virtual server or a real server in an Outcome's Steps.
type Text string

func (t Text) String() string { return string(t) }

// Server is a virtual server of IPVS.
type Server struct {
	Text        Text
	Scheduler   string
	RealServers []RealServer
}

// RealServer is a real server. One with weight 0 gets no new connections.
type RealServer struct {
	Text   Text
	Addr   netip.AddrPort // port 0 keeps the packet's
	Weight int
}

// unweighted are the schedulers that treat all real servers alike, except those of weight 0.
var unweighted = []string{"rr", "lc", "dh"}

// share returns a real server's relative share of new connections.
func (s *Server) share(r RealServer) int {
	if slices.Contains(unweighted, s.Scheduler) {
		return min(r.Weight, 1)
	}
	return r.Weight
}

// serverOf returns the virtual server that a packet meets, or nil. One for the packet's mark goes first; the mark must be
// the server's in all of its bits.
func (m *Machine) serverOf(p *Packet) *Server {
	if p.Mark != 0 {
		if s := m.Servers[ServerKey{Mark: p.Mark}]; s != nil {
			return s
		}
	}
	if s := m.Servers[ServerKey{Protocol: p.Protocol, Addr: netip.AddrPortFrom(p.Dst, p.Port)}]; s != nil {
		return s
	}
	return m.Servers[ServerKey{Protocol: p.Protocol, Addr: netip.AddrPortFrom(p.Dst, 0)}]
}

// schedule does with a packet what IPVS does, and adds what comes of that to out: if the packet meets a virtual server, each real server is a
// way to go on. A packet for another machine starts again at hook OUTPUT with its new destination; one for this machine stays where it is.
func (m *Machine) schedule(out []way, w way) []way {
	if w.Virtual.IsValid() {
		return append(out, w) // IPVS has had it.
	}
	s := m.serverOf(&w.Packet)
	if s == nil {
		return append(out, w)
	}
	w.rules = &step{Step{Hook: w.Hook, Table: "ipvs", Rule: s.Text}, w.rules}
	total := 0
	for _, r := range s.RealServers {
		total += s.share(r)
	}
	if total == 0 {
		w.end = Reject
		return append(out, w)
	}
	for _, r := range s.RealServers {
		if s.share(r) == 0 {
			continue
		}
		to := w
		to.probability *= float64(s.share(r)) / float64(total)
		to.rules = &step{Step{Hook: w.Hook, Table: "ipvs", Rule: r.Text}, to.rules}
		to.send(r.Addr)
		out = append(out, to)
	}
	return out
}

// send sends a packet to a real server. The kernel lets no loopback address out of the machine, and nothing from outside reaches
// one.
func (w *way) send(to netip.AddrPort) {
	here := w.Local(to.Addr())
	if !here && w.Src.IsLoopback() || here && to.Addr().IsLoopback() && w.Hook == Input && w.In != "lo" {
		w.end = Drop
		return
	}
	w.Virtual = netip.AddrPortFrom(w.Dst, w.Port)
	w.Translate(to)
	w.leaves = !here
}
