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

// RestoreSets adds a text as "ipset restore" takes it and "ipset save" prints it. The error names the line, and stands
// for one that ipset or the kernel would refuse; what came before it is then in.
func (rs *Ruleset) RestoreSets(text string) error {
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line == "COMMIT" {
			continue
		}
		if err := rs.setCommand(line); err != nil {
			return fmt.Errorf("%s sets, line %d: %w: %.300s", rs.family, i+1, err, line)
		}
	}
	return nil
}

func (rs *Ruleset) setCommand(line string) error {
	words, err := split(line)
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
	if command == "create" {
		return rs.createSet(name, rest, exist)
	}
	s := rs.sets[name]
	if s == nil {
		return fmt.Errorf("there is no set %s", name)
	}
	switch command {
	case "add":
		return s.add(rest, exist)
	case "del":
		return s.delete(rest, exist)
	case "flush":
		clear(s.entries)
		return nil
	case "destroy":
		if r := rs.userOf(s); r != nil {
			return fmt.Errorf("the set is still in use by %s", r)
		}
		delete(rs.sets, name)
		return nil
	}
	return fmt.Errorf("command %s is not known", command)
}

// userOf returns a rule that holds a set, or nil.
func (rs *Ruleset) userOf(s *set) *rule {
	for _, chains := range rs.tables {
		for _, c := range chains {
			for _, r := range c.rules {
				if t, ok := r.target.(mapMark); ok && t.set == s {
					return r
				}
				if slices.ContainsFunc(r.matches, func(m matcher) bool {
					sm, ok := m.(setMatch)
					return ok && sm.set == s
				}) {
					return r
				}
			}
		}
	}
	return nil
}

func (rs *Ruleset) createSet(name string, words []string, exist bool) error {
	if len(name) > 31 {
		return errors.New("a set's name has at most 31 characters")
	}
	if old := rs.sets[name]; old != nil {
		if exist && old.options == strings.Join(words, " ") {
			return nil
		}
		return errors.New("the set exists")
	}
	s := &set{name: name, maxElem: 65536, last: 65535, options: strings.Join(words, " "), entries: map[element]entry{}}
	if len(words) == 0 {
		return errors.New("a set needs a type")
	}
	if err := s.setType(words[0]); err != nil {
		return err
	}
	if err := s.createOptions(words[1:]); err != nil {
		return err
	}
	if s.family != 0 && s.family != rs.family {
		return fmt.Errorf("it is a set of %s addresses", s.family)
	}
	rs.sets[name] = s
	return nil
}

func (s *set) setType(name string) error {
	if name == "bitmap:port" {
		s.dimensions = []string{"port"}
		return nil
	}
	list, ok := strings.CutPrefix(name, "hash:")
	s.dimensions = strings.Split(list, ",")
	s.family = plan.IPv4
	known := func(d string) bool { return d == "ip" || d == "net" || d == "port" }
	if !ok || len(s.dimensions) > maxSetDimensions || s.dimensions[0] == "port" ||
		slices.ContainsFunc(s.dimensions, func(d string) bool { return !known(d) }) {
		return fmt.Errorf("the simulator does not know set type %s", name)
	}
	return nil
}

func (s *set) createOptions(words []string) error {
	ranged := false
	for len(words) > 0 {
		name := words[0]
		words = words[1:]
		switch name {
		case "skbinfo":
			s.skbInfo = true
			continue
		case "counters", "comment", "forceadd":
			continue
		}
		if len(words) == 0 {
			return fmt.Errorf("option %s is not known, or has no value", name)
		}
		value := words[0]
		words = words[1:]
		var err error
		switch name {
		case "family":
			if s.family == 0 {
				return errors.New("a set of ports has no family")
			}
			s.family, err = setFamily(value)
		case "hashsize", "bucketsize", "initval":
			_, err = strconv.ParseUint(value, 0, 32)
		case "maxelem":
			s.maxElem, err = strconv.Atoi(value)
		case "range":
			ranged = true
			var r [2]uint16
			r, err = parsePorts(strings.Replace(value, "-", ":", 1))
			s.first, s.last = r[0], r[1]
		default:
			return fmt.Errorf("the simulator does not know option %s of a set", name)
		}
		if err != nil {
			return fmt.Errorf("option %s: %w", name, err)
		}
	}
	if ranged != (s.family == 0) {
		return errors.New("a set has a range if it is a bitmap, and only then")
	}
	return nil
}

