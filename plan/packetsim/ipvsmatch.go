package packetsim

import (
	"fmt"
	"net/netip"
	"strconv"
)

// ipvsModule asks whether IPVS has taken the packet, and as one for which virtual server. What is asked of a server does
// not hold for a packet that IPVS has not taken, not even inverted.
type ipvsModule struct {
	taken    *bool // --ipvs, alone
	protocol *ipvsOption[string]
	addr     *ipvsOption[netip.Prefix]
	port     *ipvsOption[uint16]
	reply    *ipvsOption[bool]
}

type ipvsOption[T any] struct {
	value T
	not   bool
}

func (m *ipvsModule) option(p *parser, name string, not bool) (bool, error) {
	if name == "--ipvs" {
		want := !not
		m.taken = &want
		return true, nil
	}
	switch name {
	case "--vproto", "--vaddr", "--vport", "--vdir":
	default:
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	switch name {
	case "--vproto":
		if known, ok := protocols[value]; ok {
			value = known
		}
		m.protocol = &ipvsOption[string]{value, not}
	case "--vaddr":
		prefix, err := parsePrefix(value)
		m.addr = &ipvsOption[netip.Prefix]{prefix, not}
		return true, err
	case "--vport":
		port, err := strconv.ParseUint(value, 10, 16)
		m.port = &ipvsOption[uint16]{uint16(port), not}
		return true, err
	case "--vdir":
		if value != "ORIGINAL" && value != "REPLY" {
			return true, fmt.Errorf("%s is no direction", value)
		}
		m.reply = &ipvsOption[bool]{value == "REPLY", not}
	}
	return true, nil
}

func (m *ipvsModule) finish(*parser) (matcher, error) {
	if m.taken == nil && m.protocol == nil && m.addr == nil && m.port == nil && m.reply == nil {
		return nil, nil // Its other options are not known, and say so.
	}
	return m, nil
}

func (m *ipvsModule) match(p *packet) (float64, error) {
	taken := p.virtual.IsValid()
	if m.taken != nil && *m.taken != taken {
		return 0, nil
	}
	if m.protocol == nil && m.addr == nil && m.port == nil && m.reply == nil {
		return 1, nil
	}
	holds := taken &&
		(m.protocol == nil || (m.protocol.value == p.protocol) != m.protocol.not) &&
		(m.addr == nil || m.addr.value.Contains(p.virtual.Addr()) != m.addr.not) &&
		(m.port == nil || (m.port.value == p.virtual.Port()) != m.port.not) &&
		(m.reply == nil || !m.reply.value != m.reply.not)
	return is(holds, false), nil
}
