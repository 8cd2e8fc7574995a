package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// The generic netlink interface of IPVS, from linux/ip_vs.h. moby/ipvs has the same, but keeps most of it to itself.
const (
	commandNewService = 1 + iota
	commandSetService
	commandDelService
	commandGetService
	commandNewDest
	commandSetDest
	commandDelDest
	commandGetDest
	commandGetConfig = 13
)

const (
	attrService = 1
	attrDest    = 2
)

const (
	serviceFamily = 1 + iota
	serviceProtocol
	serviceAddr
	servicePort
	serviceMark
	serviceScheduler
	serviceFlags
	serviceTimeout
	serviceNetmask
	serviceStats
	servicePersistenceEngine
	serviceStats64
)

const (
	destAddr = 1 + iota
	destPort
	destForwarding
	destWeight
	destUpperThreshold
	destLowerThreshold
	destActive
	destInactive
	destPersistent
	destStats
	destFamily
)

const (
	statsConnections = 1 + iota
	statsPacketsIn
	statsPacketsOut
	statsBytesIn
	statsBytesOut
)

// Flags of a service. The schedulers sh and mh agree on the meaning of theirs.
const (
	flagPersistent = 0x1
	flagHashed     = 0x2 // set by the kernel for all
	flagFallback   = 0x8
	flagPorts      = 0x10
)

var protocolNumbers = map[plan.Protocol]uint8{
	plan.TCP: unix.IPPROTO_TCP, plan.UDP: unix.IPPROTO_UDP, plan.SCTP: unix.IPPROTO_SCTP,
}

var protocolNames = map[uint8]plan.Protocol{
	unix.IPPROTO_TCP: plan.TCP, unix.IPPROTO_UDP: plan.UDP, unix.IPPROTO_SCTP: plan.SCTP,
}

func addressFamily(f plan.Family) uint16 {
	if f == plan.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// netmask is what the kernel wants for clients of one address each: a mask for IPv4, a length for IPv6.
func netmask(f plan.Family) uint32 {
	if f == plan.IPv6 {
		return 128
	}
	return 0xffffffff
}

// genl begins the body of a message: command, version and two bytes without use.
func genl(command uint8) []byte { return []byte{command, 1, 0, 0} }

const genlHeader = 4

// appendServiceID appends the attributes that name a virtual server.
func appendServiceID(b []byte, id ServerID) []byte {
	b = attribute16(b, serviceFamily, addressFamily(id.Family))
	if id.Mark != 0 {
		return attribute32(b, serviceMark, id.Mark)
	}
	b = attribute16(b, serviceProtocol, uint16(protocolNumbers[id.Protocol]))
	b = attribute(b, serviceAddr, id.Addr.AsSlice()...)
	return attribute(b, servicePort, binary.BigEndian.AppendUint16(nil, id.Port)...)
}

func appendService(b []byte, s Server) []byte {
	b = appendServiceID(b, s.ID)
	b = attributeText(b, serviceScheduler, s.Scheduler)
	var flags uint32
	if s.Persistence > 0 {
		flags |= flagPersistent
	}
	if s.Ports {
		flags |= flagPorts
	}
	if s.Fallback {
		flags |= flagFallback
	}
	b = attribute(b, serviceFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, flags), 0xffffffff)...)
	b = attribute32(b, serviceTimeout, seconds(s.Persistence))
	return attribute32(b, serviceNetmask, netmask(s.ID.Family))
}

// seconds rounds up, so that what is not 0 is not turned off.
func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) }

func appendDestination(b []byte, d Destination) []byte {
	b = appendDestinationID(b, d.Addr)
	b = attribute32(b, destForwarding, ipvs.ConnectionFlagMasq)
	b = attribute32(b, destWeight, d.Weight)
	b = attribute32(b, destUpperThreshold, 0)
	return attribute32(b, destLowerThreshold, 0)
}

func appendDestinationID(b []byte, a netip.AddrPort) []byte {
	b = attribute(b, destAddr, a.Addr().AsSlice()...)
	b = attribute(b, destPort, binary.BigEndian.AppendUint16(nil, a.Port())...)
	return attribute16(b, destFamily, addressFamily(plan.FamilyOf(a.Addr())))
}

