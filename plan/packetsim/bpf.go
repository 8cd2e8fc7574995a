package packetsim

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/bpf"
)

// bpfModule runs a program of classic BPF on the packet, from its network header on.
type bpfModule struct {
	vm  *bpf.VM
	not bool
}

func (m *bpfModule) option(p *parser, name string, not bool) (bool, error) {
	if name != "--bytecode" {
		return false, nil
	}
	value, err := p.argument(name)
	if err != nil {
		return true, err
	}
	m.not = not
	m.vm, err = parseBytecode(value)
	return true, err
}

// parseBytecode reads "N,code jt jf k,code jt jf k,…", with N instructions.
func parseBytecode(text string) (*bpf.VM, error) {
	count, rest, _ := strings.Cut(text, ",")
	var raw []bpf.RawInstruction
	for _, one := range strings.Split(strings.TrimSuffix(rest, ","), ",") {
		var i bpf.RawInstruction
		if n, err := fmt.Sscanf(one, "%d %d %d %d", &i.Op, &i.Jt, &i.Jf, &i.K); n != 4 || err != nil {
			return nil, fmt.Errorf("%q is no BPF instruction", one)
		}
		raw = append(raw, i)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(count)); err != nil || n != len(raw) {
		return nil, fmt.Errorf("bytecode says it has %q instructions and has %d", count, len(raw))
	}
	program, known := bpf.Disassemble(raw)
	if !known {
		return nil, fmt.Errorf("bytecode %q has an instruction that is not known", text)
	}
	return bpf.NewVM(program)
}

func (m *bpfModule) finish(*parser) (matcher, error) {
	if m.vm == nil {
		return nil, nil // Its other options are not known, and say so.
	}
	return m, nil
}

func (m *bpfModule) match(p *packet) (float64, error) {
	ret, err := m.vm.Run(p.header())
	if err != nil {
		return 0, fmt.Errorf("bytecode: %w", err)
	}
	return is(ret != 0, m.not), nil
}

// protocolNumbers are those of the IP header.
var protocolNumbers = map[string]byte{"tcp": 6, "udp": 17, "sctp": 132}

// header is the packet's IP header without options, and the ports behind it. What the simulator does not know of a packet,
// its source port among it, is 0.
func (p *packet) header() []byte {
	var h []byte
	if p.dst.Is4() {
		h = make([]byte, 12, 24)
		h[0], h[8], h[9] = 0x45, 64, protocolNumbers[p.protocol]
	} else {
		h = make([]byte, 8, 44)
		h[0], h[6], h[7] = 0x60, protocolNumbers[p.protocol], 64
	}
	for _, a := range []netip.Addr{p.src, p.dst} {
		h = slices.Concat(h, a.AsSlice())
	}
	return binary.BigEndian.AppendUint16(append(h, 0, 0), p.port)
}
