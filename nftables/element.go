package nftables

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"iter"
	"net/netip"
	"slices"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// id identifies an element: its set and its key.
type id struct {
	set setID
	key string // as in registers
}

// value is an element's data and comment.
type value struct {
	data, chain, comment string
}

// valueOf returns the value of an element in the kernel. What only other programs give to elements follows the name of the chain, behind
// foreignMark, which no name holds. So such an element differs from all that this program writes.
func valueOf(el nft.Element) value {
	v := value{el.Data, el.Chain, el.Comment}
	if el.Other != "" {
		v.chain += foreignMark + el.Other
	}
	return v
}

const foreignMark = "\x00"

// form is what the elements of a set that this program writes have in common. Others, such as a catch-all element, are only compared, named and
// removed.
type form struct {
	key, data int // their lengths
}

func formOf(set nft.Set) form { return form{key: set.Key.Length(), data: set.Data.Length()} }

func formsOf(sets []nft.Set) []form {
	out := make([]form, len(sets))
	for i, set := range sets {
		out[i] = formOf(set)
	}
	return out
}

// has reports whether an element is of this form.
func (f form) has(i id, v value) bool { return len(i.key) == f.key && len(v.data) == f.data }

func (i id) element(v value) nft.Element {
	return nft.Element{Key: i.key, Data: v.data, Chain: v.chain, Comment: v.comment}
}

// element is an element of a set.
type element struct {
	id
	value
}

