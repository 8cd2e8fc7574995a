package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// kind is what is done with traffic to a frontend. Each that occurs has a chain. So the number of chains depends on how many different
// numbers of endpoints there are, and not on the number of Services.
//
// A frontend could lead to its chain itself, by a map of verdicts. But the kernel looks at all elements of such a map whenever one is
// added: with 45,000 Services that takes 30 ms for one change. So frontends have the number of a kind, and only the map of kinds, which
// has few elements, leads to chains.
type kind struct {
	treatment treatment
	// nodePort is set for node ports, whose traffic is known by protocol and port alone.
	nodePort bool
	// count is the number of endpoints to choose from, of policy Local's if local is set.
	count int
	local bool
	// affinity is for how long clients keep their endpoints, in seconds; 0 for not at all.
	affinity uint32
}

// treatment is what is done besides choosing an endpoint.
type treatment uint8

const (
	// refuse, reset and drop are for traffic without endpoints.
	refuse treatment = 1 + iota
	reset
	drop
	// internal is for cluster IPs: masqueraded as the settings say.
	internal
	// external is for other frontends under policy Cluster: masqueraded.
	external
	// split is for other frontends under policy Local: what pods and the node itself send is treated as within.
	split
	// within is for what pods and the node itself send to frontends under policy Local.
	within
)

// maxCount is the greatest number of endpoints of a kind; endpoints beyond it are not used.
const maxCount = 1<<20 - 1

// number is the kind as maps have it: two registers. The first has, from the highest bit on, the treatment (4 bits), node port, local,
// 6 zeros, and the count (20 bits), and the second the affinity.
func (k kind) number() string {
	n := uint32(k.treatment)<<28 | uint32(k.count)
	if k.nodePort {
		n |= 1 << 27
	}
	if k.local {
		n |= 1 << 26
	}
	return string(binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, n), k.affinity))
}

// kindOf reads a number; false if no kind has it.
func kindOf(number string) (kind, bool) {
	if len(number) != 8 {
		return kind{}, false
	}
	n := binary.NativeEndian.Uint32([]byte(number))
	k := kind{treatment: treatment(n >> 28), nodePort: n>>27&1 == 1, local: n>>26&1 == 1, count: int(n & maxCount),
		affinity: binary.NativeEndian.Uint32([]byte(number[4:]))}
	return k, k.number() == number && k.treatment >= refuse && k.treatment <= within
}

// chain is the name of the kind's chain.
func (k kind) chain() string {
	var parts []string
	switch k.treatment {
	case refuse:
		return names.NFTReject
	case reset:
		return names.NFTRejectReset
	case drop:
		return names.NFTDrop
	case internal:
		parts = append(parts, "cluster-ip")
	case external:
		parts = append(parts, "external")
	case split:
		parts = append(parts, "external-local")
	case within:
		parts = append(parts, "within")
	}
	if k.nodePort {
		parts = append(parts, "node-port")
	}
	if k.local && k.treatment != split {
		parts = append(parts, "local")
	}
	parts = append(parts, fmt.Sprint(k.count))
	if k.affinity > 0 {
		parts = append(parts, fmt.Sprintf("sticky-%ds", k.affinity))
	}
	return strings.Join(parts, "-")
}

// choose makes the kind for a list of endpoints; drop for none.
func choose(t treatment, nodePort, local bool, count int, affinity uint32) kind {
	if count == 0 && t != split {
		return kind{treatment: drop}
	}
	if count == 0 {
		affinity = 0
	}
	return kind{treatment: t, nodePort: nodePort, local: local, count: min(count, maxCount), affinity: affinity}
}

// kindsOf are the kinds of a frontend: of its traffic, and of that from within where the other one splits that off.
func kindsOf(sp *plan.ServicePort, f plan.Frontend) (of kind, inside *kind) {
	affinity := uint32(sp.Affinity.Seconds())
	nodePort := f.Kind == plan.NodePort
	switch {
	case !sp.Any && sp.ResetTCP && sp.Key.Protocol == plan.TCP:
		return kind{treatment: reset}, nil
	case !sp.Any:
		return kind{treatment: refuse}, nil
	case f.Kind == plan.ClusterIP:
		local := sp.InternalPolicy == plan.Local
		return choose(internal, false, local, len(sp.ForPolicy(sp.InternalPolicy)), affinity), nil
	case sp.ExternalPolicy == plan.Cluster:
		return choose(external, nodePort, false, len(sp.Endpoints.Cluster), affinity), nil
	}
	in := choose(within, nodePort, false, len(sp.Endpoints.Cluster), affinity)
	return choose(split, nodePort, true, len(sp.Endpoints.Local), affinity), &in
}

func compareKinds(a, b kind) int {
	side := func(set bool) int {
		if set {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(a.treatment, b.treatment), side(a.nodePort)-side(b.nodePort), side(a.local)-side(b.local),
		cmp.Compare(a.count, b.count), cmp.Compare(a.affinity, b.affinity))
}
