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

// Sets adds a text as "ipset restore" takes it and "ipset save" prints it. The error names the line, and stands
// for one that ipset or the kernel would refuse; what came before it is then in.
func Sets(m *packetsim.Machine, text string) error {
	return eachLine(m, "sets", text, func(o origin) error {
		if o.text == "COMMIT" {
			return nil
		}
		return setCommand(m, o.text)
	})
}

func setCommand(m *packetsim.Machine, line string) error {
	words, err := Words(line)
	if err != nil {
		return err
	}
	isExist := func(w string) bool { return w == "-exist" || w == "-!" }
	exist := slices.ContainsFunc(words, isExist)
	words = slices.DeleteFunc(words, isExist)
	if len(words) < 2 {
		return errors.New("a command needs a set")
	}
	command, name, rest := words[0], words[1], words[2:]
	old := m.Sets[name]
	if command == "create" {
		s, err := newSet(m, name, rest)
		switch {
		case err != nil:
			return err
		case old != nil && !(exist && sameType(old, s)):
			return errors.New("the set exists")
		case old == nil:
			m.Sets[name] = s
		}
		return nil
	}
	if old == nil {
		return fmt.Errorf("there is no set %s", name)
	}
	s := setText{old}
	switch command {
	case "add":
		return s.add(rest, exist)
	case "del":
		return s.delete(rest, exist)
	case "flush":
		clear(s.Entries)
		return nil
	case "destroy":
		if r := userOf(m, old); r != nil {
			return fmt.Errorf("the set is still in use by %s", r)
		}
		delete(m.Sets, name)
		return nil
	}
	return fmt.Errorf("command %s is not known", command)
}

// userOf returns a rule that holds a set, or nil.
func userOf(m *packetsim.Machine, s *packetsim.Set) *rule {
	for _, chains := range m.Tables {
		for _, c := range chains {
			for r := range rules(c) {
				if slices.Contains(r.sets, s) {
					return r
				}
			}
		}
	}
	return nil
}

// sameType reports whether two sets were created alike.
func sameType(a, b *packetsim.Set) bool {
	return slices.Equal(a.Dimensions, b.Dimensions) && a.Family == b.Family && a.Ports == b.Ports && a.MaxElem == b.MaxElem &&
		slices.Equal(a.Extensions, b.Extensions)
}

// newSet reads what follows "create NAME".
func newSet(m *packetsim.Machine, name string, words []string) (*packetsim.Set, error) {
	s := &packetsim.Set{Name: name, MaxElem: 65536, Entries: map[packetsim.Element]packetsim.Entry{}}
	switch {
	case len(name) > 31:
		return nil, errors.New("a set's name has at most 31 characters")
	case len(words) == 0:
		return nil, errors.New("a set needs a type")
	}
	if err := setType(s, words[0]); err != nil {
		return nil, err
	}
	if err := createOptions(s, words[1:]); err != nil {
		return nil, err
	}
	if s.Family != 0 && s.Family != m.Family {
		return nil, fmt.Errorf("it is a set of %s addresses", s.Family)
	}
	return s, nil
}

func setType(s *packetsim.Set, name string) error {
	if name == "bitmap:port" {
		s.Dimensions = []string{"port"}
		return nil
	}
	list, ok := strings.CutPrefix(name, "hash:")
	s.Dimensions, s.Family = strings.Split(list, ","), plan.IPv4
	unknown := func(d string) bool { return d != "ip" && d != "net" && d != "port" }
	if !ok || len(s.Dimensions) > packetsim.MaxSetDimensions || s.Dimensions[0] == "port" || slices.ContainsFunc(s.Dimensions, unknown) {
		return fmt.Errorf("the simulator does not know set type %s", name)
	}
	return nil
}

func createOptions(s *packetsim.Set, words []string) error {
	ranged := false
	err := options(words, []string{"skbinfo", "counters", "comment", "forceadd"}, func(name, value string) (err error) {
		switch name {
		case "skbinfo", "counters", "comment", "forceadd":
			s.Extensions = append(s.Extensions, name)
		case "family":
			families := map[string]plan.Family{"inet": plan.IPv4, "-4": plan.IPv4, "inet6": plan.IPv6, "-6": plan.IPv6}
			if s.Family == 0 {
				return errors.New("a set of ports has no family")
			}
			if s.Family = families[value]; s.Family == 0 {
				return fmt.Errorf("%s is no family", value)
			}
		case "hashsize", "bucketsize", "initval":
			_, err = strconv.ParseUint(value, 0, 32)
		case "maxelem":
			s.MaxElem, err = strconv.Atoi(value)
		case "range":
			ranged = true
			s.Ports, err = parsePorts(strings.Replace(value, "-", ":", 1))
		default:
			return fmt.Errorf("the simulator does not know option %s of a set", name)
		}
		return err
	})
	slices.Sort(s.Extensions)
	if err == nil && ranged != (s.Family == 0) {
		return errors.New("a set has a range if it is a bitmap, and only then")
	}
	return err
}

