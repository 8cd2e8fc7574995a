package blocking

import (
	"encoding/binary"
	"fmt"
	"strings"

	"nodeproxy/kernel/ipset"
)

// sets are the ipsets of other programs, which rules of iptables ask. They are opened by the first question.
type sets struct {
	conn    *ipset.Sets
	names   map[uint16]string
	answers map[string]match
}

func newSets() *sets { return &sets{names: map[uint16]string{}, answers: map[string]match{}} }

func (s *sets) close() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

// open reports whether there is something to ask.
func (s *sets) open() bool {
	if s.conn == nil {
		s.conn, _ = ipset.Present() // What can't be asked is not known.
	}
	return s.conn != nil
}

// name returns the name of a set, or something that stands for it.
func (s *sets) name(index uint16) string {
	if name, is := s.names[index]; is {
		return name
	}
	name := ""
	if s.open() {
		name, _ = s.conn.NameOf(index)
	}
	s.names[index] = name
	return name
}

// contains reports whether a set has what a packet has.
func (s *sets) contains(name string, sides []side, protocol byte) match {
	at := fmt.Sprintf("%s %+v %d", name, sides, protocol)
	if m, is := s.answers[at]; is {
		return m
	}
	out := maybe
	if name != "" && s.open() {
		ask := make([]ipset.Side, len(sides))
		for i, of := range sides {
			ask[i] = ipset.Side{Addr: of.addr, Port: of.port, Known: of.known}
		}
		if is, known, err := s.conn.Contains(name, ask, protocol); err == nil && known {
			out = matches(is)
		}
	}
	s.answers[at] = out
	return out
}

// inSet adds that an ipset has something of the packet: for each part that it asks for, that of the source or of the destination.
func (j *judgement) inSet(s *sets, name string, sources []bool, invert bool) {
	var sides []side
	var words []string
	for _, source := range sources {
		of, word := j.packet.dst, "dst"
		if source {
			of, word = j.packet.src, "src"
		}
		j.specific = j.specific || of.known && source == j.packet.answer
		sides, words = append(sides, of), append(words, word)
	}
	j.depends(s.contains(name, sides, j.packet.protocol), invert, "match-set "+not(invert)+name+" "+strings.Join(words, ","))
}

// set judges struct xt_set_info_match_v4 and those before: the index of the set, for how many parts it is asked, and for each whether the source
// is meant; and then counters.
func (r *reading) set(info []byte) {
	const (
		most     = 3
		inverted = 1 << 0
		noMatch  = 1 << 7
		counters = 16 // where it begins to be said whether packets are counted, and then bytes, and how long each of these is
	)
	if len(info) < 4 || info[2] > most || info[3]&noMatch != 0 {
		r.unknown("")
		return
	}
	for at := counters; at < len(info) && at <= 2*counters; at += counters {
		if info[at] != 0 {
			r.unknown("")
		}
	}
	sources := make([]bool, info[2])
	for i := range sources {
		sources[i] = info[3]&(1<<(i+1)) != 0
	}
	r.inSet(r.sets, r.sets.name(binary.NativeEndian.Uint16(info)), sources, info[3]&inverted != 0)
}
