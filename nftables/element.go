package nftables

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"slices"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// id says which element of which set one is.
type id struct {
	set      setID
	key, end string // as they are in registers; end is for intervals only
}

// value is the rest of an element.
type value struct {
	data, chain, comment string
}

func (i id) element(v value) nft.Element {
	return nft.Element{Key: i.key, End: i.end, Data: v.data, Chain: v.chain, Comment: v.comment}
}

func registers(parts ...[]byte) string {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return string(out)
}

func bigEndian(port uint16) []byte { return binary.BigEndian.AppendUint16(nil, port) }

// nameOf is a frontend as it is in registers: an address, a protocol and a port.
func nameOf(f plan.Family, fe plan.Frontend) string {
	a := fe.Addr
	if fe.Kind == plan.NodePort {
		a = noAddress(f)
	}
	return registers(a.AsSlice(), []byte{netlink.Protocol(fe.Protocol)}, bigEndian(fe.Port))
}

func endpointValue(a netip.AddrPort) string {
	return registers(a.Addr().AsSlice(), bigEndian(a.Port()))
}

// written is a ServicePort as it is in the kernel.
type written struct {
	sp *plan.ServicePort
	// cluster and local are the endpoints of the two policies by their numbers in the maps.
	cluster, local []netip.AddrPort
}

// placed numbers endpoints. Those that had numbers keep them as far as possible, so that few elements change.
func placed(before []netip.AddrPort, list []plan.Endpoint) []netip.AddrPort {
	list = list[:min(len(list), maxCount)]
	out := make([]netip.AddrPort, len(list))
	if len(before) == 0 {
		for i, ep := range list {
			out[i] = ep.Addr
		}
		return out
	}
	wanted := make(map[netip.AddrPort]bool, len(list))
	for _, ep := range list {
		wanted[ep.Addr] = true
	}
	for i, a := range before[:min(len(before), len(out))] {
		if wanted[a] {
			out[i] = a
			delete(wanted, a) // It may be there twice, if others have written it.
		}
	}
	i := 0
	for _, ep := range list {
		if !wanted[ep.Addr] {
			continue
		}
		for out[i].IsValid() {
			i++
		}
		out[i] = ep.Addr
	}
	return out
}

// place makes what is to be written of a ServicePort where before is there.
func place(before written, sp *plan.ServicePort) written {
	return written{sp: sp, cluster: placed(before.cluster, sp.Endpoints.Cluster), local: placed(before.local, sp.Endpoints.Local)}
}

// fill puts the elements of a ServicePort into out, and the kinds that they lead to into used.
func (l *layout) fill(w written, out map[id]value, used map[kind]bool) {
	if w.sp == nil {
		return
	}
	comment := nft.Comment(w.sp.Key.PortName())
	for _, fe := range w.sp.Frontends {
		if fe.Kind == plan.HealthCheckNodePort {
			continue
		}
		name := nameOf(l.family, fe)
		of, inside := kindsOf(w.sp, fe)
		used[of] = true
		out[id{set: services, key: name}] = value{data: string(native(of.number())), comment: comment}
		w.fillEndpoints(name, of, out)
		if inside != nil {
			used[*inside] = true
			out[id{set: servicesWithin, key: name}] = value{data: string(native(inside.number())), comment: comment}
			w.fillEndpoints(name, *inside, out)
		}
		if fe.Kind == plan.ClusterIP {
			out[id{set: clusterIPs, key: string(fe.Addr.AsSlice())}] = value{}
		}
		l.fillSources(w.sp, fe, out)
	}
}

// fillEndpoints puts in the endpoints of a frontend that has a kind.
func (w written) fillEndpoints(name string, k kind, out map[id]value) {
	list, plain, choice, stick := w.cluster, endpoints, choices, stickyEndpoints
	if k.local {
		list, plain, choice, stick = w.local, localEndpoints, localChoices, localStickyEndpoints
	}
	list = list[:k.count]
	if k.affinity == 0 {
		for i, a := range list {
			out[id{set: plain, key: name + string(native(uint32(i)))}] = value{data: endpointValue(a)}
		}
		return
	}
	for i, n := range identifiers(list) {
		out[id{set: choice, key: name + string(native(uint32(i)))}] = value{data: string(native(n))}
		out[id{set: stick, key: name + string(native(n))}] = value{data: endpointValue(list[i])}
	}
}

