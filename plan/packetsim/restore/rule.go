package restore

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan/packetsim"
)

// rule is a rule of iptables.
type rule struct {
	origin
	table   string
	words   []string // those behind the chain, for -D
	matches []match
	target  target           // nil if the rule has none
	jump    string           // the chain to which the target leads, if it does
	sets    []*packetsim.Set // those that the rule holds
	lookups []lookup
	unknown error
}

// match returns the probability that a condition of a rule holds: 0 or 1 unless it is left to chance. All conditions must hold. The
// error says why that is not known.
type match func(p *packetsim.Packet) (float64, error)

// lookup is a question for an element of a set, which the rule does what it does by.
type lookup struct {
	set   *packetsim.Set
	flags []bool
}

// target does with a packet that matches what the target of the rule says.
type target func(e *packetsim.Effect) error

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

// Unknown returns an error for the first match or target that is not known.
func (r *rule) Unknown() error { return r.unknown }

// Eval does what iptables does. A condition that can't be judged does not matter where another does not hold.
func (r *rule) Eval(p *packetsim.Packet) ([]packetsim.Effect, error) {
	chance := 1.0
	var unknown error
	for _, m := range r.matches {
		c, err := m(p)
		if err != nil {
			unknown = cmp.Or(unknown, err)
			continue
		}
		if c == 0 {
			return nil, nil
		}
		chance *= c
	}
	if unknown != nil {
		return nil, unknown
	}
	e := packetsim.Effect{Probability: chance, Packet: *p}
	for _, l := range r.lookups {
		if text, found := l.set.ElementText(p, l.flags); found {
			e.Elements = append(e.Elements, text)
		}
	}
	if r.target != nil {
		if err := r.target(&e); err != nil {
			return nil, err
		}
	}
	return []packetsim.Effect{e}, nil
}

// parser reads one rule.
type parser struct {
	*rule
	machine    *packetsim.Machine
	rest       []string // the words that are not yet read
	protocol   string   // as given with -p, unless inverted; "" for any
	extensions []extension
}

// parseRule reads a rule from its words behind "-A CHAIN".
func parseRule(m *packetsim.Machine, table string, o origin, words []string) (*rule, error) {
	p := &parser{rule: &rule{origin: o, table: table, words: words}, machine: m, rest: words}
	for len(p.rest) > 0 {
		name := p.next()
		not := name == "!"
		if not {
			name = p.next()
		}
		if err := p.option(name, not); err != nil {
			return nil, err
		}
	}
	for _, x := range p.extensions {
		if err := x.finish(p); err != nil {
			return nil, fmt.Errorf("match %s: %w", x.name, err)
		}
	}
	return p.rule, nil
}

// next takes a word; empty at the end of the rule.
func (p *parser) next() string {
	if len(p.rest) == 0 {
		return ""
	}
	w := p.rest[0]
	p.rest = p.rest[1:]
	return w
}

