package kernel

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Netlink attributes: a length of 16 bits that includes itself and the type, a type of 16 bits, the value, and zeros up to a
// multiple of four.

const attributeHeader = 4

func align(n int) int { return (n + 3) &^ 3 }

func pad(b []byte) []byte { return append(b, make([]byte, align(len(b))-len(b))...) }

func nativeUint32(b []byte, n uint32) []byte { return binary.NativeEndian.AppendUint32(b, n) }

// attribute appends an attribute.
func attribute(b []byte, kind uint16, value ...byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attributeHeader+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	return pad(append(b, value...))
}

func attribute16(b []byte, kind, value uint16) []byte {
	return attribute(b, kind, binary.NativeEndian.AppendUint16(nil, value)...)
}

func attribute32(b []byte, kind uint16, value uint32) []byte {
	return attribute(b, kind, binary.NativeEndian.AppendUint32(nil, value)...)
}

// attributeText appends a string with the final NUL that most of the kernel wants.
func attributeText(b []byte, kind uint16, value string) []byte {
	return attribute(b, kind, append([]byte(value), 0)...)
}

// nested appends an attribute that consists of the attributes which content appends.
func nested(b []byte, kind uint16, content func([]byte) []byte) []byte {
	start := len(b)
	b = attribute(b, kind|unix.NLA_F_NESTED)
	b = content(b)
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// attributes are the attributes in b, by type, without the flags of the type. What is cut short is left out.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attributeHeader {
			n := int(binary.NativeEndian.Uint16(b))
			if n < attributeHeader || n > len(b) {
				return
			}
			kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(kind, b[attributeHeader:n]) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

// number is a number in native byte order, of whatever size; 0 if it is of none.
func number(b []byte) uint64 {
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

// bigEndian is a number in network byte order, of whatever size.
func bigEndian(b []byte) uint64 {
	var n uint64
	for _, x := range b {
		n = n<<8 | uint64(x)
	}
	return n
}

// text is a string up to its NUL.
func text(b []byte) string {
	for i, x := range b {
		if x == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// address is the address in the first bytes of b.
func address(b []byte, bits int) (netip.Addr, error) {
	if len(b) < bits/8 {
		return netip.Addr{}, fmt.Errorf("an address has %d bytes instead of %d", len(b), bits/8)
	}
	a, _ := netip.AddrFromSlice(b[:bits/8])
	return a, nil
}