func setFamily(name string) (plan.Family, error) {
	switch name {
	case "inet", "-4":
		return plan.IPv4, nil
	case "inet6", "-6":
		return plan.IPv6, nil
	}
	return 0, fmt.Errorf("%s is no family", name)
}

func (s *set) add(words []string, exist bool) error {
	elements, err := s.elements(words)
	if err != nil {
		return err
	}
	var e entry
	for rest := words[1:]; len(rest) > 0; rest = rest[1:] {
		name := rest[0]
		if name == "nomatch" && slices.Contains(s.dimensions, "net") {
			e.noMatch = true
			continue
		}
		if rest = rest[1:]; len(rest) == 0 {
			return fmt.Errorf("option %s is not known, or has no value", name)
		}
		switch name {
		case "comment":
		case "skbmark", "skbprio", "skbqueue":
			if !s.skbInfo {
				return fmt.Errorf("the set was created without skbinfo, so it takes no %s", name)
			}
			if name != "skbmark" {
				continue
			}
			if e.mark, e.mask, err = parseMark(rest[0]); err != nil {
				return err
			}
		default:
			return fmt.Errorf("the simulator does not know option %s of an entry", name)
		}
	}
	for _, el := range elements {
		if _, is := s.entries[el]; is && !exist {
			return errors.New("the entry is in the set already")
		} else if !is && s.family != 0 && len(s.entries) >= s.maxElem {
			return fmt.Errorf("the set is full, with %d entries", s.maxElem)
		}
		s.entries[el] = e
	}
	return nil
}

func (s *set) delete(words []string, exist bool) error {
	elements, err := s.elements(words)
	if err != nil {
		return err
	}
	for _, el := range elements {
		if _, is := s.entries[el]; !is && !exist {
			return errors.New("there is no such entry in the set")
		}
		delete(s.entries, el)
	}
	return nil
}

// elements reads the first word: one element, or as many as its range of ports has.
func (s *set) elements(words []string) ([]element, error) {
	if len(words) == 0 {
		return nil, errors.New("there is no entry")
	}
	parts := strings.Split(words[0], ",")
	if len(parts) != len(s.dimensions) {
		return nil, fmt.Errorf("an entry of set %s has %d parts", s.name, len(s.dimensions))
	}
	var el element
	at, ports := -1, [2]uint16{}
	for i, part := range parts {
		var err error
		if s.dimensions[i] == "port" {
			at = i
			el[i].protocol, ports, err = s.readPorts(part)
		} else {
			el[i].prefix, err = s.readAddress(part, s.dimensions[i] == "net")
		}
		if err != nil {
			return nil, err
		}
	}
	if at < 0 {
		return []element{el}, nil
	}
	var out []element
	for port := int(ports[0]); port <= int(ports[1]); port++ {
		el[at].port = uint16(port)
		out = append(out, el)
	}
	return out, nil
}

// readPorts reads "[protocol:]port[-port]"; the protocol is TCP where none is given, and a bitmap has none.
func (s *set) readPorts(text string) (string, [2]uint16, error) {
	protocol, rest, found := strings.Cut(text, ":")
	if !found {
		protocol, rest = "tcp", text
	}
	protocol = strings.ToLower(protocol)
	ports, err := parsePorts(strings.Replace(rest, "-", ":", 1))
	switch {
	case err != nil:
		return "", ports, err
	case !portProtocols[protocol]:
		return "", ports, fmt.Errorf("%q is no protocol with ports", protocol)
	case s.family != 0:
		return protocol, ports, nil
	case found:
		return "", ports, errors.New("an entry of a bitmap of ports has no protocol")
	case ports[0] < s.first || ports[1] > s.last:
		return "", ports, fmt.Errorf("the set holds ports from %d to %d", s.first, s.last)
	}
	return "", ports, nil
}

// readAddress reads an address, or, if it may be a net, a range as well. The kernel takes no net of length 0.
func (s *set) readAddress(text string, net bool) (netip.Prefix, error) {
	prefix, err := parsePrefix(text)
	switch {
	case err != nil:
		return prefix, err
	case plan.FamilyOf(prefix.Addr()) != s.family:
		return prefix, fmt.Errorf("%s is not an %s address", text, s.family)
	case !net && !prefix.IsSingleIP():
		return prefix, fmt.Errorf("the simulator reads single addresses only, and not %s", text)
	case prefix.Bits() == 0:
		return prefix, fmt.Errorf("the kernel takes no net of length 0: %s", text)
	}
	return prefix, nil
}
