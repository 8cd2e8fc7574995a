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

// A packet's firewall mark selects its virtual server where its destination can't: at a node port, which answers at every address
// of the node, and where an external address has other endpoints for pods and the node itself than for the rest of the world. IPVS
// compares the whole mark of 32 bits, so each such virtual server gets a value that nothing else uses: four bits that all of them
// have, one for the kind of client, and the identity of the ServicePort. The bit that asks for masquerading is excluded; it may be
// any of the 32.
//
// Marks are set just before IPVS looks at a packet, and removed as it is sent on. Programs that change or look at marks in between
// do not see ours, nor does IPVS see theirs: see nftrules.MarkGuard.
type marks struct {
	masquerade uint32 // the bit that asks for masquerading
}

// The layout of the 31 bits that are left, behind names.MarkSignature.
const (
	// toCluster is set for the endpoints of policy Cluster, and clear for those of policy Local.
	toCluster = 1 << 26
	// byHash is set if a ServicePort is identified by a hash of its name, and clear if by its node port.
	byHash = 1 << 25
)

func newMarks(masqueradeBit int) marks { return marks{1 << masqueradeBit} }

// value spreads 31 bits over the mark.
func (m marks) value(v uint32) uint32 {
	low := m.masquerade - 1
	return v&low | v&^low<<1
}

// mask is every bit but the masquerade bit.
func (m marks) mask() uint32 { return ^m.masquerade }

// match returns what all our marks have in common, as iptables prints value and mask.
func (m marks) match() string {
	return fmt.Sprintf("%#x/%#x", m.value(names.MarkSignature), m.value(names.MarkSignatureMask))
}

// guard returns the guard for these marks.
func (m marks) guard() nftrules.MarkGuard {
	return nftrules.MarkGuard{Signature: m.value(names.MarkSignature), SignatureMask: m.value(names.MarkSignatureMask), Masquerade: m.masquerade}
}

// ours reports whether a mark is one of this package's, whatever the masquerade bit: it may have been another one before a restart.
func (m marks) ours(mark uint32) bool { return len(m.identities(mark)) > 0 }

// identities returns the identities that our mark may stand for, as the masquerade bit that it was made with is not known.
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

// ranks is the number of ServicePorts with the same hash that can be distinguished. With a thousand that need a hash, the chance
// that any two share one is one in eight, and that nine do is negligible.
const ranks = 8

// markID is the part of a mark that distinguishes a ServicePort from all others of its family.
type markID uint32

// nodePortID returns the identity of a ServicePort with a node port: no other one has that port and protocol.
func nodePortID(p plan.Protocol, port uint16) markID {
	protocol := map[plan.Protocol]markID{plan.TCP: 0, plan.UDP: 1, plan.SCTP: 2}[p]
	return protocol<<16 | markID(port)
}

// protocol returns the protocol of a node port.
func (id markID) protocol() plan.Protocol {
	return [...]plan.Protocol{plan.TCP, plan.UDP, plan.SCTP, ""}[id>>16&3]
}

// hash returns the hash of a ServicePort's name; false for a node port.
func (id markID) hash() (uint32, bool) { return uint32(id&^byHash) / ranks, id&byHash != 0 }

// identity returns the identity in one of our marks.
func (m marks) identity(mark uint32) markID {
	low := m.masquerade - 1
	return markID((mark&low | mark>>1&^low) &^ (names.MarkSignatureMask | toCluster))
}

// identities assigns identities to ServicePorts without a node port: a hash of 22 bits, and the position by name among those that
// share it. So they are the same on every node and after every restart, whatever the order of events.
type identities map[uint32][]plan.Key

func hashOf(k plan.Key) uint32 {
	sum := sha256.Sum256([]byte(k.String()))
	return binary.BigEndian.Uint32(sum[:]) >> 10
}

// add adds a key, and returns the others whose identity has changed.
func (ids identities) add(k plan.Key) []plan.Key {
	h := hashOf(k)
	i, found := slices.BinarySearchFunc(ids[h], k, plan.Key.Compare)
	if found {
		return nil
	}
	ids[h] = slices.Insert(ids[h], i, k)
	return slices.Clone(ids[h][i+1:])
}

// remove removes a key, and returns the others whose identity has changed.
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

// of returns a key's identity. It returns false if too many share a hash.
func (ids identities) of(k plan.Key) (markID, bool) {
	h := hashOf(k)
	i, found := slices.BinarySearchFunc(ids[h], k, plan.Key.Compare)
	return markID(byHash | h*ranks + uint32(i)), found && i < ranks
}

// markKind says whose packets a mark is for, and what happens to their source.
type markKind int

// The kinds: the rest of the world under policy Local; pods, as if they had reached the endpoints of the cluster directly; and
// packets that are masqueraded on the way to endpoints of the cluster.
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
