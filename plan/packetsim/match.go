package packetsim

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// matcher is one condition of a rule. All conditions of a rule must hold.
type matcher interface {
	// match returns the probability that the condition holds: 0 or 1 unless it is left to chance. The error says why that
	// is not known.
	match(p *packet) (float64, error)
}

// is turns a condition and its inversion into a probability.
func is(holds, not bool) float64 {
	if holds != not {
		return 1
	}
	return 0
}

// unknownMatch is a condition that the simulator can't judge.
type unknownMatch struct{ what string }

func (m unknownMatch) error() error                   { return fmt.Errorf("the simulator does not know %s", m.what) }
func (m unknownMatch) match(*packet) (float64, error) { return 0, m.error() }

type addressMatch struct {
	dst    bool
	prefix netip.Prefix
	not    bool
}

func (m addressMatch) match(p *packet) (float64, error) {
	if m.dst {
		return is(m.prefix.Contains(p.dst), m.not), nil
	}
	return is(m.prefix.Contains(p.src), m.not), nil
}

type protocolMatch struct {
	name string
	not  bool
}

func (m protocolMatch) match(p *packet) (float64, error) { return is(m.name == p.protocol, m.not), nil }

type interfaceMatch struct {
	out  bool
	name string // a final + stands for any ending
	not  bool
}

func (m interfaceMatch) match(p *packet) (float64, error) {
	iface := p.in
	switch {
	case m.out && (p.hook == preRouting || p.hook == input):
		iface = ""
	case m.out && p.node.OutInterface == nil:
		return 0, errors.New("by which interface the packet leaves is not known")
	case m.out:
		iface = p.node.OutInterface(p.dst)
	case p.hook == postRouting:
		return 0, errors.New("whether a kernel knows by which interface a packet came that leaves differs")
	}
	if prefix, ok := strings.CutSuffix(m.name, "+"); ok {
		return is(strings.HasPrefix(iface, prefix), m.not), nil
	}
	return is(iface == m.name, m.not), nil
}

// modules are the match extensions that are known.
var modules = map[string]func(name string) module{
	"bpf":       func(string) module { return &bpfModule{} },
	"comment":   func(string) module { return &commentModule{} },
	"tcp":       func(name string) module { return &portModule{protocols: []string{name}} },
	"udp":       func(name string) module { return &portModule{protocols: []string{name}} },
	"sctp":      func(name string) module { return &portModule{protocols: []string{name}} },
	"multiport": func(string) module { return &portModule{protocols: []string{"tcp", "udp", "sctp"}, many: true} },
	"addrtype":  func(string) module { return &addrtypeModule{} },
	"mark":      func(string) module { return &markModule{} },
	"conntrack": func(string) module { return &stateModule{flag: "--ctstate"} },
	"state":     func(string) module { return &stateModule{flag: "--state"} },
	"statistic": func(string) module { return &statisticModule{} },
	"recent":    func(string) module { return &recentModule{} },
	"set":       func(string) module { return &setModule{} },
	"ipvs":      func(string) module { return &ipvsModule{} },
}

// portProtocols are the protocols whose own match has ports.
var portProtocols = map[string]bool{"tcp": true, "udp": true, "sctp": true}

// commentModule is always true.
type commentModule struct{}

func (*commentModule) option(p *parser, name string, _ bool) (bool, error) {
	if name != "--comment" {
		return false, nil
	}
	_, err := p.argument(name)
	return true, err
}

func (*commentModule) finish(*parser) (matcher, error) { return nil, nil }

// portModule compares the destination port.
type portModule struct {
	protocols []string
	many      bool // a list may be given (multiport)
	ranges    [][2]uint16
	not       bool
}