// identifiers are numbers by which clients are remembered to have an endpoint. They depend on the endpoint, and only where two would be
// the same on the others, so that clients keep their endpoints whatever others come and go.
func identifiers(list []netip.AddrPort) []uint32 {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return list[a].Compare(list[b]) })
	out, taken := make([]uint32, len(list)), make(map[uint32]bool, len(list))
	for _, i := range order {
		h := fnv.New32a()
		_, _ = h.Write([]byte(endpointValue(list[i])))
		n := h.Sum32()
		for taken[n] {
			n++
		}
		out[i], taken[n] = n, true
	}
	return out
}

// fillSources puts in who may reach a load balancer IP, where that is limited. Ranges within others are left out: the kernel takes none
// that overlap. Where the node itself is within the ranges, the load balancer IPs are too: a node that has such an address of its own
// sends to it from it.
func (l *layout) fillSources(sp *plan.ServicePort, fe plan.Frontend, out map[id]value) {
	if fe.Kind != plan.LoadBalancerIP || len(sp.SourceRanges) == 0 || !sp.Any {
		return
	}
	ranges := slices.Clone(sp.SourceRanges)
	node := l.node.IP(l.family)
	if node.IsValid() && slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(node) }) {
		for _, own := range sp.Frontends {
			if own.Kind == plan.LoadBalancerIP {
				ranges = append(ranges, netip.PrefixFrom(own.Addr, own.Addr.BitLen()))
			}
		}
	}
	key := nameOf(l.family, fe)
	out[id{set: limited, key: key}] = value{comment: nft.Comment(sp.Key.PortName())}
	for i, r := range ranges {
		within := slices.ContainsFunc(ranges[:i], func(o netip.Prefix) bool { return o == r })
		for _, o := range ranges {
			within = within || o.Bits() < r.Bits() && o.Contains(r.Addr())
		}
		if !within {
			out[id{set: sourceRanges, key: key + string(r.Masked().Addr().AsSlice()), end: key + string(last(r))}] = value{}
		}
	}
}

// last is the last address of a range.
func last(r netip.Prefix) []byte {
	out := r.Masked().Addr().AsSlice()
	for i := r.Bits(); i < len(out)*8; i++ {
		out[i/8] |= 0x80 >> (i % 8)
	}
	return out
}

// fixed are the elements that do not depend on Services.
func fixed(used map[kind]bool) map[id]value {
	out := map[id]value{}
	for k := range used {
		for _, set := range k.sets() {
			out[id{set: set, key: string(native(k.number()))}] = value{chain: k.chain()}
		}
	}
	for b := range 256 {
		out[id{set: sameByte, key: registers([]byte{byte(b)}, []byte{byte(b)})}] = value{}
	}
	return out
}

// ofServices reports whether the elements of a set are those of ServicePorts.
func (s setID) ofServices() bool {
	return s != kinds && s != kindsWithin && s != affinity && s != sameByte
}

// frontendOf is the part of an element's key that is a frontend; the zero Address where there is none.
func (i id) frontendOf(f plan.Family) plan.Address {
	n := f.Bits() / 8
	switch i.set {
	case clusterIPs, kinds, kindsWithin, affinity, sameByte:
		return plan.Address{}
	}
	a, _ := netip.AddrFromSlice([]byte(i.key[:n]))
	out := plan.Address{Addr: a, Protocol: netlink.ProtocolOf(i.key[n]), Port: binary.BigEndian.Uint16([]byte(i.key[n+4:]))}
	if a.IsUnspecified() {
		out.Addr = netip.Addr{}
	}
	return out
}

func compareIDs(a, b id) int {
	return cmp.Or(cmp.Compare(a.set, b.set), cmp.Compare(a.key, b.key), cmp.Compare(a.end, b.end))
}

func nativeNumber(b string) uint32 { return binary.NativeEndian.Uint32([]byte(b)) }

func bigEndianNumber(b string) uint16 { return binary.BigEndian.Uint16([]byte(b)) }
