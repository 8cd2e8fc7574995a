package restore

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/bpf"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// rule is a rule of iptables.
type rule struct {
	origin
	table   string
	matches []match
	target  target // nil if the rule has none
	jump    string // the chain to which the target leads, if it does
	lookups []lookup
}

// match returns the probability that a condition of a rule holds: 0 or 1 unless it is left to chance. All conditions must hold. The
// error says why that is not known.
type match func(p *packetsim.Packet) (float64, error)

// lookup is a question for an entry of a set. A flag says for each dimension whether the source is meant.
type lookup struct {
	set   *packetsim.Set
	flags []bool
}

// rules are those of a chain that were read here.
func rules(c *packetsim.Chain) iter.Seq[*rule] {
	return func(yield func(*rule) bool) {
		for _, r := range c.Rules {
			if own, ok := r.(*rule); ok && !yield(own) {
				return
			}
		}
	}
}

// Eval does what iptables does. A condition that can't be judged does not matter where another does not hold.
func (r *rule) Eval(p *packetsim.Packet, effects []packetsim.Effect) ([]packetsim.Effect, error) {
	chance := 1.0
	var unknown error
	for _, m := range r.matches {
		c, err := m(p)
		if err != nil {
			unknown = cmp.Or(unknown, err)
			continue
		}
		if c == 0 {
			return effects, nil
		}
		chance *= c
	}
	if unknown != nil {
		return nil, unknown
	}
	effects = append(effects, packetsim.Effect{Probability: chance, Packet: *p})
	e := &effects[len(effects)-1]
	for _, l := range r.lookups {
		if entry, found, err := l.set.Find(p, l.flags); err == nil && found {
			e.Elements = append(e.Elements, l.set.Name+" "+entry.String())
		}
	}
	if r.target != nil {
		if err := r.target(e); err != nil {
			return nil, err
		}
	}
	return effects, nil
}

// parser reads one rule.
type parser struct {
	*rule
	machine  *packetsim.Machine
	protocol string          // as given with -p, unless inverted; "" for any
	loaded   []string        // the matches that are loaded
	seen     map[string]bool // the options so far
	recent   string          // the list of clients that match recent is about
}

// parseRule reads a rule from its text behind "-A CHAIN".
func parseRule(m *packetsim.Machine, table string, o origin, text string) (*rule, error) {
	list, err := Options(text)
	if err != nil {
		return nil, err
	}
	p := &parser{rule: &rule{origin: o, table: table}, machine: m, seen: map[string]bool{}}
	for _, o := range list {
		if err := p.option(o); err != nil {
			return nil, err
		}
	}
	for _, name := range p.loaded {
		switch needs := modules[name]; {
		case slices.Contains(portProtocols, name) && name != p.protocol:
			return nil, fmt.Errorf("match %s: it needs -p %s", name, name)
		case needs != "" && !p.seen[needs]:
			return nil, fmt.Errorf("match %s: it needs %s", name, needs)
		}
	}
	return p.rule, nil
}

// modules are the matches that are known, and the option without which one is refused.
var modules = map[string]string{
	"comment": "", "tcp": "", "udp": "", "sctp": "", "addrtype": "", "mark": "", "conntrack": "", "recent": "", "ipvs": "", "bpf": "",
	"statistic": "--mode", "set": "--match-set",
}

// portProtocols are the protocols whose own match has ports.
var portProtocols = []string{"tcp", "udp", "sctp"}

// option is what is known of an option.
type option struct {
	of     []string // the matches that have it; nil for one of iptables itself
	values int      // -1 for any number
	plain  bool     // It is not known with an exclamation mark.
	read   func(p *parser, values []string, not bool) error
}

// one is an option with one value, of some matches.
func one(read func(p *parser, value string, not bool) error, of ...string) option {
	return option{of: of, values: 1, read: func(p *parser, values []string, not bool) error { return read(p, values[0], not) }}
}

// ignored is an option that does not matter.
func ignored(values int, of string) option {
	return option{of: []string{of}, values: values, plain: true, read: func(*parser, []string, bool) error { return nil }}
}

