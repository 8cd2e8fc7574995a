package ipvs

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// A packet's firewall mark tells IPVS which virtual server a packet is for where its destination does not: at a node port,
// which answers at every address of the node, and where an external address has other endpoints for pods and the node
// itself than for the rest of the world. Such a virtual server is found by the whole mark of 32 bits, so each gets a value
// that nothing else uses: four bits that all of them have, one that says for whom it is, and what tells one ServicePort from
// another. The bit that asks for masquerading is left out of this; it may be any of the 32.
//
// Marks are set just before IPVS looks at a packet, and taken off as it is sent on. What changes or looks at marks in between
// does not see ours, nor IPVS what that has made of them: see nftrules.MarkGuard.
type marks struct {
	masquerade uint32 // the bit that asks for masquerading
}

// The layout of the 31 bits that are left, behind names.MarkSignature.
const (
	// toCluster is set for the endpoints of policy Cluster, clear for those of policy Local.
	toCluster = 1 << 26
	// byHash is set where a ServicePort is told by a hash of its name, clear where by its node port.
	byHash = 1 << 25
)

func newMarks(masqueradeBit int) marks { return marks{1 << masqueradeBit} }

// value spreads 31 bits over the mark.
func (m marks) value(v uint32) uint32 {
	low := m.masquerade - 1
	return v&low | v&^low<<1
}

// mask is everything but the masquerade bit.
func (m marks) mask() uint32 { return ^m.masquerade }

// match is what all marks of ours have, as iptables prints value and mask.
func (m marks) match() string {
	return fmt.Sprintf("%#x/%#x", m.value(names.MarkSignature), m.value(names.MarkSignatureMask))
}

// guard is what keeps marks of ours and of other programs apart.
func (m marks) guard() nftrules.MarkGuard {
	return nftrules.MarkGuard{Signature: m.value(names.MarkSignature), SignatureMask: m.value(names.MarkSignatureMask), Masquerade: m.masquerade}
}

// ours reports whether a mark is one that this package gives, whichever bit asks for masquerading: it may have been another one
// at the last start.
func (m marks) ours(mark uint32) bool { return len(m.identities(mark)) > 0 }

// identities are those that a mark of ours may stand for, as the bit that asked for masquerading when it was given is not known.
func (m marks) identities(mark uint32) []markID {
	var out []markID
	for bit := range 32 {
		given := newMarks(bit)
		if mark&given.value(names.MarkSignatureMask) == given.value(names.MarkSignature) {
			out = append(out, given.identity(mark))
		}
	}
	return out
}

// ranks is how many ServicePorts whose names have one hash can be told apart. With a thousand of them in need of a hash,
// the chance that any two share one is one in eight, and that nine do is none.
const ranks = 8

// markID is the part of a mark that tells a ServicePort from all others of its family.
type markID uint32

// nodePortID is the identity of a ServicePort with a node port: no other one has that port and protocol.
func nodePortID(p plan.Protocol, port uint16) markID {
	protocol := map[plan.Protocol]markID{plan.TCP: 0, plan.UDP: 1, plan.SCTP: 2}[p]
	return protocol<<16 | markID(port)
}

// protocol is that of a node port.
func (id markID) protocol() plan.Protocol {
	return [...]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP, ""}[id>>16&3]
}

// hash is the hash of a ServicePort's name; false for a node port.
func (id markID) hash() (uint32, bool) { return uint32(id&^byHash) / ranks, id&byHash != 0 }

// identity is the identity in a mark of ours.
func (m marks) identity(mark uint32) markID {
	low := m.masquerade - 1
	return markID((mark&low | mark>>1&^low) &^ (names.MarkSignatureMask | toCluster))
}

// identities gives identities to ServicePorts without a node port: a hash of 22 bits, and the place in order of name among
// those that share it. So they are the same on every node and after every restart, whatever came first.
type identities map[uint32][]plan.Key

func hashOf(k plan.Key) uint32 {
	sum := sha256.Sum256([]byte(k.String()))
	return binary.BigEndian.Uint32(sum[:]) >> 10
}

// add enters a key, and returns the others whose identity is another one now.
func (ids identities) add(k plan.Key) []plan.Key {
	h := hashOf(k)
	i, found := slices.BinarySearchFunc(ids[h], k, plan.Key.Compare)
	if found {
		return nil
	}
	ids[h] = slices.Insert(ids[h], i, k)
	return slices.Clone(ids[h][i+1:])
}

// remove takes a key out, and returns the others whose identity is another one now.
func (ids identities) remove(k plan.Key) []plan.Key {
	h := hashOf(k)
	i, found := slices.BinarySearchFunc(ids[h], k, plan.Key.Compare)
	if !found {
		return nil
	}
	if ids[h] = slices.Delete(ids[h], i, i+1); len(ids[h]) == 0 {
		delete(ids, h)
	}
	return slices.Clone(ids[h][i:])
}

// of is a key's identity. It is false where too many share a hash.
func (ids identities) of(k plan.Key) (markID, bool) {
	h := hashOf(k)
	i, found := slices.BinarySearchFunc(ids[h], k, plan.Key.Compare)
	return markID(byHash | h*ranks + uint32(i)), found && i < ranks
}

// markKind says who sends to a virtual server that is found by mark, and what happens to the source.
type markKind int

// The kinds: the rest of the world under policy Local; pods, as if they had reached the endpoints of the cluster directly;
// and what is masqueraded on the way to endpoints of the cluster.
const (
	localMark markKind = iota
	clusterMark
	masqueradedMark
)

func (m marks) of(id markID, kind markKind) uint32 {
	switch v := names.MarkSignature | uint32(id); kind {
	case clusterMark:
		return m.value(v | toCluster)
	case masqueradedMark:
		return m.value(v|toCluster) | m.masquerade
	default:
		return m.value(v)
	}
}
