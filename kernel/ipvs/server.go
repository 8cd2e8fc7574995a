// Package ipvs reads and changes the virtual servers of IPVS. It makes no decisions.
//
// It talks netlink, on a socket that belongs to the network namespace of the thread that opened it, and stays in it. Several
// goroutines may use Servers at once; their requests wait for one another. Adding what exists changes it, and removing what is gone
// is no error, so whatever was interrupted can be done again.
package ipvs

import (
	"fmt"
	"net/netip"
	"time"

	"nodeproxy/plan"
)

// ServerID identifies a virtual server: by address, protocol and port, or, if Mark is not 0, by the firewall mark of packets of one
// family.
type ServerID struct {
	Protocol plan.Protocol
	Addr     netip.Addr
	Mark     uint32
	Port     uint16
	Family   plan.Family
}

// String is "TCP 10.96.0.1:443", or "FWM 0x90007530 IPv4".
func (id ServerID) String() string {
	if id.Mark != 0 {
		return fmt.Sprintf("FWM %#x %s", id.Mark, id.Family)
	}
	return fmt.Sprintf("%s %s", id.Protocol, netip.AddrPortFrom(id.Addr, id.Port))
}

// Server is a virtual server ("service" in the kernel's terms) without its real servers.
type Server struct {
	ID        ServerID
	Scheduler string
	// Ports and Fallback are the flags of the schedulers sh and mh: Ports makes them hash the source port too; Fallback makes them
	// select another real server if the selected one has weight 0.
	Ports, Fallback bool
	// Persistence is how long a client stays with its real server, in whole seconds; 0 turns persistence off. A client is one
	// address.
	Persistence time.Duration
}

// RealServer is a real server. Packets to it are always translated (IPVS's "masquerading", ipvsadm -m).
type RealServer struct {
	Addr netip.AddrPort
	// With weight 0, it gets no new connections.
	Weight uint32
}

// Connections counts the connections of a real server. Active ones are established; inactive ones are all others that the kernel
// still knows, so a UDP flow counts as inactive. Persistent ones are the templates by which clients return.
type Connections struct{ Active, Inactive, Persistent uint32 }

// ActualRealServer is a real server as the kernel has it.
type ActualRealServer struct {
	RealServer
	Connections
}

// ActualServer is a virtual server as the kernel has it.
type ActualServer struct {
	Server
	// Foreign is true if it, or one of its real servers, has a property that this package never sets, such as another forwarding
	// method. To correct it, delete it and add it again.
	Foreign     bool
	RealServers map[netip.AddrPort]ActualRealServer
}

// Traffic counts the traffic of a virtual server since it was made. The kernel updates it every two seconds.
type Traffic struct{ Connections, PacketsIn, PacketsOut, BytesIn, BytesOut uint64 }
