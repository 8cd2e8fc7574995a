package blocking

import (
	"encoding/binary"

	"nodeproxy/plan"
)

// mark is what is known of a packet's mark: those bits of value that are in known. about are the bits that depend on what rules ask of the Service.
type mark struct{ value, known, about uint32 }

// unmarked is the mark of a packet that no rule has seen.
var unmarked = mark{known: ^uint32(0)}

// join is what is known of a packet that has one of two marks.
func (m mark) join(o mark) mark {
	known := m.known & o.known &^ (m.value ^ o.value)
	return mark{value: m.value & known, known: known, about: m.about | o.about}
}

// forget is the mark of which some bits are no longer known.
func (m mark) forget(bits uint32) mark {
	known := m.known &^ bits
	return mark{value: m.value & known, known: known, about: m.about}
}

// changed is m with those bits about the Service in which it differs from what it was before.
func (m mark) changed(before mark) mark {
	m.about |= (m.value ^ before.value) | (m.known ^ before.known)
	return m
}

// marks is what is known of the marks of several packets.
type marks struct {
	mark
	any bool
}

func (m *marks) add(o mark) {
	if m.any {
		o = m.join(o)
	}
	*m = marks{o, true}
}

// marked tells apart packets whose marks are followed from one base chain to the next: the ServicePort that they are for, whether they are
// answers, whether this node sends them, and the interface by which they come, where that is known.
type marked struct {
	key           plan.Key
	answer, local bool
	in            string
}

// paths are the packets that pass a hook: those of others, of this node, or both.
func paths(hook string) []bool {
	switch hook {
	case "output":
		return []bool{true}
	case "input", "postrouting":
		return []bool{false, true}
	}
	return []bool{false}
}

// at is the mark of packets as far as they have been followed.
func (s *search) at(id marked) mark {
	if m, is := s.marks[id]; is {
		return m
	}
	if m, is := s.marks[marked{id.key, id.answer, id.local, ""}]; is {
		return m
	}
	return unmarked
}

// begin is the mark with which a packet comes to a base chain.
func (s *search) begin(p *packet, hook string) mark {
	var out marks
	for _, local := range paths(hook) {
		out.add(s.at(marked{p.key, p.answer, local, p.in}))
	}
	if p.dnat != no || s.node.IPVS { // This program's own rules may have marked it.
		return out.forget(s.node.Mark)
	}
	return out.mark
}

// inRegister are the bytes of a register.
func inRegister(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

const nameOfMark = "meta mark"

// ofMark is the register that holds a mark.
func ofMark(m mark) register {
	reg := register{value: inRegister(m.value), name: nameOfMark, about: m.about, specific: m.about != 0}
	if m.known != unmarked.known {
		reg.only = inRegister(m.known)
	}
	return reg
}

// mark is the mark that a register sets.
func (r register) mark() mark {
	const size = 4
	if len(r.value) != size {
		return mark{}
	}
	m := mark{value: binary.NativeEndian.Uint32(r.value), known: unmarked.known, about: r.about}
	if r.only != nil {
		m = m.forget(^binary.NativeEndian.Uint32(r.only))
	}
	return m
}

// inMark adds that some bits of the mark have a value.
func (j *judgement) inMark(value, mask uint32, invert bool) {
	j.masked(ofMark(j.packet.mark), inRegister(mask), inRegister(value), invert)
}

// setMark has the rule set the mark.
func (j *judgement) setMark(m mark) { j.rule.mark = &m }
