package packetsim

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/plan"
)

// target is what a rule does with a packet that matches: one of the types here, or nil for nothing.
type target any

type (
	// jump walks another chain. Unless it is a goto, the walk comes back to behind the rule.
	jump struct {
		chain  string
		goesTo bool
	}
	// leave ends the walk of a chain (RETURN).
	leave struct{}
	// accept ends the walk of a table.
	accept struct{}
	// drop and reject end everything.
	drop   struct{}
	reject struct{ with string }
	// dnat changes the destination; port 0 keeps the port.
	dnat struct {
		addr netip.Addr
		port uint16
	}
	// masquerade changes the source to the address of the interface that the packet leaves by.
	masquerade struct{}
	// setMark clears the bits of clear in the mark, then flips those of flip.
	setMark struct{ clear, flip uint32 }
	// unknownTarget is one that the simulator can't follow.
	unknownTarget struct{ name string }
)

func (t unknownTarget) error() error {
	return fmt.Errorf("the simulator does not know target %s", t.name)
}

// extensions are targets of iptables that the simulator does not know; any other name is a chain's.
var extensions = strings.Fields(`AUDIT BPF CHECKSUM CLASSIFY CLUSTERIP CONNMARK CONNSECMARK CT DNPT DSCP ECN HL HMARK
	IDLETIMER LED LOG NETMAP NFLOG NFQUEUE NOTRACK QUEUE RATEEST REDIRECT SECMARK SET SNAT SNPT SYNPROXY TCPMSS
	TCPOPTSTRIP TEE TOS TPROXY TRACE TTL ULOG`)

// target reads the target and its options, which are the rest of the rule.
func (p *parser) target(option string) error {
	if p.rule.target != nil {
		return errors.New("a rule has one target only")
	}
	name, err := p.argument(option)
	if err != nil {
		return err
	}
	options := p.words
	p.words = nil
	if option == "-g" || option == "--goto" {
		p.rule.target = jump{chain: name, goesTo: true}
	} else if p.rule.target, err = p.namedTarget(name, options); err != nil {
		return fmt.Errorf("target %s: %w", name, err)
	}
	if _, known := p.rule.target.(jump); known && len(options) > 0 {
		return fmt.Errorf("chain %s takes no option %s", name, options[0])
	}
	return nil
}

func (p *parser) namedTarget(name string, options []string) (target, error) {
	switch name {
	case "ACCEPT":
		return accept{}, none(options)
	case "RETURN":
		return leave{}, none(options)
	case "DROP":
		if p.table == "nat" {
			return nil, errors.New("table nat is not for filtering")
		}
		return drop{}, none(options)
	case "REJECT":
		return p.reject(options)
	case "DNAT":
		return p.dnat(options)
	case "MASQUERADE":
		return p.masquerade(options)
	case "MARK":
		return parseSetMark(options)
	case "SET":
		return p.setTarget(options)
	}
	if slices.Contains(extensions, name) {
		return unknownTarget{name}, nil
	}
	return jump{chain: name}, nil
}

func none(options []string) error {
	if len(options) > 0 {
		return fmt.Errorf("it takes no option %s", options[0])
	}
	return nil
}

func (p *parser) reject(options []string) (target, error) {
	if p.table != "filter" {
		return nil, errors.New("it belongs into table filter")
	}
	if len(options) == 0 {
		return reject{}, nil
	}
	if len(options) != 2 || options[0] != "--reject-with" {
		return nil, fmt.Errorf("%q are no options of it", options)
	}
	with := options[1]
	switch {
	case with == "tcp-reset" && p.protocol != "tcp":
		return nil, errors.New("tcp-reset needs -p tcp")
	case with == "tcp-reset":
	case strings.HasPrefix(with, "icmp6-") != (p.family == plan.IPv6):
		return nil, fmt.Errorf("%s is not of %s", with, p.family)
	}
	return reject{with: with}, nil
}

func (p *parser) dnat(options []string) (target, error) {
	if p.table != "nat" {
		return nil, errors.New("it belongs into table nat")
	}
	var t dnat
	for len(options) > 0 {
		switch {
		case options[0] == "--random" || options[0] == "--persistent":
			options = options[1:]
		case options[0] == "--to-destination" && len(options) > 1:
			text := options[1]
			options = options[2:]
			if a, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
				t.addr = a
				break
			}
			to, err := netip.ParseAddrPort(text)
			if err != nil {
				return nil, fmt.Errorf("%q is no address, with or without port", text)
			}
			t.addr, t.port = to.Addr(), to.Port()
		default:
			return nil, fmt.Errorf("%s is no option of it", options[0])
		}
	}
	switch {
	case !t.addr.IsValid():
		return nil, errors.New("it has no --to-destination")
	case plan.FamilyOf(t.addr) != p.family:
		return nil, fmt.Errorf("%s is not an %s address", t.addr, p.family)
	case t.port != 0 && !portProtocols[p.protocol]:
		return nil, errors.New("a port needs -p tcp, udp or sctp")
	}
	return t, nil
}

func (p *parser) masquerade(options []string) (target, error) {
	if p.table != "nat" {
		return nil, errors.New("it belongs into table nat")
	}
	for _, o := range options {
		if o != "--random" && o != "--random-fully" {
			return nil, fmt.Errorf("%s is no option that is known", o)
		}
	}
	return masquerade{}, nil
}

func parseSetMark(options []string) (target, error) {
	if len(options) != 2 {
		return nil, errors.New("it takes one option with one value")
	}
	value, mask, err := parseMark(options[1])
	if err != nil {
		return nil, err
	}
	switch options[0] {
	case "--set-xmark":
		return setMark{clear: mask, flip: value}, nil
	case "--set-mark":
		return setMark{clear: value | mask, flip: value}, nil
	case "--or-mark":
		return setMark{clear: value, flip: value}, nil
	case "--and-mark":
		return setMark{clear: ^value}, nil
	case "--xor-mark":
		return setMark{flip: value}, nil
	}
	return nil, fmt.Errorf("%s is no option of it", options[0])
}
