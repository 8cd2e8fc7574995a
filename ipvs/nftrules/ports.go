package nftrules

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// ErrNoPorts is the error for a kernel that can't divert single ports of an address.
var ErrNoPorts = errors.New("this kernel has no nftables (module nf_tables), or no routing rules (CONFIG_IP_MULTIPLE_TABLES)")

// Ports makes single ports of addresses local, while other packets to these addresses go where the network sends them:
//
//	table ip nodeproxy-ipvs-ports {
//		set ports { type ipv4_addr . inet_proto . inet_service; }
//		chain divert {
//			type filter hook prerouting priority 1000;
//			ip daddr . meta l4proto . th dport @ports meta mark set 0x28030000
//		}
//		...
//	}
//	ip rule add pref 90 fwmark 0x28030000 lookup 2496
//	ip route add local ADDRESS dev kube-ipvs0 table 2496
//
// The packet's mark is kept in its priority until the packet is routed, and then restored. The node's own packets are routed twice:
// when their socket connects, which sets their source, and after chain output-divert.
//
// While there are no ports, there is neither a table nor a rule: rules slow down the kernel's routing lookups. The routes are those
// of Device.AddPortRoutes.
type Ports struct {
	*table
	handle *links.Handle
}

// portSet is the set of ports of a family.
func portSet(f plan.Family) nft.Set {
	address := uint32(nft.TypeIPv4)
	if f == plan.IPv6 {
		address = nft.TypeIPv6
	}
	return nft.Set{Name: "ports", Key: nft.Concat{address, nft.TypeProtocol, nft.TypeServicePort}}
}

// OpenPorts returns ErrNoPorts if the kernel lacks something.
func OpenPorts(f plan.Family) (*Ports, error) {
	t, err := table{family: f, name: names.IPVSPorts, sets: []nft.Set{portSet(f)}, chains: portChains(f)}.open()
	if errors.Is(err, nft.ErrAbsent) {
		return nil, ErrNoPorts
	} else if err != nil {
		return nil, err
	}
	x := &Ports{table: t}
	if x.handle, err = links.NewHandle(unix.NETLINK_ROUTE); err != nil {
		_ = t.Close()
		return nil, fmt.Errorf("routing rules: netlink socket: %w", err)
	}
	if _, err := portRules(x.handle, f); err != nil {
		_ = x.Close()
		if noRules(err) {
			return nil, ErrNoPorts
		}
		return nil, err
	}
	return x, nil
}

// Close closes the sockets. It leaves what was written.
func (x *Ports) Close() error {
	x.handle.Close()
	return x.table.Close()
}

// portChains are the chains in the order in which a packet meets them. Table raw has priority -300, and connection tracking at OUTPUT -200. What IPVS
// sends on is tracked already when it comes to OUTPUT, and is not diverted though it may be sent to one of the ports.
func portChains(f plan.Family) []nft.Chain {
	rule := func() *guardBuilder { return MarkGuard{}.rule() }
	restore := []nft.Rule{rule().diverted().copy(inMark, inPriority).clear(inPriority).done()}
	return []nft.Chain{
		{Name: "divert", Hook: filter("prerouting", 1000), Rules: []nft.Rule{rule().toPort(f).divert().done()}},
		{Name: "restore", Hook: filter("input", -1000), Rules: restore},
		// A frame that is bridged is not routed.
		{Name: "restore-bridged", Hook: filter("forward", -1000), Rules: restore},
		{Name: "output-divert", Hook: &nft.Hook{Type: "route", Name: "output", Priority: -304},
			Rules: []nft.Rule{rule().untracked().toPort(f).divert().done()}},
		{Name: "output-restore", Hook: filter("output", -303), Rules: restore},
	}
}

// untracked matches packets that connection tracking has not yet seen.
func (b *guardBuilder) untracked() *guardBuilder {
	return b.add("ct state invalid", &expr.Ct{Key: expr.CtKeySTATE, Register: 1}, bits(expr.CtStateBitINVALID, 0),
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(0)})
}