// options are those that are known.
var options = map[string]option{
	"-s": one(within(source)),
	"-d": one(within(destination)),
	"-p": one((*parser).proto),
	"-i": one((*parser).inInterface),
	"-o": one((*parser).outInterface),
	"-m": one((*parser).load),
	"-j": {values: -1, plain: true, read: (*parser).jumpTo},
	"-g": {values: -1, plain: true, read: (*parser).goTo},

	"--comment":   ignored(1, "comment"),
	"--dport":     one((*parser).port, portProtocols...),
	"--tcp-flags": {of: []string{"tcp"}, values: 2, read: (*parser).flags},
	"--src-type":  one(isLocal(source), "addrtype"),
	"--dst-type":  one(isLocal(destination), "addrtype"),
	"--mark":      one((*parser).mark, "mark"),
	"--ctstate":   one((*parser).state, "conntrack"),
	"--ctorigdst": one(within(func(p *packetsim.Packet) netip.Addr { return p.Original }), "conntrack"),
	"--match-set": {of: []string{"set"}, values: 2, read: (*parser).matchSet},
	"--ipvs":      {of: []string{"ipvs"}, read: (*parser).takenByIPVS},
	"--bytecode":  one((*parser).bytecode, "bpf"),

	"--mode":        one((*parser).mode, "statistic"),
	"--probability": one((*parser).probability, "statistic"),

	"--rcheck":  {of: []string{"recent"}, read: (*parser).isRecent},
	"--name":    one(func(p *parser, name string, _ bool) error { p.recent = name; return nil }, "recent"),
	"--set":     ignored(0, "recent"), // It adds to the list, which is always true.
	"--reap":    ignored(0, "recent"),
	"--rsource": ignored(0, "recent"),
	"--seconds": ignored(1, "recent"),
	"--mask":    ignored(1, "recent"),
}

func source(p *packetsim.Packet) netip.Addr      { return p.Src }
func destination(p *packetsim.Packet) netip.Addr { return p.Dst }

func (p *parser) option(o Option) error {
	known, is := options[o.Name]
	has := func(match string) bool { // -p loads the protocol's own match as soon as an option asks for it.
		return slices.Contains(p.loaded, match) || match == p.protocol && slices.Contains(portProtocols, match)
	}
	switch {
	case !strings.HasPrefix(o.Name, "-"):
		return fmt.Errorf("%q is no option", o.Name)
	case !is || o.Not && known.plain || known.of != nil && !slices.ContainsFunc(known.of, has):
		return notKnown(append([]string{"option", o.Name}, o.Values...)...)
	case len(o.Values) < known.values || known.values < 0 && len(o.Values) == 0:
		return fmt.Errorf("option %s has no value", o.Name)
	case known.values >= 0 && len(o.Values) > known.values:
		return fmt.Errorf("%q is no option", o.Values[known.values])
	}
	p.seen[o.Name] = true
	if err := known.read(p, o.Values, o.Not); err != nil {
		return fmt.Errorf("option %s: %w", o.Name, err)
	}
	return nil
}

// when adds a condition.
func (p *parser) when(not bool, holds func(*packetsim.Packet) bool) {
	p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) { return is(holds(pkt), not), nil })
}

// is turns a condition and its inversion into a probability.
func is(holds, not bool) float64 {
	if holds != not {
		return 1
	}
	return 0
}

// notKnown is the error for what is not known.
func notKnown(what ...string) error {
	return fmt.Errorf("the simulator does not know %s", strings.Join(what, " "))
}

// load begins a match.
func (p *parser) load(name string, _ bool) error {
	if _, known := modules[name]; !known {
		return notKnown("match", name)
	}
	p.loaded = append(p.loaded, name)
	return nil
}

// within compares an address with a range.
func within(of func(*packetsim.Packet) netip.Addr) func(*parser, string, bool) error {
	return func(p *parser, value string, not bool) error {
		prefix, err := ParsePrefix(value)
		if err == nil && plan.FamilyOf(prefix.Addr()) != p.machine.Family {
			err = fmt.Errorf("%s is not an %s address", value, p.machine.Family)
		}
		p.when(not, func(pkt *packetsim.Packet) bool { return prefix.Contains(of(pkt)) })
		return err
	}
}

// isLocal asks whether an address is the node's.
func isLocal(of func(*packetsim.Packet) netip.Addr) func(*parser, string, bool) error {
	return func(p *parser, value string, not bool) error {
		if value != "LOCAL" {
			return notKnown("address type", value)
		}
		p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Local(of(pkt)) })
		return nil
	}
}

func (p *parser) proto(value string, not bool) error {
	value = parseProtocol(value)
	switch {
	case value == "all" && not:
		return errors.New("no packet has a protocol that is not all")
	case value == "all":
		return nil
	case !not:
		p.protocol = value
	}
	p.when(not, func(pkt *packetsim.Packet) bool { return value == pkt.Protocol })
	return nil
}

// IsInterface reports whether an interface has a name. A final + in the name stands for any ending.
func IsInterface(iface, name string) bool {
	if prefix, ok := strings.CutSuffix(name, "+"); ok {
		return strings.HasPrefix(iface, prefix)
	}
	return iface == name
}

func (p *parser) inInterface(name string, not bool) error {
	p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
		if pkt.Hook == packetsim.PostRouting {
			return 0, errors.New("whether a kernel knows by which interface a packet came that leaves differs")
		}
		return is(IsInterface(pkt.In, name), not), nil
	})
	return nil
}

