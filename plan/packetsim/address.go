package packetsim

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// RestoreAddresses adds links, addresses and local routes from a text in the form of "ip -batch". What it adds to table local is
// local to the machine, in addition to Node.Local. Lines of the other family are skipped. The error names the line.
func (rs *Ruleset) RestoreAddresses(text string) error {
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if err := rs.ipCommand(strings.Fields(line)); err != nil {
			return fmt.Errorf("%s addresses, line %d: %w: %.300s", rs.family, i+1, err, line)
		}
	}
	return nil
}

func (rs *Ruleset) ipCommand(words []string) error {
	if words[0] == "-4" || words[0] == "-6" {
		words = words[1:]
	}
	if len(words) < 3 {
		return errors.New("it is no whole command")
	}
	object, verb, rest := words[0], words[1], words[2:]
	if object == "link" {
		return nil
	}
	if verb != "add" && verb != "replace" && verb != "del" {
		return fmt.Errorf("command %s is not known", verb)
	}
	switch object {
	case "address", "addr":
		return rs.ipAddress(verb, rest)
	case "route":
		return rs.ipRoute(verb, rest)
	}
	return fmt.Errorf("the simulator does not know object %s", object)
}

func (rs *Ruleset) ipAddress(verb string, words []string) error {
	addr, _, _ := strings.Cut(words[0], "/")
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return err
	}
	if err := ipOptions(words[1:]); err != nil {
		return err
	}
	return rs.changeLocal(verb, netip.PrefixFrom(a, a.BitLen()))
}

func (rs *Ruleset) ipRoute(verb string, words []string) error {
	if words[0] != "local" || len(words) < 2 {
		return fmt.Errorf("the simulator does not know routes of type %s", words[0])
	}
	prefix, err := parsePrefix(words[1])
	if err != nil {
		return err
	}
	if err := ipOptions(words[2:]); err != nil {
		return err
	}
	table := ""
	if at := slices.Index(words, "table"); at > 0 {
		table = words[at+1]
	}
	if table == "local" {
		return rs.changeLocal(verb, prefix)
	}
	if _, err := strconv.Atoi(table); err != nil || !prefix.IsSingleIP() {
		return errors.New("a local route belongs into table local, or, if it is to one address, into a table with a number")
	}
	if a := prefix.Addr(); plan.FamilyOf(a) == rs.family {
		rs.tableRoutes[tableRoute{table, a}] = verb != "del"
	}
	return nil
}

// tableRoute is a local route to an address in a table other than local.
type tableRoute struct {
	table string
	addr  netip.Addr
}

// ipRule reads a rule that leads packets with a mark to a table.
func (rs *Ruleset) ipRule(verb string, words []string) error {
	if len(words) != 6 || words[0] != "pref" || words[2] != "fwmark" || words[4] != "lookup" || verb != "add" {
		return errors.New("the simulator knows routing rules for one mark only")
	}
	mark, err := strconv.ParseUint(words[3], 0, 32)
	if err == nil {
		rs.markTables[uint32(mark)] = words[5]
	}
	return err
}

// RestoreNFT adds, from a text in the language of nft, the elements of sets of the form "address . protocol . port", the mark that
// packets to these get, and the routing table for that mark. It skips everything else: the other chains swap marks so that other
// programs' rules do not see them, and a Ruleset has no such rules.
func (rs *Ruleset) RestoreNFT(text string) error {
	const toPorts = " @ports meta priority set meta mark meta mark set "
	for i, line := range strings.Split(text, "\n") {
		words := strings.Fields(line)
		if _, mark, ok := strings.Cut(line, toPorts); ok {
			v, err := strconv.ParseUint(mark, 0, 32)
			if err != nil {
				return fmt.Errorf("nftables, line %d: %w", i+1, err)
			}
			rs.divertMark = uint32(v)
		}
		switch {
		case len(words) == 10 && words[0] == "ip" && words[2] == "rule":
			if err := rs.ipRule(words[3], words[4:]); err != nil {
				return fmt.Errorf("nftables, line %d: %w", i+1, err)
			}
			continue
		case len(words) == 0 || words[0] != "add":
			continue
		}
		var port uint16
		if len(words) != 12 || words[1] != "element" {
			return fmt.Errorf("nftables, line %d: the simulator does not know this: %.300s", i+1, line)
		}
		if _, err := fmt.Sscan(words[10], &port); err != nil {
			return fmt.Errorf("nftables, line %d: %w", i+1, err)
		}
		a, err := netip.ParseAddr(words[6])
		if err != nil {
			return fmt.Errorf("nftables, line %d: %w", i+1, err)
		}
		rs.diverted[plan.Address{Addr: a, Protocol: plan.Protocol(strings.ToUpper(words[8])), Port: port}] = true
	}
	return nil
}

// ipOptions reads what follows an address or a route, of which only the device must be there.
func ipOptions(words []string) error {
	device := false
	for len(words) > 0 {
		name := words[0]
		words = words[1:]
		switch name {
		case "nodad", "noprefixroute":
			continue
		case "dev", "table", "src", "scope", "proto", "metric", "preferred_lft":
		default:
			return fmt.Errorf("the simulator does not know option %s", name)
		}
		if len(words) == 0 {
			return fmt.Errorf("option %s has no value", name)
		}
		device = device || name == "dev"
		words = words[1:]
	}
	if !device {
		return errors.New("it names no device")
	}
	return nil
}

// changeLocal adds or removes one address, or one route; the same may not be there twice.
func (rs *Ruleset) changeLocal(verb string, prefix netip.Prefix) error {
	if plan.FamilyOf(prefix.Addr()) != rs.family {
		return nil
	}
	switch exists := rs.addresses[prefix]; {
	case verb == "add" && exists:
		return errors.New("it exists")
	case verb == "del" && !exists:
		return errors.New("there is nothing such to delete")
	case verb == "del":
		delete(rs.addresses, prefix)
	default:
		rs.addresses[prefix] = true
	}
	return nil
}

// local reports whether an address is the machine's: its own, or one that was added for Services.
func (p *packet) local(a netip.Addr) bool { return p.node.Local(a) || p.ruleset.Added(a) }

// delivered reports whether the machine takes a packet for its own. IPVS sends on only packets to such addresses.
func (p *packet) delivered() bool {
	if p.local(p.dst) || p.virtual.IsValid() {
		return p.local(p.dst)
	}
	rs := p.ruleset
	return rs.diverted[plan.Address{Addr: p.dst, Protocol: plan.Protocol(strings.ToUpper(p.protocol)), Port: p.port}] &&
		rs.tableRoutes[tableRoute{rs.markTables[rs.divertMark], p.dst}]
}

// Added reports whether RestoreAddresses has made an address local. A kernel with its usual settings takes no packet in
// whose source is such an address; Trace takes it.
func (rs *Ruleset) Added(a netip.Addr) bool {
	if rs.addresses[netip.PrefixFrom(a, a.BitLen())] {
		return true
	}
	for prefix := range rs.addresses {
		if !prefix.IsSingleIP() && prefix.Contains(a) {
			return true
		}
	}
	return false
}