// options reads options, each of which has a value unless it is one of flags.
func options(words, flags []string, read func(name, value string) error) error {
	for len(words) > 0 {
		name, value := words[0], ""
		words = words[1:]
		if !slices.Contains(flags, name) {
			if len(words) == 0 {
				return fmt.Errorf("option %s is not known, or has no value", name)
			}
			value, words = words[0], words[1:]
		}
		if err := read(name, value); err != nil {
			return fmt.Errorf("option %s: %w", name, err)
		}
	}
	return nil
}

// setText reads entries of a set.
type setText struct{ *packetsim.Set }

func (s setText) add(words []string, exist bool) error {
	elements, err := s.elements(words)
	if err != nil {
		return err
	}
	var e packetsim.Entry
	flags := []string{}
	if slices.Contains(s.Dimensions, "net") {
		flags = append(flags, "nomatch")
	}
	err = options(words[1:], flags, func(name, value string) (err error) {
		switch name {
		case "nomatch":
			e.NoMatch = true
		case "comment":
		case "skbmark", "skbprio", "skbqueue":
			if !slices.Contains(s.Extensions, "skbinfo") {
				return errors.New("the set was created without skbinfo")
			}
			if name == "skbmark" {
				e.Mark, e.Mask, err = ParseMark(value)
			}
		default:
			return fmt.Errorf("the simulator does not know option %s of an entry", name)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, el := range elements {
		if _, is := s.Entries[el]; is && !exist {
			return errors.New("the entry is in the set already")
		} else if !is && s.Family != 0 && len(s.Entries) >= s.MaxElem {
			return fmt.Errorf("the set is full, with %d entries", s.MaxElem)
		}
		s.Entries[el] = e
	}
	return nil
}

func (s setText) delete(words []string, exist bool) error {
	elements, err := s.elements(words)
	if err != nil {
		return err
	}
	for _, el := range elements {
		if _, is := s.Entries[el]; !is && !exist {
			return errors.New("there is no such entry in the set")
		}
		delete(s.Entries, el)
	}
	return nil
}

// elements reads the first word: one element, or as many as its range of ports has.
func (s setText) elements(words []string) ([]packetsim.Element, error) {
	if len(words) == 0 {
		return nil, errors.New("there is no entry")
	}
	parts := strings.Split(words[0], ",")
	if len(parts) != len(s.Dimensions) {
		return nil, fmt.Errorf("an entry of set %s has %d parts", s.Name, len(s.Dimensions))
	}
	var el packetsim.Element
	at, ports := 0, plan.PortRange{}
	for i, part := range parts {
		var err error
		if s.Dimensions[i] == "port" {
			at = i
			el[i].Protocol, ports, err = s.ports(part)
		} else {
			el[i].Prefix, err = s.address(part, s.Dimensions[i] == "net")
		}
		if err != nil {
			return nil, err
		}
	}
	var out []packetsim.Element
	for port := int(ports.First); port <= int(ports.Last); port++ {
		el[at].Port = uint16(port)
		out = append(out, el)
	}
	return out, nil
}

// ports reads "[protocol:]port[-port]"; the protocol is TCP where none is given, and a bitmap has none.
func (s setText) ports(text string) (string, plan.PortRange, error) {
	protocol, rest, found := strings.Cut(text, ":")
	if !found {
		protocol, rest = "tcp", text
	}
	protocol = strings.ToLower(protocol)
	ports, err := parsePorts(strings.Replace(rest, "-", ":", 1))
	switch {
	case err != nil:
		return "", ports, err
	case !slices.Contains(portProtocols, protocol):
		return "", ports, fmt.Errorf("%q is no protocol with ports", protocol)
	case s.Family != 0:
		return protocol, ports, nil
	case found:
		return "", ports, errors.New("an entry of a bitmap of ports has no protocol")
	case !s.Ports.Contains(ports.First) || !s.Ports.Contains(ports.Last):
		return "", ports, fmt.Errorf("the set holds ports from %d to %d", s.Ports.First, s.Ports.Last)
	}
	return "", ports, nil
}

// address reads an address, or, if it may be a net, a range as well. The kernel takes no net of length 0.
func (s setText) address(text string, net bool) (netip.Prefix, error) {
	prefix, err := parsePrefix(text, s.Family)
	switch {
	case err != nil:
	case !net && !prefix.IsSingleIP():
		err = fmt.Errorf("the simulator reads single addresses only, and not %s", text)
	case prefix.Bits() == 0:
		err = fmt.Errorf("the kernel takes no net of length 0: %s", text)
	}
	return prefix, err
}
