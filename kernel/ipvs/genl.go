package ipvs

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// The generic netlink interface of IPVS, as in linux/ip_vs.h.
const (
	commandNewService = 1 + iota
	commandSetService
	commandDelService
	commandGetService
	commandNewDest
	commandSetDest
	commandDelDest
	commandGetDest
	commandSetConfig = 12
	commandGetConfig = 13
)

const (
	attrService       = 1
	attrDest          = 2
	attrTimeoutTCP    = 4
	attrTimeoutTCPFin = 5
	attrTimeoutUDP    = 6
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

// The method by which packets reach a real server is in some of the bits of a number.
const (
	forwardMask       = 0x7
	forwardMasquerade = 0x0
)

// Flags of a service. The schedulers sh and mh agree on the meaning of theirs.
const (
	flagPersistent = 0x1
	flagHashed     = 0x2 // set by the kernel for all
	flagFallback   = 0x8
	flagPorts      = 0x10
)

// netmask is the kernel's form for clients of one address each: a mask for IPv4, a length for IPv6.
func netmask(f plan.Family) uint32 {
	if f == plan.IPv6 {
		return 128
	}
	return 0xffffffff
}

// genl begins the body of a message: command, version and two bytes without use.
func genl(command uint8) netlink.Buffer { return netlink.Buffer{command, 1, 0, 0} }

const genlHeader = 4

// appendServiceID appends the attributes that name a virtual server.
func appendServiceID(b netlink.Buffer, id ServerID) netlink.Buffer {
	b = b.Uint16(serviceFamily, uint16(netlink.Family(id.Family)))
	if id.Mark != 0 {
		return b.Uint32(serviceMark, id.Mark)
	}
	b = b.Uint16(serviceProtocol, uint16(netlink.Protocol(id.Protocol)))
	b = b.Addr(serviceAddr, id.Addr)
	return b.BigEndian16(servicePort, id.Port)
}

func appendService(b netlink.Buffer, s Server) netlink.Buffer {
	b = appendServiceID(b, s.ID)
	b = b.Text(serviceScheduler, s.Scheduler)
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
	flagsAndMask := [8]byte{4: 0xff, 0xff, 0xff, 0xff}
	binary.NativeEndian.PutUint32(flagsAndMask[:], flags)
	b = b.Bytes(serviceFlags, flagsAndMask[:]...)
	b = b.Uint32(serviceTimeout, seconds(s.Persistence))
	return b.Uint32(serviceNetmask, netmask(s.ID.Family))
}

// seconds rounds up, so that a small value does not become 0, which means off.
func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) }

func appendRealServer(b netlink.Buffer, d RealServer) netlink.Buffer {
	b = appendRealServerID(b, d.Addr)
	b = b.Uint32(destForwarding, forwardMasquerade)
	b = b.Uint32(destWeight, d.Weight)
	b = b.Uint32(destUpperThreshold, 0)
	return b.Uint32(destLowerThreshold, 0)
}

func appendRealServerID(b netlink.Buffer, a netip.AddrPort) netlink.Buffer {
	b = b.Addr(destAddr, a.Addr())
	b = b.BigEndian16(destPort, a.Port())
	return b.Uint16(destFamily, uint16(netlink.Family(plan.FamilyOf(a.Addr()))))
}

// parseService reads a virtual server, without its real servers, and its traffic from the body of a message.
func parseService(body []byte) (s ActualServer, traffic Traffic, err error) {
	var addr []byte
	var mask uint32
	exact, persistent := false, false
	for kind, value := range netlink.Attributes(inside(body, attrService)) {
		switch kind {
		case serviceFamily:
			s.ID.Family = plan.IPv4
			if netlink.Number(value) == unix.AF_INET6 {
				s.ID.Family = plan.IPv6
			}
		case serviceProtocol:
			s.ID.Protocol = netlink.ProtocolOf(uint8(netlink.Number(value)))
		case serviceAddr:
			addr = value
		case servicePort:
			s.ID.Port = uint16(netlink.BigEndian(value))
		case serviceMark:
			s.ID.Mark = uint32(netlink.Number(value))
		case serviceScheduler:
			s.Scheduler = schedulerName(value)
		case serviceFlags:
			flags := netlink.Number(value[:min(4, len(value))])
			s.Ports, s.Fallback = flags&flagPorts != 0, flags&flagFallback != 0
			persistent = flags&flagPersistent != 0
			s.Foreign = s.Foreign || flags&^(flagPersistent|flagHashed|flagPorts|flagFallback) != 0
		case serviceTimeout:
			s.Persistence = time.Duration(netlink.Number(value)) * time.Second
		case serviceNetmask:
			mask = uint32(netlink.Number(value))
		case servicePersistenceEngine:
			s.Foreign = true
		case serviceStats:
			if !exact {
				traffic = parseTraffic(value)
			}
		case serviceStats64: // since Linux 4.1; the older attribute has 32 bits for connections and packets
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
	if s.ID.Addr, err = netlink.Addr(addr, s.ID.Family); err != nil {
		return s, traffic, fmt.Errorf("virtual server: %w", err)
	}
	return s, traffic, nil
}

// schedulerName is a text, which is the same string for all virtual servers with one of the kernel's own schedulers.
func schedulerName(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	for _, name := range plan.Schedulers {
		if name == string(b) {
			return name
		}
	}
	return string(b)
}

// inside returns the value of an attribute in the body of a message.
func inside(body []byte, kind uint16) []byte {
	return netlink.Attribute(body[min(genlHeader, len(body)):], kind)
}

func parseTraffic(b []byte) Traffic {
	var t Traffic
	for kind, value := range netlink.Attributes(b) {
		switch kind {
		case statsConnections:
			t.Connections = netlink.Number(value)
		case statsPacketsIn:
			t.PacketsIn = netlink.Number(value)
		case statsPacketsOut:
			t.PacketsOut = netlink.Number(value)
		case statsBytesIn:
			t.BytesIn = netlink.Number(value)
		case statsBytesOut:
			t.BytesOut = netlink.Number(value)
		}
	}
	return t
}

// parseRealServer reads a real server of a virtual server of a family. It is foreign if we would not have made it so.
func parseRealServer(body []byte, family plan.Family) (d ActualRealServer, foreign bool, err error) {
	var addr []byte
	var port uint16
	for kind, value := range netlink.Attributes(inside(body, attrDest)) {
		n := uint32(netlink.Number(value))
		switch kind {
		case destAddr:
			addr = value
		case destPort:
			port = uint16(netlink.BigEndian(value))
		case destFamily:
			if n == unix.AF_INET { // IPv4 behind IPv6 goes with tunnels only
				family = plan.IPv4
			}
		case destForwarding:
			foreign = foreign || n&forwardMask != forwardMasquerade
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
	a, err := netlink.Addr(addr, family)
	if err != nil {
		return d, false, fmt.Errorf("real server: %w", err)
	}
	d.Addr = netip.AddrPortFrom(a, port)
	return d, foreign, nil
}
