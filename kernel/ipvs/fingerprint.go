package ipvs

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/maphash"
	"net/netip"
	"os"
	"strconv"

	"nodeproxy/plan"
)

// Fingerprint is a number for a set of virtual servers with their real servers, in any order: the sum of a hash of each. It
// distinguishes sets within one run of the program. It covers the address, protocol, port or mark, and scheduler of a virtual
// server, and the address, port and weight of a real server, but no connections.
type Fingerprint uint64

var fingerprintSeed = maphash.MakeSeed()

// Add adds a virtual server, and AddRealServer one of its real servers.
func (f *Fingerprint) Add(v Server) {
	var room [textSize]byte
	f.add(appendServerText(room[:0], v))
}

// AddRealServer adds a real server of a virtual server.
func (f *Fingerprint) AddRealServer(v Server, d RealServer) {
	var room [textSize]byte
	b := append(appendServerText(room[:0], v), arrow...)
	b = append(appendAddressText(b, d.Addr.Addr(), d.Addr.Port()), ' ')
	f.add(strconv.AppendUint(b, uint64(d.Weight), 10))
}

func (f *Fingerprint) add(text []byte) { *f += Fingerprint(maphash.Bytes(fingerprintSeed, text)) }

const (
	arrow = " -> "
	// textSize is enough for most texts: two addresses of IPv6, a protocol, a scheduler and a weight.
	textSize = 160
)

// appendServerText appends a virtual server as in /proc/net/ip_vs, with single spaces. There are many, so this makes no garbage.
func appendServerText(b []byte, v Server) []byte {
	if v.ID.Mark != 0 {
		b = appendHex(append(b, "FWM "...), v.ID.Mark, 8)
	} else {
		b = appendAddressText(append(append(b, v.ID.Protocol...), ' '), v.ID.Addr, v.ID.Port)
	}
	return append(append(b, ' '), v.Scheduler...)
}

func appendAddressText(b []byte, a netip.Addr, port uint16) []byte {
	if a.Is6() {
		b = append(b, '[')
		for i, whole := 0, a.As16(); i < len(whole); i += 2 {
			if i > 0 {
				b = append(b, ':')
			}
			b = hex.AppendEncode(b, whole[i:i+2])
		}
		b = append(b, ']')
	} else {
		whole := a.As4()
		b = appendHex(b, binary.BigEndian.Uint32(whole[:]), 8)
	}
	return appendHex(append(b, ':'), uint32(port), 4)
}

// appendHex appends a number with so many digits.
func appendHex(b []byte, n uint32, digits int) []byte {
	for shift := 4 * (digits - 1); shift >= 0; shift -= 4 {
		b = append(b, "0123456789ABCDEF"[n>>shift&15])
	}
	return b
}

// ReadFingerprint returns the Fingerprint of the kernel's virtual servers in the network namespace of the calling thread, without
// those to skip. Of one with a mark, only the mark is known. It reads one file, however many there are, where List asks for the
// real servers of each.
func ReadFingerprint(skip func(ServerID) bool) (Fingerprint, error) {
	const name = "/proc/thread-self/net/ip_vs"
	file, err := os.Open(name)
	if err != nil {
		return 0, fmt.Errorf("reading virtual servers: %w", err)
	}
	defer file.Close()
	var sum Fingerprint
	var text []byte // the last virtual server, up to known, and behind that a real server
	known := 0      // 0 if it is skipped
	lines := bufio.NewScanner(bufio.NewReaderSize(file, 64<<10))
	for lines.Scan() {
		words, n := wordsOf(lines.Bytes())
		switch {
		case n >= 4 && string(words[0]) == "->":
			if known > 0 {
				text = append(append(append(text[:known], arrow...), words[1]...), ' ')
				text = append(text, words[3]...)
				sum.add(text)
			}
		case n >= 3 && words[0][0] != '-':
			known = 0
			if id, ok := fingerprinted(words[0], words[1]); ok && !skip(id) {
				text = append(append(append(append(append(text[:0], words[0]...), ' '), words[1]...), ' '), words[2]...)
				known = len(text)
				sum.add(text)
			}
		}
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("reading %s: %w", name, err)
	}
	return sum, nil
}

// wordsOf returns the first words of a line, and how many of these there are.
func wordsOf(line []byte) (words [4][]byte, n int) {
	for word := range bytes.FieldsSeq(line) {
		words[n] = word
		if n++; n == len(words) {
			break
		}
	}
	return words, n
}

// fingerprinted reads which virtual server a line is about, by its first two words; false for a heading.
func fingerprinted(kind, what []byte) (ServerID, bool) {
	var number [4]byte
	if string(kind) == "FWM" {
		if n, err := hex.Decode(number[:], what[:min(len(what), 8)]); err != nil || n != 4 || len(what) != 8 {
			return ServerID{}, false
		}
		return ServerID{Mark: binary.BigEndian.Uint32(number[:])}, true
	}
	i := bytes.LastIndexByte(what, ':')
	if i < 1 || len(what)-i != 5 {
		return ServerID{}, false
	}
	var a netip.Addr
	var err error
	if host := what[:i]; host[0] == '[' {
		a, err = netip.ParseAddr(string(bytes.Trim(host, "[]")))
	} else if len(host) == 8 {
		_, err = hex.Decode(number[:], host)
		a = netip.AddrFrom4(number)
	}
	var port [2]byte
	_, portErr := hex.Decode(port[:], what[i+1:])
	if err != nil || portErr != nil || !a.IsValid() {
		return ServerID{}, false
	}
	return ServerID{Family: plan.FamilyOf(a), Protocol: protocolNamed(kind), Addr: a, Port: binary.BigEndian.Uint16(port[:])}, true
}

// protocolNamed is a text as the name of a protocol, the same string for all virtual servers with one of those that Services have.
func protocolNamed(text []byte) plan.Protocol {
	for _, p := range [...]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP} {
		if string(text) == string(p) {
			return p
		}
	}
	return plan.Protocol(text)
}
