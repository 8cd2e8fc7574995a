package restore

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// Addresses adds links, addresses and local routes from a text in the form of "ip -batch". What it adds to table local is
// local to the machine, in addition to Node.Local. Lines of the other family are skipped. The error names the line.
func Addresses(m *packetsim.Machine, text string) error {
	return eachLine(m, "addresses", text, func(o origin) error {
		words := strings.Fields(o.text)
		if words[0] == "-4" || words[0] == "-6" {
			words = words[1:]
		}
		if len(words) < 3 {
			return errors.New("it is no whole command")
		}
		object, verb, rest := words[0], words[1], words[2:]
		switch {
		case object == "link":
			return nil
		case verb != "add" && verb != "replace" && verb != "del":
			return fmt.Errorf("command %s is not known", verb)
		case object == "address" || object == "addr":
			addr, _, _ := strings.Cut(rest[0], "/")
			return addLocal(m, verb, addr, rest[1:])
		case object == "route" && (rest[0] != "local" || len(rest) < 2):
			return fmt.Errorf("the simulator does not know routes of type %s", rest[0])
		case object == "route":
			return addLocal(m, verb, rest[1], rest[2:])
		}
		return fmt.Errorf("the simulator does not know object %s", object)
	})
}

// addLocal adds or removes one address, or one local route; the same may not be in table local twice.
func addLocal(m *packetsim.Machine, verb, dst string, words []string) error {
	device, table := "", "local"
	err := options(words, []string{"nodad", "noprefixroute"}, func(name, value string) error {
		switch name {
		case "dev":
			device = value
		case "table":
			table = value
		case "nodad", "noprefixroute", "src", "scope", "proto", "metric", "preferred_lft":
		default:
			return errors.New("the simulator does not know it")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if device == "" {
		return errors.New("it names no device")
	}
	f := plan.IPv4
	if strings.Contains(dst, ":") {
		f = plan.IPv6
	}
	prefix, err := parsePrefix(dst, f)
	if err != nil {
		return err
	}
	if table != "local" {
		if _, err := strconv.Atoi(table); err != nil || !prefix.IsSingleIP() {
			return errors.New("a local route belongs into table local, or, if it is to one address, into a table with a number")
		}
	}
	switch exists := m.Added[prefix]; {
	case f != m.Family:
	case table != "local":
		m.TableRoutes[packetsim.TableRoute{Table: table, Addr: prefix.Addr()}] = verb != "del"
	case verb == "add" && exists:
		return errors.New("it exists")
	case verb == "del" && !exists:
		return errors.New("there is nothing such to delete")
	case verb == "del":
		delete(m.Added, prefix)
	default:
		m.Added[prefix] = true
	}
	return nil
}

// Diversions adds, from a text in the language of nft, the elements of sets of the form "address . protocol . port", the mark that
// packets to these get, and the routing table for that mark. It skips everything else: the other chains swap marks so that other
// programs' rules do not see them, and a Machine has no such rules.
func Diversions(m *packetsim.Machine, text string) error {
	return eachLine(m, "nftables", text, func(o origin) error {
		words := strings.Fields(o.text)
		_, mark, marks := strings.Cut(o.text, " @ports meta priority set meta mark meta mark set ")
		switch {
		case marks:
			v, err := strconv.ParseUint(mark, 0, 32)
			m.DivertMark = uint32(v)
			return err
		case len(words) == 10 && words[0] == "ip" && words[2] == "rule":
			return routingRule(m, words[3:])
		case words[0] == "add":
			return divert(m, words[1:])
		}
		return nil
	})
}

// routingRule reads a rule that leads packets with a mark to a table: "add pref N fwmark MARK lookup TABLE".
func routingRule(m *packetsim.Machine, words []string) error {
	if !slices.Equal([]string{words[0], words[1], words[3], words[5]}, []string{"add", "pref", "fwmark", "lookup"}) {
		return errors.New("the simulator knows routing rules for one mark only")
	}
	mark, err := strconv.ParseUint(words[4], 0, 32)
	m.MarkTables[uint32(mark)] = words[6]
	return err
}

// divert reads "element FAMILY TABLE SET { ADDRESS . PROTOCOL . PORT }".
func divert(m *packetsim.Machine, words []string) error {
	if len(words) != 11 || words[0] != "element" {
		return errors.New("the simulator does not know this")
	}
	a, err := netip.ParseAddr(words[5])
	if err != nil {
		return err
	}
	port, err := strconv.ParseUint(words[9], 10, 16)
	m.Diverted[plan.Address{Addr: a, Protocol: plan.Protocol(strings.ToUpper(words[7])), Port: uint16(port)}] = true
	return err
}
