package netlink

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// An attribute is a length of 16 bits, which includes itself and the type, a type of 16 bits, the value, and zeros up to a
// multiple of four.

const (
	attributeHeader = 4
	typeFlags       = unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
)

func align(n int) int { return (n + 3) &^ 3 }

var padding [3]byte

// Buffer is the body of a message, or a part of one, that attributes are appended to.
type Buffer []byte

// Bytes appends an attribute.
func (b Buffer) Bytes(kind uint16, value ...byte) Buffer {
	b = binary.NativeEndian.AppendUint16(b, uint16(attributeHeader+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, padding[:align(len(value))-len(value)]...)
}

// Uint16 appends an attribute with a number in the byte order of the machine.
func (b Buffer) Uint16(kind, value uint16) Buffer {
	var v [2]byte
	binary.NativeEndian.PutUint16(v[:], value)
	return b.Bytes(kind, v[:]...)
}

// Uint32 appends an attribute with a number in the byte order of the machine.
func (b Buffer) Uint32(kind uint16, value uint32) Buffer {
	var v [4]byte
	binary.NativeEndian.PutUint32(v[:], value)
	return b.Bytes(kind, v[:]...)
}

// BigEndian16 appends an attribute with a number in network byte order.
func (b Buffer) BigEndian16(kind, value uint16) Buffer {
	return b.Bytes(kind, byte(value>>8), byte(value))
}

// BigEndian32 appends an attribute with a number in network byte order.
func (b Buffer) BigEndian32(kind uint16, value uint32) Buffer {
	return b.Bytes(kind, byte(value>>24), byte(value>>16), byte(value>>8), byte(value))
}

// Text appends a string with the final NUL that most of the kernel wants.
func (b Buffer) Text(kind uint16, value string) Buffer {
	return b.Bytes(kind, append([]byte(value), 0)...)
}

// Addr appends an attribute with the bytes of an address.
func (b Buffer) Addr(kind uint16, a netip.Addr) Buffer {
	v := a.As16()
	return b.Bytes(kind, v[16-a.BitLen()/8:]...)
}

// Nest appends an attribute that consists of the attributes that content appends.
func (b Buffer) Nest(kind uint16, content func(Buffer) Buffer) Buffer {
	start := len(b)
	b = content(b.Bytes(kind | unix.NLA_F_NESTED))
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// Attributes returns the attributes in b by type, without the flags of the type. It ends at an attribute that is cut short.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for {
			kind, value, rest, ok := next(b)
			if !ok || !yield(kind, value) {
				return
			}
			b = rest
		}
	}
}

// Whole reports whether b consists of attributes, none of which is cut short.
func Whole(b []byte) bool {
	for {
		_, _, rest, ok := next(b)
		if !ok {
			return len(b) == 0
		}
		b = rest
	}
}

// Attribute returns the value of the first attribute of a type in b; nil if there is none.
func Attribute(b []byte, want uint16) []byte {
	for kind, value := range Attributes(b) {
		if kind == want {
			return value
		}
	}
	return nil
}

// ByType returns the attributes in b; of several of one type, the last.
func ByType(b []byte) map[uint16][]byte {
	out := map[uint16][]byte{}
	for kind, value := range Attributes(b) {
		out[kind] = value
	}
	return out
}

// next splits off the first attribute of b; ok is false if there is none, or not all of it.
func next(b []byte) (kind uint16, value, rest []byte, ok bool) {
	if len(b) < attributeHeader {
		return 0, nil, nil, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < attributeHeader || n > len(b) {
		return 0, nil, nil, false
	}
	return binary.NativeEndian.Uint16(b[2:]) &^ typeFlags, b[attributeHeader:n], b[min(align(n), len(b)):], true
}

// Number reads a number in the byte order of the machine, of 1, 2, 4 or 8 bytes; 0 of any other length.
func Number(b []byte) uint64 {
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	case 8:
		return binary.NativeEndian.Uint64(b)
	}
	return 0
}

// BigEndian reads a number in network byte order, of any length up to 8 bytes.
func BigEndian(b []byte) uint64 {
	var n uint64
	for _, x := range b {
		n = n<<8 | uint64(x)
	}
	return n
}

// Text reads a string up to its NUL, if it has one.
func Text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// Addr reads an address of a family from the first bytes of b, which may be more than it has.
func Addr(b []byte, f plan.Family) (netip.Addr, error) {
	n := f.Bits() / 8
	if len(b) < n {
		return netip.Addr{}, fmt.Errorf("an address has %d bytes instead of %d", len(b), n)
	}
	a, _ := netip.AddrFromSlice(b[:n])
	return a, nil
}

// Family returns the number by which the kernel knows an address family.
func Family(f plan.Family) uint8 {
	if f == plan.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// Protocol returns the number of a protocol in IP headers.
func Protocol(p plan.Protocol) uint8 {
	switch p {
	case plan.TCP:
		return unix.IPPROTO_TCP
	case plan.UDP:
		return unix.IPPROTO_UDP
	case plan.SCTP:
		return unix.IPPROTO_SCTP
	}
	return 0
}

// ProtocolOf returns the protocol with a number in IP headers; "" for one that no Service has.
func ProtocolOf(number uint8) plan.Protocol {
	switch number {
	case unix.IPPROTO_TCP:
		return plan.TCP
	case unix.IPPROTO_UDP:
		return plan.UDP
	case unix.IPPROTO_SCTP:
		return plan.SCTP
	}
	return ""
}
