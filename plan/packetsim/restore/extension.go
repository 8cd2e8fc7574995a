package restore

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/bpf"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// extension is a match extension that a rule loads with -m. Its options add conditions to the rule.
type extension struct {
	name      string
	options   map[string]option
	seen      map[string]bool
	needs     string   // the option without which the extension is refused, if there is one
	protocols []string // The rule must have -p with one of them; nil for none.
	end       func()   // adds the condition that the options make together; nil for none
}

// option is an option of an extension.
type option struct {
	values int
	plain  bool // It is not known with an exclamation mark.
	read   func(values []string, not bool) error
}

// flag is an option without a value.
func flag(read func(not bool)) option {
	return option{read: func(_ []string, not bool) error { read(not); return nil }}
}

// one is an option with one value.
func one(read func(value string, not bool) error) option {
	return option{values: 1, read: func(v []string, not bool) error { return read(v[0], not) }}
}

// ignored is an option whose value does not matter.
var ignored = one(func(string, bool) error { return nil })

// extensions are the match extensions that are known.
var extensions = map[string]func(p *parser) extension{
	"comment":   func(*parser) extension { return extension{options: map[string]option{"--comment": ignored}} },
	"tcp":       tcpExtension,
	"udp":       func(p *parser) extension { return portExtension(p, "udp") },
	"sctp":      func(p *parser) extension { return portExtension(p, "sctp") },
	"multiport": multiportExtension,
	"addrtype":  addrtypeExtension,
	"mark":      markExtension,
	"conntrack": conntrackExtension,
	"state":     func(p *parser) extension { return extension{options: map[string]option{"--state": stateOption(p)}} },
	"statistic": statisticExtension,
	"recent":    recentExtension,
	"set":       setExtension,
	"ipvs":      ipvsExtension,
	"bpf":       bpfExtension,
}

// finish is called at the end of the rule.
func (x extension) finish(p *parser) error {
	switch {
	case x.protocols != nil && !slices.Contains(x.protocols, p.protocol):
		return fmt.Errorf("it needs -p with one of %s", strings.Join(x.protocols, ", "))
	case x.needs != "" && !x.seen[x.needs]:
		return fmt.Errorf("it needs %s", x.needs)
	case x.end != nil:
		x.end()
	}
	return nil
}

// ports adds a condition for the destination port.
func (p *parser) ports(texts []string, not bool) error {
	var ranges []plan.PortRange
	for _, text := range texts {
		r, err := parsePorts(text)
		if err != nil {
			return err
		}
		ranges = append(ranges, r)
	}
	p.when(not, func(pkt *packetsim.Packet) bool {
		return slices.ContainsFunc(ranges, func(r plan.PortRange) bool { return r.Contains(pkt.Port) })
	})
	return nil
}

func portExtension(p *parser, protocol string) extension {
	port := option{values: 1, read: p.ports}
	return extension{protocols: []string{protocol}, options: map[string]option{"--dport": port, "--destination-port": port}}
}

// tcpFlags are the names that flags of TCP have in rules.
var tcpFlags = map[string]byte{"FIN": 1, "SYN": 2, "RST": 4, "PSH": 8, "ACK": 16, "URG": 32, "ALL": 63, "NONE": 0}

// tcpExtension compares the flags, too: the first packet of a connection has SYN alone.
func tcpExtension(p *parser) extension {
	x := portExtension(p, "tcp")
	x.options["--tcp-flags"] = option{values: 2, read: func(v []string, not bool) error {
		var bits [2]byte // those that are looked at, and which of them are to be set
		for i, list := range v {
			for name := range strings.SplitSeq(list, ",") {
				bit, known := tcpFlags[name]
				if !known {
					return fmt.Errorf("there is no TCP flag %q", name)
				}
				bits[i] |= bit
			}
		}
		p.when(not, func(*packetsim.Packet) bool { return tcpFlags["SYN"]&bits[0] == bits[1] })
		return nil
	}}
	return x
}

func multiportExtension(p *parser) extension {
	ports := one(func(value string, not bool) error { return p.ports(strings.Split(value, ","), not) })
	return extension{protocols: portProtocols, options: map[string]option{"--dports": ports, "--destination-ports": ports}}
}

// addrtypeExtension asks whether addresses are the node's.
func addrtypeExtension(p *parser) extension {
	local := func(of func(*packetsim.Packet) netip.Addr) option {
		return one(func(value string, not bool) error {
			if value != "LOCAL" {
				p.fails(p.notKnown("address type", value))
				return nil
			}
			p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Local(of(pkt)) })
			return nil
		})
	}
	return extension{options: map[string]option{"--src-type": local(srcOf), "--dst-type": local(dstOf)}}
}

func markExtension(p *parser) extension {
	return extension{options: map[string]option{"--mark": one(func(text string, not bool) error {
		value, mask, err := ParseMark(text)
		p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Mark&mask == value })
		return err
	})}}
}

// conntrackExtension compares what connection tracking says.
func conntrackExtension(p *parser) extension {
	original := one(func(value string, _ bool) error {
		prefix, err := parsePrefix(value, p.machine.Family)
		p.when(false, func(pkt *packetsim.Packet) bool { return prefix.Contains(pkt.Original) })
		return err
	})
	original.plain = true
	return extension{options: map[string]option{"--ctstate": stateOption(p), "--ctorigdst": original}}
}

var states = []string{"NEW", "ESTABLISHED", "RELATED", "INVALID", "UNTRACKED", "SNAT", "DNAT"}

