package controlplane

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// A pool is a range to allocate from, numbered from 0: the addresses of a service CIDR, or the node ports. Allocation starts in
// the upper band and leaves the lower one to Services that name their own, until the upper one is full (KEP-3070 for cluster IPs,
// KEP-3668 for node ports).
type pool struct {
	size, lower uint64 // lower is the size of the lower band
}

// band returns the size of the lower band: min(max(16, size/step), most), and none in a range of at most 16.
func band(size, step, most uint64) uint64 {
	if size <= 16 {
		return 0
	}
	return min(max(16, size/step), most)
}

// maxPool limits the numbering of IPv6 ranges.
const maxPool = 1 << 62

// addressPool numbers the usable addresses of a CIDR: all but the first, and in IPv4 the last, which is for broadcast.
func addressPool(cidr netip.Prefix) pool {
	hostBits := cidr.Addr().BitLen() - cidr.Bits()
	if hostBits >= 62 {
		return pool{maxPool, band(maxPool, 16, 256)}
	}
	total := uint64(1) << hostBits
	size := total - 1
	if cidr.Addr().Is4() && size > 0 {
		size--
	}
	return pool{size, min(band(total, 16, 256), size)}
}

// address returns the n-th usable address of a CIDR.
func address(cidr netip.Prefix, n uint64) netip.Addr {
	raw := cidr.Masked().Addr().As16()
	binary.BigEndian.PutUint64(raw[8:], binary.BigEndian.Uint64(raw[8:])+n+1) // These bits are 0 so far, and enough.
	ip := netip.AddrFrom16(raw)
	if cidr.Addr().Is4() {
		return ip.Unmap()
	}
	return ip
}

func portPool(r plan.PortRange) pool {
	size := uint64(r.Last) - uint64(r.First) + 1
	return pool{size, band(size, 32, 128)}
}

// bid asks for one slot of a pool.
type bid struct {
	key  string         // what the choice depends on
	take func(n uint64) // called with the slot that it gets
	fail func()         // called if it gets none
}

// rounds is the number of slots that a bid tries before it takes the next free one.
const rounds = 16

// allocate serves all bids. The result is a function of the bids' keys, of their order and of what is free at the start, and of
// nothing else. Each bid has a sequence of slots that follows from a hash of its key. In the first round each bids for the first
// slot of its sequence, and of several that meet at one slot the first in the order of bids wins; those that lost bid for their
// second slot in the next round, and so on. So a new bid takes another's slot only if their hashes meet.
func (p pool) allocate(bids []bid, free func(n uint64) bool) {
	upper := p.size - p.lower
	for round := 0; round < rounds && upper > 0; round++ {
		bids = slices.DeleteFunc(bids, func(b bid) bool {
			first, step := hash(b.key)
			n := first % upper
			for range round {
				n = (n + step%upper) % upper // Both are below 2^62.
			}
			won := free(p.lower + n)
			if won {
				b.take(p.lower + n)
			}
			return won
		})
	}
	// Nearly full: take what is free, from the bid's own slot on. A pool this full is small.
	for _, b := range bids {
		first, _ := hash(b.key)
		n, found := search(free, first, p.lower, p.size)
		if !found {
			n, found = search(free, first, 0, p.lower)
		}
		if found {
			b.take(n)
		} else {
			b.fail()
		}
	}
}

// search returns the first free slot of [from, to), beginning somewhere within.
func search(free func(n uint64) bool, start, from, to uint64) (slot uint64, found bool) {
	size := to - from
	for i := range min(size, 1<<20) {
		if n := from + (start+i)%size; free(n) {
			return n, true
		}
	}
	return 0, false
}

// hash returns the first slot and the step of a key's sequence. The halves keep sums within 64 bits.
func hash(key string) (first, step uint64) {
	sum := sha256.Sum256([]byte(key))
	return binary.BigEndian.Uint64(sum[:8]) >> 1, binary.BigEndian.Uint64(sum[8:16])>>1 | 1
}
