package packetsim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// parseSetFlags reads a list of src and dst. What comes out is true where it says src.
func parseSetFlags(text string) ([]bool, error) {
	var out []bool
	for _, f := range strings.Split(text, ",") {
		if f != "src" && f != "dst" {
			return nil, fmt.Errorf("%q is neither src nor dst", f)
		}
		out = append(out, f == "src")
	}
	return out, nil
}

// namedSet reads a set's name and flags. As for iptables-restore, the set must exist.
func (p *parser) namedSet(name, flags string) (*set, []bool, error) {
	s := p.sets[name]
	if s == nil {
		return nil, nil, fmt.Errorf("there is no set %s", name)
	}
	list, err := parseSetFlags(flags)
	return s, list, err
}

// setModule asks whether a packet is in a set.
type setModule struct{ is setMatch }

type setMatch struct {
	set   *set
	flags []bool
	not   bool
}

func (m *setModule) option(p *parser, name string, not bool) (bool, error) {
	if name != "--match-set" {
		return false, nil
	}
	if len(p.words) < 2 {
		return true, errors.New("option --match-set needs a set and flags")
	}
	var err error
	m.is.not = not
	m.is.set, m.is.flags, err = p.namedSet(p.next(), p.next())
	return true, err
}

func (m *setModule) finish(*parser) (matcher, error) {
	if m.is.set == nil {
		return nil, errors.New("it needs --match-set")
	}
	return m.is, nil
}

func (m setMatch) match(p *packet) (float64, error) {
	_, found, err := m.set.find(p, m.flags)
	return is(found, m.not), err
}

// mapMark gives a packet that is in a set the mark of its entry there (SET --map-set … --map-mark).
type mapMark struct {
	set   *set
	flags []bool
}

func (t mapMark) apply(p *packet) error {
	e, found, err := t.set.find(p, t.flags)
	if found {
		p.mark = p.mark&^e.mask ^ e.mark
	}
	return err
}

// setTarget reads the options of target SET, of which the simulator follows --map-set with --map-mark.
func (p *parser) setTarget(options []string) (target, error) {
	if len(options) == 0 || options[0] != "--map-set" {
		return unknownTarget{strings.Join(slices.Concat([]string{"SET"}, options), " ")}, nil
	}
	if p.table != "mangle" {
		return nil, errors.New("--map-set belongs into table mangle")
	}
	if len(options) < 3 {
		return nil, errors.New("--map-set needs a set and flags")
	}
	s, flags, err := p.namedSet(options[1], options[2])
	switch {
	case err != nil:
		return nil, err
	case len(options) == 3:
		return nil, errors.New("--map-set needs --map-mark")
	case len(options) > 4 || options[3] != "--map-mark":
		return unknownTarget{strings.Join(slices.Concat([]string{"SET"}, options), " ")}, nil
	}
	return mapMark{set: s, flags: flags}, nil
}