// toPort matches packets to one of the ports. A key occupies consecutive registers of four bytes.
func (b *guardBuilder) toPort(f plan.Family) *guardBuilder {
	const first = unix.NFT_REG32_00
	name, offset, length := "ip", uint32(16), uint32(4)
	if f == plan.IPv6 {
		name, offset, length = "ip6", 24, 16
	}
	next := first + length/4
	return b.add(name+" daddr . meta l4proto . th dport @ports",
		&expr.Payload{DestRegister: first, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: next},
		&expr.Payload{DestRegister: next + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: first, SetName: "ports"})
}

// divert saves the mark and replaces it by names.PortsMark.
func (b *guardBuilder) divert() *guardBuilder {
	b.copy(inPriority, inMark)
	return b.add(fmt.Sprintf("meta mark set %#08x", names.PortsMark), &expr.Immediate{Register: 1, Data: native(names.PortsMark)}, store(inMark, 1))
}

func (b *guardBuilder) diverted() *guardBuilder {
	return b.add(fmt.Sprintf("meta mark == %#08x", names.PortsMark), load(inMark, 1), equals(native(names.PortsMark)))
}

// PortsText returns what Ports writes for some ports, in the languages of nft and ip.
func PortsText(f plan.Family, ports []plan.Address) string {
	if len(ports) == 0 {
		return ""
	}
	out := tableText(f, names.IPVSPorts, portChains(f)) + "set ports type " + portSet(f).Key.String() + "\n"
	for _, p := range ports {
		out += fmt.Sprintf("add element %s %s ports { %s . %s . %d }\n", nft.FamilyName(f), names.IPVSPorts, p.Addr, p.Protocol.Lower(), p.Port)
	}
	option := map[plan.Family]string{plan.IPv4: "-4", plan.IPv6: "-6"}[f]
	return out + fmt.Sprintf("ip %s rule add pref %d fwmark %#x lookup %d\n", option, names.PortsRulePriority, names.PortsMark, names.PortsRouteTable)
}

func (x *Ports) rule() *links.Rule {
	r := links.NewRule()
	r.Family, r.Priority, r.Table, r.Mark = int(netlink.Family(x.family)), names.PortsRulePriority, names.PortsRouteTable, names.PortsMark
	// Programs that remove rules which are not theirs, such as systemd-networkd, leave those of the kernel alone.
	r.Protocol = unix.RTPROT_KERNEL
	return r
}

// List returns the ports in the set. complete says that table and rule are as they should be, and exists that any of them exists.
func (x *Ports) List() (ports set.Set[plan.Address], exists, complete bool, err error) {
	exists, complete, err = x.state()
	if err != nil {
		return nil, false, false, err
	}
	rules, err := portRules(x.handle, x.family)
	if err != nil {
		return nil, false, false, err
	}
	complete = complete && len(rules) == 1 && isPortRule(rules[0])
	exists = exists || len(rules) > 0
	ports, err = x.elements()
	return ports, exists, complete, err
}

func isPortRule(r links.Rule) bool {
	return r.Priority == names.PortsRulePriority && r.Mark == names.PortsMark && r.Src == nil && r.Dst == nil && r.IifName == "" && r.OifName == "" &&
		!r.Invert && (r.Mask == nil || *r.Mask == ^uint32(0))
}

// mostReads bounds how often elements are read.
const mostReads = 6

// elements reads the set until a listing has no port that was not seen before: soon after the set has grown, some may be missing (see
// nft.Conn.Elements).
func (x *Ports) elements() (set.Set[plan.Address], error) {
	out := set.Set[plan.Address]{}
	for range mostReads {
		seen := len(out)
		list, err := x.Elements(x.family, x.name, x.sets[0])
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			if p, ok := parsePort([]byte(e.Key), x.family); ok {
				out.Insert(p)
			}
		}
		if len(out) == seen {
			break
		}
	}
	return out, nil
}

func portElements(ports []plan.Address) []nft.Element {
	var out []nft.Element
	for _, p := range ports {
		out = append(out, nft.Element{Key: string(portKey(p))})
	}
	return out
}

