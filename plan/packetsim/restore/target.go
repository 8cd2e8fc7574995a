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

// foreignTargets are targets of iptables that are not known here; any other name is a chain's.
var foreignTargets = strings.Fields(`AUDIT BPF CHECKSUM CLASSIFY CLUSTERIP CONNMARK CONNSECMARK CT DNPT DSCP ECN HL HMARK
	IDLETIMER LED LOG NETMAP NFLOG NFQUEUE NOTRACK QUEUE RATEEST REDIRECT SECMARK SNAT SNPT SYNPROXY TCPMSS
	TCPOPTSTRIP TEE TOS TPROXY TRACE TTL ULOG`)

// targets are those that are known, and what reads their options.
var targets = map[string]func(p *parser, options []string) error{
	"ACCEPT": func(p *parser, options []string) error {
		return p.plain(packetsim.Effect{End: packetsim.Accept}, options)
	},
	"RETURN": func(p *parser, options []string) error {
		return p.plain(packetsim.Effect{Next: packetsim.Return}, options)
	},
	"DROP":       (*parser).drop,
	"REJECT":     (*parser).reject,
	"DNAT":       (*parser).dnat,
	"MASQUERADE": (*parser).masquerade,
	"MARK":       (*parser).setMark,
	"SET":        (*parser).mapSet,
}

// jumpTo reads a target and its options, which are the rest of the rule.
func (p *parser) jumpTo(name string, _ bool) error {
	if p.target != nil {
		return errors.New("a rule has one target only")
	}
	options := p.rest
	p.rest = nil
	if read := targets[name]; read != nil {
		if err := read(p, options); err != nil {
			return fmt.Errorf("target %s: %w", name, err)
		}
		return nil
	}
	if slices.Contains(foreignTargets, name) {
		p.foreign(name)
		return nil
	}
	return p.lead(name, packetsim.Jump, options)
}

func (p *parser) goTo(name string, _ bool) error {
	if p.target != nil {
		return errors.New("a rule has one target only")
	}
	options := p.rest
	p.rest = nil
	return p.lead(name, packetsim.Goto, options)
}

// lead makes the target another chain.
func (p *parser) lead(name string, next packetsim.Next, options []string) error {
	if len(options) > 0 {
		return fmt.Errorf("chain %s takes no option %s", name, options[0])
	}
	p.jump = name
	return p.plain(packetsim.Effect{Next: next, Chain: name}, nil)
}

// foreign makes the target one that fails.
func (p *parser) foreign(what string) {
	err := p.notKnown("target", what)
	p.target = func(*packetsim.Effect) error { return err }
}

// plain makes the target one that changes no packet and has no options.
func (p *parser) plain(to packetsim.Effect, options []string) error {
	if len(options) > 0 {
		return fmt.Errorf("it takes no option %s", options[0])
	}
	p.target = func(e *packetsim.Effect) error {
		e.End, e.Next, e.Chain = to.End, to.Next, to.Chain
		return nil
	}
	return nil
}

// only refuses a target outside of a table.
func (p *parser) only(table string) error {
	if p.table != table {
		return fmt.Errorf("it belongs into table %s", table)
	}
	return nil
}

// at is a target that is possible at some hooks only.
func at(name string, do func(*packetsim.Effect), hooks ...packetsim.Hook) target {
	return func(e *packetsim.Effect) error {
		if !slices.Contains(hooks, e.Packet.Hook) {
			return fmt.Errorf("%s is not possible at %s", name, e.Packet.Hook)
		}
		do(e)
		return nil
	}
}

func (p *parser) drop(options []string) error {
	if p.table == "nat" {
		return errors.New("table nat is not for filtering")
	}
	return p.plain(packetsim.Effect{End: packetsim.Drop}, options)
}

func (p *parser) reject(options []string) error {
	if err := p.only("filter"); err != nil {
		return err
	}
	p.target = at("REJECT", func(e *packetsim.Effect) { e.End = packetsim.Reject }, packetsim.Input, packetsim.Forward, packetsim.Output)
	switch {
	case len(options) == 0:
		return nil
	case len(options) != 2 || options[0] != "--reject-with":
		return fmt.Errorf("%q are no options of it", options)
	}
	with := options[1]
	switch {
	case with == "tcp-reset" && p.protocol != "tcp":
		return errors.New("tcp-reset needs -p tcp")
	case with != "tcp-reset" && strings.HasPrefix(with, "icmp6-") != (p.machine.Family == plan.IPv6):
		return fmt.Errorf("%s is not of %s", with, p.machine.Family)
	}
	return nil
}

