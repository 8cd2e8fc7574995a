package nftables

import (
	"cmp"
	"fmt"
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// kind says how traffic to a frontend is treated. Each kind in use has a chain. So the number of chains depends on how many different
// numbers of endpoints there are, and not on the number of Services.
//
// A verdict map could lead from frontends to chains directly. But the kernel visits all elements of such a map whenever one is
// added: with 45,000 Services that takes 30 ms for one change. So a frontend maps to the number of a kind, and only the map of kinds,
// which has few elements, leads to chains.
type kind struct {
	treatment treatment
	// nodePort is set for node ports, whose traffic is recognised by protocol and port alone.
	nodePort bool
	// count is the number of endpoints to choose from: those under policy Local if local is set.
	count int
	local bool
	// affinity is how long a client keeps its endpoint, in seconds; 0 without affinity.
	affinity uint32
	// schedule is how one of them is chosen.
	schedule schedule
}

// treatment is what happens to traffic besides choosing an endpoint.
type treatment uint8

const (
	// reject, reset and drop are for frontends without endpoints.
	reject treatment = 1 + iota
	reset
	drop
	// internal is for cluster IPs: masqueraded as the settings say.
	internal
	// external is for other frontends under policy Cluster: masqueraded.
	external
	// split is for other frontends under policy Local: traffic from pods and the node itself continues as within.
	split
	// within is for traffic from pods and the node itself to frontends under policy Local.
	within
)

// maxCount is the greatest number of endpoints of a kind, and maxSticky that of a kind with affinity. Further endpoints are not used.
const (
	maxCount  = 1<<20 - 1
	maxSticky = 1<<14 - 1
)

// actions are all combinations of treatment, nodePort and local that there are. A kind's number has the index, whose highest bit is set
// for what is split, and then the lowest one for node ports.
var actions = []kind{
	1: {treatment: reject}, 2: {treatment: reset}, 3: {treatment: drop},
	4: {treatment: internal}, 5: {treatment: internal, local: true},
	6: {treatment: external}, 7: {treatment: external, nodePort: true},
	8: {treatment: split, local: true}, 9: {treatment: split, local: true, nodePort: true},
	10: {treatment: within}, 11: {treatment: within, nodePort: true},
}

// number encodes the kind for maps. From the highest bit on: whether it has affinity (1 bit), the action (4 bits), with affinity whether it is
// by source (1 bit) and the code of its timeout (12 bits), and without, the schedule (bits 21 and 20); and the count (the rest).
func (k kind) number() uint32 {
	n := uint32(k.count)
	if k.affinity > 0 {
		n |= 1<<31 | uint32(k.schedule)<<26 | affinityCode(k.affinity)<<14
	} else {
		n |= uint32(k.schedule) << 20
	}
	k.count, k.affinity, k.schedule = 0, 0, random
	return n | uint32(slices.Index(actions, k))<<actionShift
}

// kindOf returns what the number of a kind says about endpoints: where they are, how many, and whether there is affinity. known is false for a
// number that no kind has.
func kindOf(number uint32) (k kind, known bool) {
	action := number >> actionShift & 15
	if action == 0 || int(action) >= len(actions) {
		return kind{}, false
	}
	k = actions[action]
	k.count = int(number & maxCount)
	if number>>31 == 1 {
		k.count, k.affinity = int(number&maxSticky), 1
	}
	return k, true
}

// Bits of a kind's number that rules look at.
const (
	actionShift = 27
	splitBit    = 8 << actionShift
	nodePortBit = 1 << actionShift
)

// Terms of affinity are rounded up, by 5 % at most, as each has chains of its own: there are fewer than a thousand up to a day, which is the
// longest that a Service can have.
const (
	exactSeconds  = 300
	mediumSeconds = 3600
	mediumStep    = 15
	longStep      = 180
	mostSeconds   = 7 * 86400
)

// affinityCode has at most 12 bits.
func affinityCode(seconds uint32) uint32 {
	switch {
	case seconds <= exactSeconds:
		return seconds
	case seconds <= mediumSeconds:
		return exactSeconds + (seconds-exactSeconds)/mediumStep
	}
	return affinityCode(mediumSeconds) + (seconds-mediumSeconds)/longStep
}

// roundAffinity returns the timeout, in seconds, that the kernel gets for an affinity.
func roundAffinity(seconds uint64) uint32 {
	step := uint32(1)
	switch {
	case seconds > mediumSeconds:
		step = longStep
	case seconds > exactSeconds:
		step = mediumStep
	}
	return (uint32(min(seconds, mostSeconds)) + step - 1) / step * step
}

// chain returns the name of the kind's chain.
func (k kind) chain() string {
	name := [...]string{
		reject: names.NFTReject, reset: names.NFTRejectReset, drop: names.NFTDrop,
		internal: "cluster-ip", external: "external", split: "external-local", within: "within",
	}[k.treatment]
	if k.treatment <= drop {
		return name
	}
	if k.nodePort {
		name += "-node-port"
	}
	if k.local && k.treatment != split {
		name += "-local"
	}
	name += fmt.Sprintf("-%d", k.count)
	if k.affinity > 0 {
		name += fmt.Sprintf("-sticky-%ds", k.affinity)
	}
	return name + [...]string{bySource: "-by-source", bySourcePort: "-by-source-port"}[k.schedule]
}

// choose returns the kind for count endpoints; without any, that is drop.
func choose(t treatment, nodePort, local bool, count int, affinity uint32, s schedule) kind {
	if count == 0 && t != split {
		return kind{treatment: drop}
	}
	if count == 0 {
		affinity, s = 0, random
	}
	if count == 1 { // There is nothing to choose.
		s = random
	}
	most := maxCount
	if affinity > 0 {
		most = maxSticky
	}
	return kind{treatment: t, nodePort: nodePort, local: local, count: min(count, most), affinity: affinity, schedule: s}
}

// kindsOf returns the kind of a frontend, and if its treatment is split, the kind of its traffic from pods and the node itself.
func (w written) kindsOf(f plan.Frontend) (of kind, inside *kind) {
	sp, s := w.sp, scheduleOf(w.sp)
	affinity := roundAffinity(uint64(sp.Affinity.Seconds()))
	nodePort := f.Kind == plan.NodePort
	switch {
	case !sp.Any && sp.ResetTCP && sp.Key.Protocol == plan.TCP:
		return kind{treatment: reset}, nil
	case !sp.Any:
		return kind{treatment: reject}, nil
	case f.Kind == plan.ClusterIP:
		if sp.InternalPolicy == plan.Local {
			return choose(internal, false, true, w.numbered(true), affinity, s), nil
		}
		return choose(internal, false, false, w.numbered(false), affinity, s), nil
	case sp.ExternalPolicy == plan.Cluster:
		return choose(external, nodePort, false, w.numbered(false), affinity, s), nil
	}
	in := choose(within, nodePort, false, w.numbered(false), affinity, s)
	return choose(split, nodePort, true, w.numbered(true), affinity, s), &in
}

// uses puts the kinds of all frontends into used.
func (w written) uses(used map[kind]bool) {
	for fe, v := range w.frontends() {
		of, inside := v.kindsOf(fe)
		if used[of] = true; inside != nil {
			used[*inside] = true
		}
	}
}

// side orders what is not set before what is.
func side(set bool) int {
	if set {
		return 1
	}
	return 0
}

func compareKinds(a, b kind) int {
	return cmp.Or(cmp.Compare(a.treatment, b.treatment), side(a.nodePort)-side(b.nodePort), side(a.local)-side(b.local),
		cmp.Compare(a.count, b.count), cmp.Compare(a.affinity, b.affinity), cmp.Compare(a.schedule, b.schedule))
}

// leads are the elements that lead to the chain of the kind.
func (k kind) leads() (out []element) {
	for _, set := range k.sets() {
		out = append(out, element{id{set: set, key: string(native(k.number()))}, value{chain: k.chain()}})
	}
	return out
}

// sets returns the maps that lead to the chain of the kind. Chains of treatments split and within are in different maps, since the kernel
// rejects rules by which a packet could return to a chain that it is in.
func (k kind) sets() []setID {
	switch k.treatment {
	case drop:
		return []setID{kinds, kindsWithin}
	case within:
		return []setID{kindsWithin}
	}
	return []setID{kinds}
}