// portKey returns an element of the set: each of its parts fills registers of four bytes.
func portKey(p plan.Address) []byte {
	key := append(p.Addr.AsSlice(), netlink.Protocol(p.Protocol), 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(key, p.Port), 0, 0)
}

func parsePort(key []byte, f plan.Family) (plan.Address, bool) {
	length := 4
	if f == plan.IPv6 {
		length = 16
	}
	if len(key) != length+8 {
		return plan.Address{}, false
	}
	a, ok := netip.AddrFromSlice(key[:length])
	return plan.Address{Addr: a, Protocol: netlink.ProtocolOf(key[length]), Port: binary.BigEndian.Uint16(key[length+4:])}, ok
}

// Write writes table and rule, with these ports and no others, replacing the table in one step.
func (x *Ports) Write(ports []plan.Address) error {
	if err := x.write(portElements(ports)); err != nil {
		return err
	}
	there, err := prunePortRules(x.handle, x.family, isPortRule)
	if err != nil || there {
		return err
	}
	if err := x.handle.RuleAdd(x.rule()); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("adding the %s routing rule for table %d: %w", x.family, names.PortsRouteTable, err)
	}
	return nil
}

// Add adds ports.
func (x *Ports) Add(ports []plan.Address) error {
	b := nft.NewBatch(x.family, x.name)
	b.AddElements(x.sets[0], portElements(ports))
	return x.Commit(b)
}

// Remove removes ports.
func (x *Ports) Remove(ports []plan.Address) error {
	b := nft.NewBatch(x.family, x.name)
	b.DeleteElements(x.sets[0], portElements(ports))
	return x.Commit(b)
}

// Clear removes table and rule.
func (x *Ports) Clear() error {
	b := nft.NewBatch(x.family, x.name)
	b.AddTable()
	b.DeleteTable()
	return errors.Join(removePortRules(x.handle, x.family), x.Commit(b))
}

// portRules lists the rules that lead to names.PortsRouteTable.
func portRules(h *links.Handle, f plan.Family) ([]links.Rule, error) {
	list, err := host.List(func() ([]links.Rule, error) {
		return h.RuleListFiltered(int(netlink.Family(f)), &links.Rule{Table: names.PortsRouteTable}, links.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("listing the %s routing rules for table %d: %w", f, names.PortsRouteTable, err)
	}
	for i := range list {
		list[i].Family = int(netlink.Family(f))
	}
	return list, nil
}

// prunePortRules removes the rules that lead to names.PortsRouteTable, but for some, and reports whether there are such.
func prunePortRules(h *links.Handle, f plan.Family, stays func(links.Rule) bool) (some bool, err error) {
	list, err := portRules(h, f)
	errs := []error{err}
	for _, r := range list {
		if stays(r) {
			some = true
		} else if err := h.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("removing routing rule %s: %w", r, err))
		}
	}
	return some, errors.Join(errs...)
}

func removePortRules(h *links.Handle, f plan.Family) error {
	_, err := prunePortRules(h, f, func(links.Rule) bool { return false })
	return err
}

// PortsFamilies returns the families for which a Ports has left a table or a rule in the network namespace of the calling thread.
func PortsFamilies() ([]plan.Family, error) {
	out, err := nft.FamiliesWith(names.IPVSPorts)
	if err != nil {
		return nil, err
	}
	for _, f := range plan.Families {
		list, err := portRules(new(links.Handle), f)
		if noRules(err) {
			continue
		} else if err != nil {
			return nil, err
		}
		if len(list) > 0 && !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out, nil
}

// noRules reports whether an error is that of a kernel without routing rules.
func noRules(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)
}

// RemovePorts removes the tables and rules of both families, and what an interrupted AddUnrouted has left. The routes are removed
// with the interface.
func RemovePorts() error {
	errs := []error{nft.RemoveTables(names.IPVSPorts), host.RemoveThrown()}
	for _, f := range plan.Families {
		if err := removePortRules(new(links.Handle), f); !noRules(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