// parseEndpoint reads an address, perhaps in brackets, with port 0 where it has none.
func parseEndpoint(text string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return netip.AddrPortFrom(a, 0), nil
	}
	to, err := netip.ParseAddrPort(text)
	if err != nil {
		return to, fmt.Errorf("%q is no address, with or without port", text)
	}
	return to, nil
}

func (p *parser) dnat(options []string) error {
	if err := p.only("nat"); err != nil {
		return err
	}
	var to netip.AddrPort
	for len(options) > 0 {
		switch {
		case options[0] == "--random" || options[0] == "--persistent":
			options = options[1:]
		case options[0] == "--to-destination" && len(options) > 1:
			var err error
			if to, err = parseEndpoint(options[1]); err != nil {
				return err
			}
			options = options[2:]
		default:
			return fmt.Errorf("%s is no option of it", options[0])
		}
	}
	switch {
	case !to.IsValid():
		return errors.New("it has no --to-destination")
	case plan.FamilyOf(to.Addr()) != p.machine.Family:
		return fmt.Errorf("%s is not an %s address", to.Addr(), p.machine.Family)
	case to.Port() != 0 && !slices.Contains(portProtocols, p.protocol):
		return errors.New("a port needs -p tcp, udp or sctp")
	}
	p.target = at("DNAT", func(e *packetsim.Effect) {
		e.End, e.Packet.DNAT = packetsim.Accept, true
		e.Packet.Translate(to)
	}, packetsim.PreRouting, packetsim.Output)
	return nil
}

func (p *parser) masquerade(options []string) error {
	for _, o := range options {
		if o != "--random" && o != "--random-fully" {
			return fmt.Errorf("%s is no option that is known", o)
		}
	}
	p.target = at("MASQUERADE", func(e *packetsim.Effect) {
		e.End, e.Packet.Masquerade = packetsim.Accept, true
	}, packetsim.PostRouting)
	return p.only("nat")
}

// setMark clears bits in the mark, and then flips some.
func (p *parser) setMark(options []string) error {
	if len(options) != 2 {
		return errors.New("it takes one option with one value")
	}
	value, mask, err := ParseMark(options[1])
	if err != nil {
		return err
	}
	clears := map[string]uint32{"--set-xmark": mask, "--set-mark": value | mask, "--or-mark": value, "--and-mark": ^value, "--xor-mark": 0}
	bits, known := clears[options[0]]
	if !known {
		return fmt.Errorf("%s is no option of it", options[0])
	}
	if options[0] == "--and-mark" {
		value = 0
	}
	p.target = func(e *packetsim.Effect) error {
		e.Packet.Mark = e.Packet.Mark&^bits ^ value
		return nil
	}
	return nil
}

// mapSet gives a packet that is in a set the mark of its entry there (--map-set with --map-mark). Other options of target SET are not
// known.
func (p *parser) mapSet(options []string) error {
	text := strings.Join(slices.Concat([]string{"SET"}, options), " ")
	if len(options) == 0 || options[0] != "--map-set" {
		p.foreign(text)
		return nil
	}
	if err := p.only("mangle"); err != nil {
		return err
	}
	if len(options) < 3 {
		return errors.New("--map-set needs a set and flags")
	}
	s, flags, err := p.set(options[1], options[2])
	switch {
	case err != nil:
		return err
	case len(options) == 3:
		return errors.New("--map-set needs --map-mark")
	case !slices.Equal(options[3:], []string{"--map-mark"}):
		p.foreign(text)
		return nil
	}
	p.lookups = append(p.lookups, lookup{s, flags})
	p.target = func(e *packetsim.Effect) error {
		entry, found, err := s.Find(&e.Packet, flags)
		if found {
			e.Packet.Mark = e.Packet.Mark&^entry.Mask ^ entry.Mark
		}
		return err
	}
	return nil
}