// stateOption compares a connection's state. A first packet's state is NEW, and DNAT besides once its destination was changed.
func stateOption(p *parser) option {
	return one(func(value string, not bool) error {
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
	})
}

// statisticExtension leaves it to chance.
func statisticExtension(p *parser) extension {
	return extension{needs: "--mode", options: map[string]option{
		"--mode": one(func(mode string, _ bool) error {
			if mode != "random" {
				p.fails(p.notKnown("statistic mode", mode))
			}
			return nil
		}),
		"--probability": one(func(value string, not bool) error {
			chance, err := strconv.ParseFloat(value, 64)
			if err != nil || !(chance >= 0 && chance <= 1) {
				return fmt.Errorf("%q is no probability", value)
			}
			if not {
				chance = 1 - chance
			}
			p.matches = append(p.matches, func(*packetsim.Packet) (float64, error) { return chance, nil })
			return nil
		}),
	}}
}

// recentExtension asks a list of addresses, or adds to it, which is always true.
func recentExtension(p *parser) extension {
	var list string
	var checks, byDst, not bool
	check := flag(func(inverted bool) { checks, not = true, inverted })
	return extension{
		options: map[string]option{
			"--set": flag(func(inverted bool) { not = inverted }), "--rcheck": check, "--update": check,
			"--rsource": flag(func(bool) {}), "--reap": flag(func(bool) {}), "--rdest": flag(func(bool) { byDst = true }),
			"--name":    one(func(name string, _ bool) error { list = name; return nil }),
			"--seconds": ignored, "--hitcount": ignored, "--mask": ignored,
		},
		end: func() {
			p.when(not, func(pkt *packetsim.Packet) bool {
				addr := pkt.Src
				if byDst {
					addr = pkt.Dst
				}
				return !checks || pkt.Recent(list, addr)
			})
		},
	}
}

// setExtension asks whether a packet is in a set.
func setExtension(p *parser) extension {
	return extension{needs: "--match-set", options: map[string]option{"--match-set": {values: 2, read: func(v []string, not bool) error {
		s, flags, err := p.set(v[0], v[1])
		if err == nil && !not {
			p.lookups = append(p.lookups, lookup{s, flags})
		}
		p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
			_, found, err := s.Find(pkt, flags)
			return is(found, not), err
		})
		return err
	}}}}
}

// ipvsExtension asks whether IPVS has taken the packet, and as one for which virtual server. What is asked of a server does
// not hold for a packet that IPVS has not taken, not even inverted.
func ipvsExtension(p *parser) extension {
	server := func(not bool, holds func(*packetsim.Packet) bool) {
		p.when(false, func(pkt *packetsim.Packet) bool { return pkt.Virtual.IsValid() && holds(pkt) != not })
	}
	return extension{options: map[string]option{
		"--ipvs": flag(func(not bool) { p.when(not, func(pkt *packetsim.Packet) bool { return pkt.Virtual.IsValid() }) }),
		"--vproto": one(func(value string, not bool) error {
			server(not, func(pkt *packetsim.Packet) bool { return parseProtocol(value) == pkt.Protocol })
			return nil
		}),
		"--vaddr": one(func(value string, not bool) error {
			prefix, err := parsePrefix(value, p.machine.Family)
			server(not, func(pkt *packetsim.Packet) bool { return prefix.Contains(pkt.Virtual.Addr()) })
			return err
		}),
		"--vport": one(func(value string, not bool) error {
			port, err := strconv.ParseUint(value, 10, 16)
			server(not, func(pkt *packetsim.Packet) bool { return uint16(port) == pkt.Virtual.Port() })
			return err
		}),
		"--vdir": one(func(value string, not bool) error {
			if value != "ORIGINAL" && value != "REPLY" {
				return fmt.Errorf("%s is no direction", value)
			}
			server(not, func(*packetsim.Packet) bool { return value == "ORIGINAL" })
			return nil
		}),
	}}
}

// bpfExtension runs a program of classic BPF on the packet, from its network header on.
func bpfExtension(p *parser) extension {
	return extension{options: map[string]option{"--bytecode": one(func(text string, not bool) error {
		vm, err := parseBytecode(text)
		p.matches = append(p.matches, func(pkt *packetsim.Packet) (float64, error) {
			ret, err := vm.Run(pkt.Header())
			if err != nil {
				return 0, fmt.Errorf("bytecode: %w", err)
			}
			return is(ret != 0, not), nil
		})
		return err
	})}}
}

// parseBytecode reads "N,code jt jf k,code jt jf k,…", with N instructions.
func parseBytecode(text string) (*bpf.VM, error) {
	count, rest, _ := strings.Cut(text, ",")
	var raw []bpf.RawInstruction
	for _, word := range strings.Split(strings.TrimSuffix(rest, ","), ",") {
		var i bpf.RawInstruction
		if n, err := fmt.Sscanf(word, "%d %d %d %d", &i.Op, &i.Jt, &i.Jf, &i.K); n != 4 || err != nil {
			return nil, fmt.Errorf("%q is no BPF instruction", word)
		}
		raw = append(raw, i)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(count)); err != nil || n != len(raw) {
		return nil, fmt.Errorf("bytecode says it has %q instructions and has %d", count, len(raw))
	}
	program, known := bpf.Disassemble(raw)
	if !known {
		return nil, errors.New("the bytecode has an instruction that is not known")
	}
	return bpf.NewVM(program)
}