// parseService reads a virtual server and its traffic from the body of a message.
func parseService(body []byte) (*HeldServer, Traffic, error) {
	s := &HeldServer{Destinations: map[netip.AddrPort]HeldDestination{}}
	var traffic Traffic
	var addr []byte
	var mask uint32
	exact, persistent := false, false
	for kind, value := range attributes(inside(body, attrService)) {
		switch kind {
		case serviceFamily:
			s.ID.Family = plan.IPv4
			if number(value) == unix.AF_INET6 {
				s.ID.Family = plan.IPv6
			}
		case serviceProtocol:
			s.ID.Protocol = protocolNames[uint8(number(value))]
		case serviceAddr:
			addr = value
		case servicePort:
			s.ID.Port = uint16(bigEndian(value))
		case serviceMark:
			s.ID.Mark = uint32(number(value))
		case serviceScheduler:
			s.Scheduler = text(value)
		case serviceFlags:
			flags := number(value[:min(4, len(value))])
			s.Ports, s.Fallback = flags&flagPorts != 0, flags&flagFallback != 0
			persistent = flags&flagPersistent != 0
			s.Foreign = s.Foreign || flags&^(flagPersistent|flagHashed|flagPorts|flagFallback) != 0
		case serviceTimeout:
			s.Persistence = time.Duration(number(value)) * time.Second
		case serviceNetmask:
			mask = uint32(number(value))
		case servicePersistenceEngine:
			s.Foreign = true
		case serviceStats:
			if !exact {
				traffic = parseTraffic(value)
			}
		case serviceStats64: // since Linux 4.1; the other one counts connections and packets in 32 bits
			traffic, exact = parseTraffic(value), true
		}
	}
	if !persistent {
		s.Persistence = 0
	}
	s.Foreign = s.Foreign || mask != netmask(s.ID.Family)
	if s.ID.Mark != 0 {
		s.ID.Protocol, s.ID.Port = "", 0
		return s, traffic, nil
	}
	var err error
	if s.ID.Addr, err = address(addr, s.ID.Family.Bits()); err != nil {
		return nil, traffic, fmt.Errorf("virtual server: %w", err)
	}
	return s, traffic, nil
}

// inside is the value of one attribute in the body of a message.
func inside(body []byte, want uint16) []byte {
	for kind, value := range attributes(body[min(genlHeader, len(body)):]) {
		if kind == want {
			return value
		}
	}
	return nil
}

func parseTraffic(b []byte) Traffic {
	var t Traffic
	for kind, value := range attributes(b) {
		switch kind {
		case statsConnections:
			t.Connections = number(value)
		case statsPacketsIn:
			t.PacketsIn = number(value)
		case statsPacketsOut:
			t.PacketsOut = number(value)
		case statsBytesIn:
			t.BytesIn = number(value)
		case statsBytesOut:
			t.BytesOut = number(value)
		}
	}
	return t
}

// parseDestination reads a destination of a virtual server of a family. It is foreign if we would not have made it so.
func parseDestination(body []byte, family plan.Family) (d HeldDestination, foreign bool, err error) {
	var addr []byte
	var port uint16
	for kind, value := range attributes(inside(body, attrDest)) {
		n := uint32(number(value))
		switch kind {
		case destAddr:
			addr = value
		case destPort:
			port = uint16(bigEndian(value))
		case destFamily:
			if n == unix.AF_INET { // IPv4 behind IPv6 goes with tunnels only
				family = plan.IPv4
			}
		case destForwarding:
			foreign = foreign || n&ipvs.ConnectionFlagFwdMask != ipvs.ConnectionFlagMasq
		case destUpperThreshold, destLowerThreshold:
			foreign = foreign || n != 0
		case destWeight:
			d.Weight = n
		case destActive:
			d.Active = n
		case destInactive:
			d.Inactive = n
		case destPersistent:
			d.Persistent = n
		}
	}
	a, err := address(addr, family.Bits())
	if err != nil {
		return d, false, fmt.Errorf("destination: %w", err)
	}
	d.Addr = netip.AddrPortFrom(a, port)
	return d, foreign, nil
}
