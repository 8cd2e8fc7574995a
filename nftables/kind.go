package nftables

import (
	"cmp"
	"fmt"
	"slices"
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

// maxCount is the greatest number of endpoints of a kind, and maxSticky that of one with affinity. Endpoints beyond it are not used.
const (
	maxCount  = 1<<20 - 1
	maxSticky = 1<<14 - 1
)

// actions are all combinations of treatment, nodePort and local that there are. A kind's number has the index.
var actions = []kind{
	1: {treatment: refuse}, 2: {treatment: reset}, 3: {treatment: drop},
	4: {treatment: internal}, 5: {treatment: internal, local: true},
	6: {treatment: external}, 7: {treatment: external, nodePort: true},
	8: {treatment: split, local: true}, 9: {treatment: split, local: true, nodePort: true},
	10: {treatment: within}, 11: {treatment: within, nodePort: true},
}

// number is the kind as maps have it: from the highest bit on, whether there is affinity (1 bit), the action (4 bits), and the count, in
// front of which with affinity its code has 13 bits.
func (k kind) number() uint32 {
	n := uint32(k.count)
	if k.affinity > 0 {
		n |= 1<<31 | affinityCode(k.affinity)<<14
	}
	k.count, k.affinity = 0, 0
	return n | uint32(slices.Index(actions, k))<<27
}

// An affinity has so many seconds at most by the second; longer ones are rounded up to minutes, of which there are mostMinutes at most.
const (
	mostSeconds = 4095
	mostMinutes = 4095
)

func affinityCode(seconds uint32) uint32 {
	if seconds <= mostSeconds {
		return seconds
	}
	return mostSeconds + 1 + seconds/60
}

// roundAffinity returns the seconds that an affinity has in the kernel.
func roundAffinity(seconds uint64) uint32 {
	if seconds <= mostSeconds {
		return uint32(seconds)
	}
	return 60 * uint32(min((seconds+59)/60, mostMinutes))
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
	most := maxCount
	if affinity > 0 {
		most = maxSticky
	}
	return kind{treatment: t, nodePort: nodePort, local: local, count: min(count, most), affinity: affinity}
}

// kindsOf are the kinds of a frontend: of its traffic, and of that from within where the other one splits that off.
func kindsOf(sp *plan.ServicePort, f plan.Frontend) (of kind, inside *kind) {
	affinity := roundAffinity(uint64(sp.Affinity.Seconds()))
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

// sets are the maps that lead to the chain of the kind: what is split off must not lead back to where it is split off, as the kernel takes
// no rules that might lead in a circle.
func (k kind) sets() []setID {
	switch k.treatment {
	case drop:
		return []setID{kinds, kindsWithin}
	case within:
		return []setID{kindsWithin}
	}
	return []setID{kinds}
}