func (m *portModule) option(p *parser, name string, not bool) (bool, error) {
	names := []string{"--dport", "--destination-port"}
	if m.many {
		names = []string{"--dports", "--destination-ports"}
	}
	if !slices.Contains(names, name) {
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	m.not = not
	list := []string{value}
	if m.many {
		list = strings.Split(value, ",")
	}
	for _, item := range list {
		r, err := parsePorts(item)
		if err != nil {
			return true, fmt.Errorf("option %s: %w", name, err)
		}
		m.ranges = append(m.ranges, r)
	}
	return true, nil
}

// parsePorts reads "port", "first:last", ":last" or "first:".
func parsePorts(text string) ([2]uint16, error) {
	first, last, isRange := strings.Cut(text, ":")
	if !isRange {
		last = first
	}
	if isRange && first == "" {
		first = "0"
	}
	if isRange && last == "" {
		last = "65535"
	}
	lo, errLo := strconv.ParseUint(first, 10, 16)
	hi, errHi := strconv.ParseUint(last, 10, 16)
	if err := errors.Join(errLo, errHi); err != nil {
		return [2]uint16{}, fmt.Errorf("%q is no port or range of ports", text)
	}
	return [2]uint16{uint16(lo), uint16(hi)}, nil
}

func (m *portModule) finish(p *parser) (matcher, error) {
	if !slices.Contains(m.protocols, p.protocol) {
		return nil, fmt.Errorf("it needs -p with one of %s", strings.Join(m.protocols, ", "))
	}
	if len(m.ranges) == 0 {
		return nil, nil
	}
	return m, nil
}

func (m *portModule) match(p *packet) (float64, error) {
	return is(slices.ContainsFunc(m.ranges, func(r [2]uint16) bool {
		return r[0] <= p.port && p.port <= r[1]
	}), m.not), nil
}

// addrtypeModule asks whether addresses are the node's.
type addrtypeModule struct {
	src, dst *bool // what is asked for; nil where nothing is
}

func (m *addrtypeModule) option(p *parser, name string, not bool) (bool, error) {
	if name != "--src-type" && name != "--dst-type" {
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	if value != "LOCAL" {
		p.match(unknownMatch{fmt.Sprintf("address type %s", value)})
		return true, nil
	}
	want := !not
	if name == "--src-type" {
		m.src = &want
	} else {
		m.dst = &want
	}
	return true, nil
}

func (m *addrtypeModule) finish(*parser) (matcher, error) { return m, nil }

func (m *addrtypeModule) match(p *packet) (float64, error) {
	if p.node.Local == nil {
		return 0, errors.New("which addresses are local is not known")
	}
	src := m.src == nil || *m.src == p.local(p.src)
	dst := m.dst == nil || *m.dst == p.local(p.dst)
	return is(src && dst, false), nil
}

// markModule compares the packet's mark.
type markModule struct {
	value, mask uint32
	not         bool
}

func (m *markModule) option(p *parser, name string, not bool) (bool, error) {
	if name != "--mark" {
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	m.not = not
	m.value, m.mask, err = parseMark(value)
	return true, err
}

// parseMark reads "value" or "value/mask", in any base that C knows.
func parseMark(text string) (value, mask uint32, err error) {
	left, right, hasMask := strings.Cut(text, "/")
	if !hasMask {
		right = "0xffffffff"
	}
	v, errV := strconv.ParseUint(left, 0, 32)
	m, errM := strconv.ParseUint(right, 0, 32)
	if err := errors.Join(errV, errM); err != nil {
		return 0, 0, fmt.Errorf("%q is no mark", text)
	}
	return uint32(v), uint32(m), nil
}

func (m *markModule) finish(*parser) (matcher, error) { return m, nil }

func (m *markModule) match(p *packet) (float64, error) {
	return is(p.mark&m.mask == m.value, m.not), nil
}

// stateModule compares what connection tracking says. A first packet's state is NEW, and DNAT besides once its
// destination was changed.
type stateModule struct {
	flag   string
	states []string
	not    bool
	// original is the range of the destination before any translation; the zero Prefix is any.
	original netip.Prefix
}

var states = []string{"NEW", "ESTABLISHED", "RELATED", "INVALID", "UNTRACKED", "SNAT", "DNAT"}

func (m *stateModule) option(p *parser, name string, not bool) (bool, error) {
	if name == "--ctorigdst" && m.flag == "--ctstate" && !not {
		value, err := p.argument(name)
		if err != nil {
			return true, err
		}
		if addr, err := netip.ParseAddr(value); err == nil {
			m.original = netip.PrefixFrom(addr, addr.BitLen())
			return true, nil
		}
		if m.original, err = netip.ParsePrefix(value); err != nil {
			return true, fmt.Errorf("option %s: %w", name, err)
		}
		return true, nil
	}
	if name != m.flag {
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	m.not, m.states = not, strings.Split(value, ",")
	for _, s := range m.states {
		if !slices.Contains(states, s) {
			return true, fmt.Errorf("option %s: there is no state %q", name, s)
		}
	}
	return true, nil
}

func (m *stateModule) finish(*parser) (matcher, error) {
	if m.states == nil {
		return nil, nil // Its other options are not known, and say so.
	}
	return m, nil
}

func (m *stateModule) match(p *packet) (float64, error) {
	has := func(s string) bool {
		return s == "NEW" || s == "DNAT" && p.dnat || s == "SNAT" && p.masquerade
	}
	if m.original.IsValid() && !m.original.Contains(p.original) {
		return 0, nil
	}
	return is(slices.ContainsFunc(m.states, has), m.not), nil
}

// statisticModule leaves it to chance.
type statisticModule struct {
	mode        string
	probability float64
	not         bool
}

func (m *statisticModule) option(p *parser, name string, not bool) (bool, error) {
	if name != "--mode" && name != "--probability" {
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	if name == "--mode" {
		m.mode = value
		return true, nil
	}
	m.not = not
	m.probability, err = strconv.ParseFloat(value, 64)
	if err != nil || !(m.probability >= 0 && m.probability <= 1) {
		return true, fmt.Errorf("%q is no probability", value)
	}
	return true, nil
}

func (m *statisticModule) finish(*parser) (matcher, error) {
	if m.mode != "random" {
		return unknownMatch{fmt.Sprintf("statistic mode %q", m.mode)}, nil
	}
	return m, nil
}

func (m *statisticModule) match(*packet) (float64, error) {
	if m.not {
		return 1 - m.probability, nil
	}
	return m.probability, nil
}

// recentModule asks a list of addresses, or adds to it.
type recentModule struct {
	list  string
	check bool // else it adds, which is always true
	byDst bool
	not   bool
}

func (m *recentModule) option(p *parser, name string, not bool) (bool, error) {
	var err error
	switch name {
	case "--set":
		m.not = not
	case "--rcheck", "--update":
		m.check, m.not = true, not
	case "--rsource", "--reap":
	case "--rdest":
		m.byDst = true
	case "--name":
		m.list, err = p.argument(name)
	case "--seconds", "--hitcount", "--mask":
		_, err = p.argument(name)
	default:
		return false, nil
	}
	return true, err
}

func (m *recentModule) finish(*parser) (matcher, error) { return m, nil }

func (m *recentModule) match(p *packet) (float64, error) {
	addr := p.src
	if m.byDst {
		addr = p.dst
	}
	holds := !m.check || p.node.Recent != nil && p.node.Recent(m.list, addr)
	return is(holds, m.not), nil
}