func (p *parser) outInterface(name string, not bool) error {
	p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
		if pkt.Hook == packetsim.PreRouting || pkt.Hook == packetsim.Input {
			return is(IsInterface("", name), not), nil
		}
		iface, err := pkt.OutInterface()
		return is(IsInterface(iface, name), not), err
	})
	return nil
}

func (p *parser) port(text string, not bool) error {
	ports, err := ParsePorts(text)
	p.when(not, func(pkt *packetsim.Packet) bool { return ports.Contains(pkt.Port) })
	return err
}

// flags compares those of TCP: the first packet of a connection has SYN alone.
func (p *parser) flags(lists []string, not bool) error {
	mask, set, err := ParseTCPFlags(lists)
	p.when(not, func(*packetsim.Packet) bool { return tcpFlags["SYN"]&mask == set })
	return err
}

func (p *parser) mark(text string, not bool) error {
	value, mask, err := ParseMark(text)
	p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Mark&mask == value })
	return err
}

var states = []string{"NEW", "ESTABLISHED", "RELATED", "INVALID", "UNTRACKED", "SNAT", "DNAT"}

// state compares a connection's state. A first packet's state is NEW, and DNAT besides once its destination was changed.
func (p *parser) state(value string, not bool) error {
	list := strings.Split(value, ",")
	for _, s := range list {
		if !slices.Contains(states, s) {
			return fmt.Errorf("there is no state %q", s)
		}
	}
	p.when(not, func(pkt *packetsim.Packet) bool {
		return slices.ContainsFunc(list, func(s string) bool {
			return s == "NEW" || s == "DNAT" && pkt.DNAT || s == "SNAT" && pkt.Masquerade
		})
	})
	return nil
}

func (p *parser) mode(mode string, _ bool) error {
	if mode != "random" {
		return notKnown("statistic mode", mode)
	}
	return nil
}

// probability leaves it to chance.
func (p *parser) probability(value string, not bool) error {
	chance, err := strconv.ParseFloat(value, 64)
	if err != nil || !(chance >= 0 && chance <= 1) {
		return fmt.Errorf("%q is no probability", value)
	}
	if not {
		chance = 1 - chance
	}
	p.matches = append(p.matches, func(*packetsim.Packet) (float64, error) { return chance, nil })
	return nil
}

// isRecent asks whether the source is in a list, whose name may follow.
func (p *parser) isRecent(_ []string, not bool) error {
	p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Recent(p.recent, pkt.Src) })
	return nil
}

// takenByIPVS asks whether IPVS has taken the packet.
func (p *parser) takenByIPVS(_ []string, not bool) error {
	p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Virtual.IsValid() })
	return nil
}

// lookup finds a set, which must exist, and reads flags for it: src or dst for each dimension.
func (p *parser) lookup(name, flags string) (lookup, error) {
	l := lookup{set: p.machine.Sets[name]}
	if l.set == nil {
		return l, fmt.Errorf("there is no set %s", name)
	}
	for _, f := range strings.Split(flags, ",") {
		if f != "src" && f != "dst" {
			return l, fmt.Errorf("%q is neither src nor dst", f)
		}
		l.flags = append(l.flags, f == "src")
	}
	return l, nil
}

// matchSet asks whether a packet is in a set.
func (p *parser) matchSet(values []string, not bool) error {
	l, err := p.lookup(values[0], values[1])
	if err == nil && !not {
		p.lookups = append(p.lookups, l)
	}
	p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
		_, found, err := l.set.Find(pkt, l.flags)
		return is(found, not), err
	})
	return err
}

// bytecode runs a program of classic BPF on the packet, from its network header on. The text is "N,code jt jf k,code jt jf k,…", with N
// instructions.
func (p *parser) bytecode(text string, not bool) error {
	count, rest, _ := strings.Cut(text, ",")
	var raw []bpf.RawInstruction
	for _, word := range strings.Split(strings.TrimSuffix(rest, ","), ",") {
		var i bpf.RawInstruction
		if n, err := fmt.Sscanf(word, "%d %d %d %d", &i.Op, &i.Jt, &i.Jf, &i.K); n != 4 || err != nil {
			return fmt.Errorf("%q is no BPF instruction", word)
		}
		raw = append(raw, i)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(count)); err != nil || n != len(raw) {
		return fmt.Errorf("bytecode says it has %q instructions and has %d", count, len(raw))
	}
	program, known := bpf.Disassemble(raw)
	if !known {
		return errors.New("the bytecode has an instruction that is not known")
	}
	vm, err := bpf.NewVM(program)
	p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
		ret, err := vm.Run(pkt.Header())
		if err != nil {
			return 0, fmt.Errorf("bytecode: %w", err)
		}
		return is(ret != 0, not), nil
	})
	return err
}
