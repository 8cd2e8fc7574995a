package ipvs

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/sets"

	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Render returns the objects of a plan for one family, as input for the programs ipset, ipvsadm, ip and iptables-restore, in stable
// order. What is written to nftables by netlink is described.
func Render(p *plan.Plan, f plan.Family, o Options) string {
	s := full(p, f, o)
	ranges := o.routed(p, f)
	var out strings.Builder
	out.WriteString("# ipset restore\n")
	s.renderSets(&out, ranges)
	out.WriteString("# ipvsadm --restore\n")
	for _, id := range slices.SortedFunc(maps.Keys(s.servers), compareServers) {
		renderServer(&out, s.servers[id])
	}
	diverted := s.diverted(ranges)
	s.renderDevice(&out, p.Node.IP(f), ranges)
	renderPorts(&out, diverted)
	out.WriteString("# nftables by netlink\n" + newMarks(o.MasqueradeBit).guard().Text(f) + nftrules.PortsText(f, diverted))
	if f == plan.IPv6 {
		out.WriteString("# ip6tables-restore\n")
	} else {
		out.WriteString("# iptables-restore\n")
	}
	out.WriteString(rules(p, f, o).Render())
	return out.String()
}

// renderDevice prints the device with its addresses and routes, as host.Device makes them.
func (s *state) renderDevice(out *strings.Builder, nodeIP netip.Addr, ranges []netip.Prefix) {
	fmt.Fprintf(out, "# ip -batch\nlink add %s type dummy\nlink set %s addrgenmode none\nlink set %s up\n", names.Device, names.Device, names.Device)
	for _, a := range slices.SortedFunc(maps.Keys(s.addresses()), netip.Addr.Compare) {
		if s.bound(a, s.options.Host, ranges) {
			renderAddress(out, a)
		}
	}
	for _, r := range ranges {
		fmt.Fprintf(out, "route add local %s dev %s table local", r, names.Device)
		if nodeIP.IsValid() {
			fmt.Fprintf(out, " src %s", nodeIP)
		}
		out.WriteByte('\n')
	}
}

// renderAddress prints an address of the device. The node does not use it as the source of its own connections.
func renderAddress(out *strings.Builder, a netip.Addr) {
	attributes := "scope host"
	if a.Is6() {
		attributes = "nodad preferred_lft 0"
	}
	fmt.Fprintf(out, "address add %s dev %s %s\n", netip.PrefixFrom(a, a.BitLen()), names.Device, attributes)
}

// addresses returns the addresses of all Services.
func (s *state) addresses() sets.Set[netip.Addr] {
	out := sets.Set[netip.Addr]{}
	for a := range s.vips {
		out.Insert(a)
	}
	for a := range s.ports {
		out.Insert(a)
	}
	return out
}

// diverted returns the ports of external IPs that are local while their addresses are not, in order.
func (s *state) diverted(ranges []netip.Prefix) []plan.Address {
	var out []plan.Address
	for a, at := range s.ports {
		if s.byPort(a, s.options.Host, ranges) {
			out = slices.AppendSeq(out, maps.Keys(at))
		}
	}
	slices.SortFunc(out, comparePorts)
	return out
}

// renderPorts prints the addresses and routes that diverted ports need.
func renderPorts(out *strings.Builder, ports []plan.Address) {
	var last netip.Addr
	for _, p := range ports {
		a := p.Addr
		if a == last {
			continue
		}
		if last = a; a.Is4() {
			renderAddress(out, a)
			fmt.Fprintf(out, "route del local %s dev %s table local\n", a, names.Device)
		}
		fmt.Fprintf(out, "route add local %s dev %s table %d\n", a, names.Device, names.PortsRouteTable)
	}
}

func (s *state) renderSets(out *strings.Builder, ranges []netip.Prefix) {
	lines := make([][]string, setCount)
	for m, with := range s.members {
		m.entry.Mark, m.entry.Mask = with.mark, with.mask
		lines[m.set] = append(lines[m.set], m.entry.Text(setOf(m.set, s.family)))
	}
	for a := range s.addresses() {
		if s.bound(a, s.options.Host, ranges) {
			lines[setVIPs] = append(lines[setVIPs], ipset.Entry{Addr: a}.Text(setOf(setVIPs, s.family)))
		}
	}
	for id := range setCount {
		set := setOf(id, s.family)
		fmt.Fprintf(out, "%s\n", set.CreateText())
		slices.Sort(lines[id])
		for _, line := range lines[id] {
			fmt.Fprintf(out, "add %s %s\n", set.Name, line)
		}
	}
}

// compareServers orders addresses before marks.
func compareServers(a, b ipvs.ServerID) int {
	return cmp.Or(cmp.Compare(a.Mark, b.Mark), a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

// renderServer prints a virtual server as "ipvsadm --save --numeric" does. One without real servers is not printed: it need not
// exist.
func renderServer(out *strings.Builder, v server) {
	if len(v.realServers) == 0 {
		return
	}
	name := serverArgs(v.ID)
	fmt.Fprintf(out, "-A %s %s\n", name, serverOptions(v.Server))
	for _, d := range v.realServers {
		fmt.Fprintf(out, "-a %s -r %s -m -w %d\n", name, d.Addr, d.Weight)
	}
}

// serverOptions prints the properties of a virtual server as arguments of ipvsadm.
func serverOptions(s ipvs.Server) string {
	text := "-s " + s.Scheduler
	if s.Persistence > 0 {
		text += fmt.Sprintf(" -p %d", int(s.Persistence.Seconds()))
	}
	var flags []string
	if s.Fallback {
		flags = append(flags, s.Scheduler+"-fallback")
	}
	if s.Ports {
		flags = append(flags, s.Scheduler+"-port")
	}
	if len(flags) > 0 {
		text += " -b " + strings.Join(flags, ",")
	}
	return text
}

// serverArgs returns the arguments of ipvsadm that name a virtual server.
func serverArgs(id ipvs.ServerID) string {
	switch {
	case id.Mark != 0 && id.Family == plan.IPv6:
		return fmt.Sprintf("-f %d -6", id.Mark)
	case id.Mark != 0:
		return fmt.Sprintf("-f %d", id.Mark)
	}
	option := map[plan.Protocol]string{plan.TCP: "-t", plan.UDP: "-u", plan.SCTP: "--sctp-service"}[id.Protocol]
	return option + " " + netip.AddrPortFrom(id.Addr, id.Port).String()
}