func registers(parts ...[]byte) string {
	out := make([]byte, 0, 32)
	for _, p := range parts {
		out = append(out, p...)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return string(out)
}

// nameOf returns a frontend as registers hold it: its address, protocol and port.
func nameOf(f plan.Family, fe plan.Frontend) string {
	a := fe.Addr
	if fe.Kind == plan.NodePort {
		a = noAddress(f)
	}
	var out [24]byte
	b := append(appendAddr(out[:0], a), netlink.Protocol(fe.Protocol), 0, 0, 0)
	return string(append(binary.BigEndian.AppendUint16(b, fe.Port), 0, 0))
}

func endpointValue(a netip.AddrPort) string {
	var out [20]byte
	return string(append(binary.BigEndian.AppendUint16(appendAddr(out[:0], a.Addr()), a.Port()), 0, 0))
}

func appendAddr(b []byte, a netip.Addr) []byte {
	if a.Is4() {
		v := a.As4()
		return append(b, v[:]...)
	}
	v := a.As16()
	return append(b, v[:]...)
}

// indexed is a frontend, as nameOf returns it, followed by a number.
func indexed(name string, n uint32) string {
	var out [28]byte
	return string(binary.NativeEndian.AppendUint32(append(out[:0], name...), n))
}

// written is a ServicePort as it is in the kernel.
type written struct {
	sp *plan.ServicePort
	// numbers is nil where endpoints have the numbers of their order in sp, as most do.
	numbers *numbering
	// withoutSources leaves its source ranges out of its elements.
	withoutSources bool
	// others are frontends that are in the kernel as an earlier version of the ServicePort has them, and with nil, those of sp that are not there yet.
	others map[plan.Frontend]*written
	// upTo is the frontend that has changed last; those behind it are next. It is nil before any has.
	upTo *plan.Frontend
}

// numbering is the endpoints under the two policies, indexed by their numbers in the maps.
type numbering struct{ cluster, local []netip.AddrPort }

// listed returns the endpoints of the ServicePort that get numbers, under policy Local or Cluster.
func (w written) listed(local bool) []plan.Endpoint {
	switch {
	case w.sp == nil:
		return nil
	case local:
		return usable(w.sp, w.sp.Endpoints.Local)
	}
	return usable(w.sp, w.sp.Endpoints.Cluster)
}

// endpoints returns the endpoints under policy Local or Cluster, indexed by their numbers.
func (w written) endpoints(local bool) []netip.AddrPort {
	switch {
	case w.numbers != nil && local:
		return w.numbers.local
	case w.numbers != nil:
		return w.numbers.cluster
	}
	return addressesOf(w.listed(local))
}

// endpoint is one of endpoints.
func (w written) endpoint(local bool, number int) netip.AddrPort {
	if w.numbers != nil {
		return w.endpoints(local)[number]
	}
	return w.listed(local)[number].Addr
}

// numbered is the length of endpoints.
func (w written) numbered(local bool) int {
	if w.numbers != nil {
		return len(w.endpoints(local))
	}
	return len(w.listed(local))
}

// placed numbers endpoints, of which some may be listed more than once. An endpoint keeps the numbers that it has in before if possible, so
// that few elements change.
func placed(before, list []netip.AddrPort) []netip.AddrPort {
	if len(before) == 0 {
		return list
	}
	out := make([]netip.AddrPort, len(list))
	wanted := make(map[netip.AddrPort]int, len(list))
	for _, a := range list {
		wanted[a]++
	}
	for i, a := range before[:min(len(before), len(out))] {
		if wanted[a] > 0 { // Another program may have written it more often.
			out[i] = a
			wanted[a]--
		}
	}
	i := 0
	for _, a := range list {
		if wanted[a] == 0 {
			continue
		}
		wanted[a]--
		for out[i].IsValid() {
			i++
		}
		out[i] = a
	}
	return out
}

// place numbers the endpoints of a ServicePort, where the kernel has before.
func place(before written, sp *plan.ServicePort) written {
	out := written{sp: sp, numbers: &numbering{
		numbered(before.endpoints(false), sp, sp.Endpoints.Cluster), numbered(before.endpoints(true), sp, sp.Endpoints.Local),
	}}
	inOrder := func(a netip.AddrPort, ep plan.Endpoint) bool { return a == ep.Addr }
	if slices.EqualFunc(out.numbers.cluster, sp.Endpoints.Cluster, inOrder) && slices.EqualFunc(out.numbers.local, sp.Endpoints.Local, inOrder) {
		out.numbers = nil
	}
	return out
}

// fill puts the elements of a ServicePort into out, and the kinds that they lead to into used.
func (l *layout) fill(w written, out map[id]value, used map[kind]bool) {
	for _, e := range l.unsorted(w, used) {
		out[e.id] = e.value
	}
}

// elements returns the elements of a ServicePort in order, and puts the kinds that they lead to into used.
func (l *layout) elements(w written, used map[kind]bool) []element {
	list := l.unsorted(w, used)
	slices.SortFunc(list, func(a, b element) int { return compareIDs(a.id, b.id) })
	return list
}

// unsorted is elements, in any order.
func (l *layout) unsorted(w written, used map[kind]bool) []element {
	return l.appendElements(nil, w, used)
}

// appendElements is unsorted, but appends them to out.
func (l *layout) appendElements(out []element, w written, used map[kind]bool) []element {
	if w.sp != nil {
		out = slices.Grow(out, len(w.sp.Frontends)*(2+w.numbered(false)))
		comment := nft.Comment(w.sp.Key.PortName())
		for _, fe := range w.sp.Frontends {
			if _, is := w.others[fe]; !is {
				out = l.ofFrontend(out, w, fe, comment, used)
			}
		}
	}
	for fe, v := range w.others {
		if v != nil {
			out = l.ofFrontend(out, *v, fe, nft.Comment(v.sp.Key.PortName()), used)
		}
	}
	return out
}

// ofFrontend appends the elements of one frontend of a ServicePort.
func (l *layout) ofFrontend(out []element, w written, fe plan.Frontend, comment string, used map[kind]bool) []element {
	if fe.Kind == plan.HealthCheckNodePort {
		return out
	}
	put := func(set setID, key, data, comment string) {
		out = append(out, element{id{set: set, key: key}, value{data: data, comment: comment}})
	}
	name := nameOf(l.family, fe)
	of, inside := w.kindsOf(fe)
	used[of] = true
	put(services, name, string(native(of.number())), comment)
	w.putEndpoints(name, of, put)
	if inside != nil {
		used[*inside] = true
		put(servicesWithin, name, string(native(inside.number())), comment)
		w.putEndpoints(name, *inside, put)
	}
	if fe.Kind == plan.ClusterIP {
		put(clusterIPs, string(fe.Addr.AsSlice()), "", "")
	}
	if !w.withoutSources {
		out = append(out, l.sources(w.sp, fe)...)
	}
	return out
}

// putEndpoints passes the endpoints of a frontend of kind k to put.
func (w written) putEndpoints(name string, k kind, put func(set setID, key, data, comment string)) {
	of := setsOf(k)
	if k.affinity == 0 {
		for n := range k.count {
			put(of.plain, indexed(name, uint32(n)), endpointValue(w.endpoint(k.local, n)), "")
		}
		return
	}
	list := w.endpoints(k.local)[:k.count]
	met := map[uint32]bool{}
	for i, n := range identifiers(list) {
		put(of.choice, indexed(name, uint32(i)), string(native(n)), "")
		if !met[n] { // One with weight has several numbers.
			met[n] = true
			put(of.sticky, indexed(name, n), endpointValue(list[i]), "")
		}
	}
}

// identifiers returns the numbers by which the affinity map refers to endpoints. Each is a hash of the endpoint; only where hashes
// collide does it depend on other endpoints. So clients keep their endpoint while others come and go.
func identifiers(list []netip.AddrPort) []uint32 {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return list[a].Compare(list[b]) })
	out, taken := make([]uint32, len(list)), make(map[uint32]bool, len(list))
	for n, i := range order {
		if n > 0 && list[i] == list[order[n-1]] {
			out[i] = out[order[n-1]]
			continue
		}
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

// sources returns the source ranges of a load balancer IP, if it has any. If they contain the node's IP, the load balancer IP is added to them: a
// node to which such an address is assigned uses it as the source when it connects to it.
func (l *layout) sources(sp *plan.ServicePort, fe plan.Frontend) []element {
	if fe.Kind != plan.LoadBalancerIP || len(sp.SourceRanges) == 0 || !sp.Any || sp.SourceRanges[0].Bits() == 0 {
		return nil
	}
	key := nameOf(l.family, fe)
	out := make([]element, 1, 1+len(sp.SourceRanges))
	out[0] = element{id{set: limited, key: key}, value{comment: nft.Comment(sp.Key.PortName())}}
	add := func(r netip.Prefix) {
		for part := range stepsOf(r) {
			out = append(out, element{id: id{set: sourceRanges, key: ranged(key, part)}})
		}
	}
	for _, r := range sp.SourceRanges {
		add(r)
	}
	if node := l.node.IP(l.family); node.IsValid() && plan.Within(sp.SourceRanges, node) && !plan.Within(sp.SourceRanges, fe.Addr) {
		add(netip.PrefixFrom(fe.Addr, fe.Addr.BitLen()))
	}
	return out
}

// sameSources reports whether two ServicePorts have the same elements of source ranges, so that a change from one to the other need not
// make them: there may be thousands.
func sameSources(a, b *plan.ServicePort) bool {
	return a != nil && b != nil && a.Any == b.Any && slices.Equal(a.SourceRanges, b.SourceRanges) && slices.Equal(a.Frontends, b.Frontends)
}

// ranged is a frontend, as nameOf returns it, followed by a range of sources and the length of its prefix.
func ranged(name string, r netip.Prefix) string {
	var out [44]byte
	b := appendAddr(append(out[:0], name...), r.Addr())
	return string(append(binary.BigEndian.AppendUint16(b, uint16(r.Bits())), 0, 0))
}

// rangeStep is the step between the lengths of prefixes that ranges have in the set, from itself to that of an address. There are 32 such lengths.
func rangeStep(f plan.Family) int { return f.Bits() / 32 }

// stepsOf yields the ranges that the set has for a range: itself, or up to eight of the next length that there is.
func stepsOf(r netip.Prefix) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		step := rangeStep(plan.FamilyOf(r.Addr()))
		more := (step - r.Bits()%step) % step // bits, which are in one byte
		for i := range 1 << more {
			b := r.Masked().Addr().AsSlice()
			if i > 0 {
				b[r.Bits()/8] |= byte(i << (8 - r.Bits()%8 - more))
			}
			if a, _ := netip.AddrFromSlice(b); !yield(netip.PrefixFrom(a, r.Bits()+more)) {
				return
			}
		}
	}
}

// fixed returns the elements that are not those of a Service.
func fixed(used map[kind]bool) map[id]value {
	out := map[id]value{}
	for k := range used {
		for _, lead := range k.leads() {
			out[lead.id] = lead.value
		}
	}
	for b := range 256 {
		out[id{set: sameByte, key: registers([]byte{byte(b)}, []byte{byte(b)})}] = value{}
	}
	return out
}

// ofServices reports whether each element of the set belongs to a ServicePort.
func (s setID) ofServices() bool {
	return s != kinds && s != kindsWithin && s != sameByte && !s.remembers()
}

// frontendOf returns the frontend in an element's key; the zero Address if there is none.
func (i id) frontendOf(f plan.Family) plan.Address {
	n := f.Bits() / 8
	if i.set == clusterIPs || !i.set.ofServices() {
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
	return cmp.Or(cmp.Compare(a.set, b.set), cmp.Compare(a.key, b.key))
}

func nativeNumber(b string) uint32 { return binary.NativeEndian.Uint32([]byte(b)) }

func bigEndianNumber(b string) uint16 { return binary.BigEndian.Uint16([]byte(b)) }
