package restore

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// target does with a packet that matches what the target of the rule says.
type target func(e *packetsim.Effect) error

// targetKind is what is known of a target.
type targetKind struct {
	tables  []string         // those to which it belongs; nil for all
	hooks   []packetsim.Hook // those at which it is possible; nil for all
	options map[string]int   // how many values each has
	needs   string           // the option without which it is refused, if there is one
	read    func(p *parser, options map[string][]string) (target, error)
}

// targets are those that are known; any other name is a chain's.
var targets = map[string]targetKind{
	"ACCEPT": {read: always(packetsim.Effect{End: packetsim.Accept})},
	"RETURN": {read: always(packetsim.Effect{Next: packetsim.Return})},
	"DROP":   {read: always(packetsim.Effect{End: packetsim.Drop}), tables: []string{"raw", "mangle", "filter", "security"}},
	"REJECT": {read: reject, tables: []string{"filter"}, hooks: builtin["filter"], options: map[string]int{"--reject-with": 1}},
	"DNAT": {read: dnat, tables: []string{"nat"}, hooks: []packetsim.Hook{packetsim.PreRouting, packetsim.Output},
		options: map[string]int{"--to-destination": 1, "--random": 0, "--persistent": 0}, needs: "--to-destination"},
	"MASQUERADE": {read: masquerade, tables: []string{"nat"}, hooks: []packetsim.Hook{packetsim.PostRouting},
		options: map[string]int{"--random": 0, "--random-fully": 0}},
	"MARK": {read: setMark, options: map[string]int{"--set-xmark": 1, "--set-mark": 1}},
	"SET":  {read: mapSet, tables: []string{"mangle"}, options: map[string]int{"--map-set": 2, "--map-mark": 0}, needs: "--map-mark"},
}

// jumpTo reads a target and its options, or a chain.
func (p *parser) jumpTo(words []string, _ bool) error {
	kind, known := targets[words[0]]
	if !known {
		return p.lead(packetsim.Jump, words)
	}
	if err := p.targetOf(kind, words[0], divide(words[1:])); err != nil {
		return fmt.Errorf("target %s: %w", words[0], err)
	}
	return nil
}

func (p *parser) goTo(words []string, _ bool) error { return p.lead(packetsim.Goto, words) }

func (p *parser) targetOf(kind targetKind, name string, list []Option) error {
	options := map[string][]string{}
	for _, o := range list {
		if values, known := kind.options[o.Name]; !known || o.Not || len(o.Values) != values {
			return fmt.Errorf("it takes no option %s with %d values", o.Name, len(o.Values))
		}
		options[o.Name] = o.Values
	}
	if kind.tables != nil && !slices.Contains(kind.tables, p.table) {
		return fmt.Errorf("it does not belong into table %s", p.table)
	}
	if _, is := options[kind.needs]; kind.needs != "" && !is {
		return fmt.Errorf("it has no %s", kind.needs)
	}
	do, err := kind.read(p, options)
	p.target = func(e *packetsim.Effect) error {
		if kind.hooks != nil && !slices.Contains(kind.hooks, e.Packet.Hook) {
			return fmt.Errorf("%s is not possible at %s", name, e.Packet.Hook)
		}
		return do(e)
	}
	return err
}

// lead makes the target another chain.
func (p *parser) lead(next packetsim.Next, words []string) error {
	if len(words) > 1 {
		return fmt.Errorf("chain %s takes no option %s", words[0], words[1])
	}
	p.jump = words[0]
	p.target, _ = always(packetsim.Effect{Next: next, Chain: p.jump})(p, nil)
	return nil
}

// always makes the target one that changes no packet.
func always(to packetsim.Effect) func(*parser, map[string][]string) (target, error) {
	return func(*parser, map[string][]string) (target, error) {
		return func(e *packetsim.Effect) error {
			e.End, e.Next, e.Chain = to.End, to.Next, to.Chain
			return nil
		}, nil
	}
}

func reject(p *parser, options map[string][]string) (target, error) {
	if with := options["--reject-with"]; with != nil {
		switch {
		case with[0] == "tcp-reset" && p.protocol != "tcp":
			return nil, errors.New("tcp-reset needs -p tcp")
		case with[0] != "tcp-reset" && strings.HasPrefix(with[0], "icmp6-") != (p.machine.Family == plan.IPv6):
			return nil, fmt.Errorf("%s is not of %s", with[0], p.machine.Family)
		}
	}
	return always(packetsim.Effect{End: packetsim.Reject})(p, nil)
}

func dnat(p *parser, options map[string][]string) (target, error) {
	text := options["--to-destination"][0]
	to, err := netip.ParseAddrPort(text)
	if a, failed := netip.ParseAddr(text); failed == nil {
		to, err = netip.AddrPortFrom(a, 0), nil // It keeps the packet's.
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%q is no address, with or without port", text)
	case plan.FamilyOf(to.Addr()) != p.machine.Family:
		return nil, fmt.Errorf("%s is not an %s address", to.Addr(), p.machine.Family)
	case to.Port() != 0 && !slices.Contains(portProtocols, p.protocol):
		return nil, errors.New("a port needs -p tcp, udp or sctp")
	}
	return func(e *packetsim.Effect) error {
		e.End, e.Packet.DNAT = packetsim.Accept, true
		e.Packet.Translate(to)
		return nil
	}, nil
}

func masquerade(*parser, map[string][]string) (target, error) {
	return func(e *packetsim.Effect) error {
		e.End, e.Packet.Masquerade = packetsim.Accept, true
		return nil
	}, nil
}

// setMark clears bits in the mark, and then flips some.
func setMark(_ *parser, options map[string][]string) (target, error) {
	if len(options) != 1 {
		return nil, errors.New("it takes one option")
	}
	set, clears := options["--set-mark"], options["--set-xmark"]
	value, mask, err := ParseMark(slices.Concat(set, clears)[0])
	if set != nil {
		mask |= value
	}
	return func(e *packetsim.Effect) error {
		e.Packet.Mark = e.Packet.Mark&^mask ^ value
		return nil
	}, err
}

// mapSet gives a packet that is in a set the mark of its entry there.
func mapSet(p *parser, options map[string][]string) (target, error) {
	of := options["--map-set"]
	if of == nil {
		return nil, errors.New("it has no --map-set")
	}
	l, err := p.lookup(of[0], of[1])
	p.lookups = append(p.lookups, l)
	return func(e *packetsim.Effect) error {
		entry, found, err := l.set.Find(&e.Packet, l.flags)
		if found {
			e.Packet.Mark = e.Packet.Mark&^entry.Mask ^ entry.Mark
		}
		return err
	}, err
}
