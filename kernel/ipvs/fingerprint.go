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

	"nodeproxy/plan"
)

// Fingerprint is a number for a set of virtual servers with their real servers, in any order: the sum of a hash of each. It
// distinguishes sets within one run of the program. It covers the address, protocol, port or mark, and scheduler of a virtual
// server, and the address, port and weight of a real server, but no connections.
type Fingerprint uint64

var fingerprintSeed = maphash.MakeSeed()

// Add adds a virtual server, and AddRealServer one of its real servers.
func (f *Fingerprint) Add(v Server) { f.add([]byte(serverText(v))) }

// AddRealServer adds a real server of a virtual server.
func (f *Fingerprint) AddRealServer(v Server, d RealServer) {
	f.add(fmt.Appendf(nil, "%s -> %s %d", serverText(v), addressText(d.Addr.Addr(), d.Addr.Port()), d.Weight))
}

func (f *Fingerprint) add(text []byte) { *f += Fingerprint(maphash.Bytes(fingerprintSeed, text)) }

// serverText is a virtual server as in /proc/net/ip_vs, with single spaces.
func serverText(v Server) string {
	if v.ID.Mark != 0 {
		return fmt.Sprintf("FWM %08X %s", v.ID.Mark, v.Scheduler)
	}
	return fmt.Sprintf("%s %s %s", v.ID.Protocol, addressText(v.ID.Addr, v.ID.Port), v.Scheduler)
}

func addressText(a netip.Addr, port uint16) string {
	if a.Is6() {
		return fmt.Sprintf("[%s]:%04X", a.StringExpanded(), port)
	}
	return fmt.Sprintf("%08X:%04X", binary.BigEndian.Uint32(a.AsSlice()), port)
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
	var server []byte // the last one; nil if it is skipped
	lines := bufio.NewScanner(bufio.NewReaderSize(file, 1<<20))
	for lines.Scan() {
		words := bytes.Fields(lines.Bytes())
		switch {
		case len(words) >= 4 && string(words[0]) == "->" && server != nil:
			sum.add(bytes.Join([][]byte{server, words[0], words[1], words[3]}, []byte(" ")))
		case len(words) >= 3 && words[0][0] != '-':
			server = nil
			if id, ok := fingerprinted(words); ok && !skip(id) {
				server = bytes.Join(words[:3], []byte(" "))
				sum.add(server)
			}
		}
	}
	if err := lines.Err(); err != nil {
		return 0, fmt.Errorf("reading %s: %w", name, err)
	}
	return sum, nil
}

// fingerprinted reads which virtual server a line is about; false for a heading.
func fingerprinted(words [][]byte) (ServerID, bool) {
	number, err := hex.DecodeString(string(words[1]))
	if string(words[0]) == "FWM" {
		if err != nil || len(number) != 4 {
			return ServerID{}, false
		}
		return ServerID{Mark: binary.BigEndian.Uint32(number)}, true
	}
	i := bytes.LastIndexByte(words[1], ':')
	if i < 0 {
		return ServerID{}, false
	}
	var a netip.Addr
	host := words[1][:i]
	if host[0] == '[' {
		a, err = netip.ParseAddr(string(bytes.Trim(host, "[]")))
	} else if number, err = hex.DecodeString(string(host)); err == nil {
		a, _ = netip.AddrFromSlice(number)
	}
	port, portErr := hex.DecodeString(string(words[1][i+1:]))
	if err != nil || portErr != nil || !a.IsValid() || len(port) != 2 {
		return ServerID{}, false
	}
	return ServerID{Family: plan.FamilyOf(a), Protocol: plan.Protocol(words[0]), Addr: a, Port: binary.BigEndian.Uint16(port)}, true
}