// values takes the words behind an option.
func (p *parser) values(option string, n int) ([]string, error) {
	if len(p.rest) < n {
		return nil, fmt.Errorf("option %s has no value", option)
	}
	taken := p.rest[:n]
	p.rest = p.rest[n:]
	return taken, nil
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

// notKnown notes that the rule has something that is not known, and returns the error for it.
func (p *parser) notKnown(what ...string) error {
	err := fmt.Errorf("the simulator does not know %s", strings.Join(what, " "))
	p.unknown = cmp.Or(p.unknown, err)
	return err
}

// fails adds a condition that can't be judged.
func (p *parser) fails(err error) {
	p.matches = append(p.matches, func(*packetsim.Packet) (float64, error) { return 0, err })
}

func (p *parser) option(name string, not bool) error {
	if name == "-c" || name == "--set-counters" {
		p.next()
		p.next()
		return nil
	}
	read := baseOptions[name]
	if read == nil {
		return p.extensionOption(name, not)
	}
	value, err := p.values(name, 1)
	if err != nil {
		return err
	}
	if err := read(p, value[0], not); err != nil {
		return fmt.Errorf("option %s: %w", name, err)
	}
	return nil
}

// baseOptions are the options of iptables itself, each with one value.
var baseOptions = map[string]func(p *parser, value string, not bool) error{
	"-s": address(srcOf), "--source": address(srcOf), "--src": address(srcOf),
	"-d": address(dstOf), "--destination": address(dstOf), "--dst": address(dstOf),
	"-p": (*parser).proto, "--protocol": (*parser).proto, "--proto": (*parser).proto,
	"-i": (*parser).inInterface, "--in-interface": (*parser).inInterface,
	"-o": (*parser).outInterface, "--out-interface": (*parser).outInterface,
	"-m": (*parser).load, "--match": (*parser).load,
	"-j": (*parser).jumpTo, "--jump": (*parser).jumpTo, "-g": (*parser).goTo, "--goto": (*parser).goTo,
}

// srcOf and dstOf are the addresses that conditions are about.
func srcOf(p *packetsim.Packet) netip.Addr { return p.Src }
func dstOf(p *packetsim.Packet) netip.Addr { return p.Dst }

// address compares an address with a range.
func address(of func(*packetsim.Packet) netip.Addr) func(*parser, string, bool) error {
	return func(p *parser, value string, not bool) error {
		prefix, err := parsePrefix(value, p.machine.Family)
		p.when(not, func(pkt *packetsim.Packet) bool { return prefix.Contains(of(pkt)) })
		return err
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

// isInterface reports whether an interface has a name. A final + in the name stands for any ending.
func isInterface(iface, name string) bool {
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
		return is(isInterface(pkt.In, name), not), nil
	})
	return nil
}

func (p *parser) outInterface(name string, not bool) error {
	p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
		if pkt.Hook == packetsim.PreRouting || pkt.Hook == packetsim.Input {
			return is(isInterface("", name), not), nil
		}
		iface, err := pkt.OutInterface()
		return is(isInterface(iface, name), not), err
	})
	return nil
}

// extensionOption looks for a loaded extension that knows the option. The one loaded last comes first.
func (p *parser) extensionOption(name string, not bool) error {
	if !strings.HasPrefix(name, "-") {
		return fmt.Errorf("%q is no option", name)
	}
	hasPorts := slices.ContainsFunc(p.extensions, func(x extension) bool { return x.name == p.protocol })
	if strings.HasSuffix(name, "port") && slices.Contains(portProtocols, p.protocol) && !hasPorts {
		_ = p.load(p.protocol, false) // -p loads the protocol's own match as soon as an option asks for it
	}
	for _, x := range slices.Backward(p.extensions) {
		o, known := x.options[name]
		if !known || not && o.plain {
			continue
		}
		values, err := p.values(name, o.values)
		if err != nil {
			return err
		}
		x.seen[name] = true
		if err := o.read(values, not); err != nil {
			return fmt.Errorf("option %s: %w", name, err)
		}
		return nil
	}
	end := slices.IndexFunc(p.rest, func(w string) bool { return w == "!" || strings.HasPrefix(w, "-") })
	if end < 0 {
		end = len(p.rest)
	}
	p.fails(p.notKnown(append([]string{"option", name}, p.rest[:end]...)...))
	p.rest = p.rest[end:]
	return nil
}

// load begins a match extension. One that is not known makes the rule one that can't be traced.
func (p *parser) load(name string, _ bool) error {
	create, known := extensions[name]
	if !known {
		p.fails(p.notKnown("match", name))
		return nil
	}
	x := create(p)
	x.name, x.seen = name, map[string]bool{}
	p.extensions = append(p.extensions, x)
	return nil
}

// set finds a set, which must exist, and reads flags for it: true for src, false for dst.
func (p *parser) set(name, flags string) (*packetsim.Set, []bool, error) {
	s := p.machine.Sets[name]
	if s == nil {
		return nil, nil, fmt.Errorf("there is no set %s", name)
	}
	p.sets = append(p.sets, s)
	var out []bool
	for _, f := range strings.Split(flags, ",") {
		if f != "src" && f != "dst" {
			return nil, nil, fmt.Errorf("%q is neither src nor dst", f)
		}
		out = append(out, f == "src")
	}
	return s, out, nil
}
