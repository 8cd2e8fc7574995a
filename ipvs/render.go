package ipvs

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Render returns the objects of a plan for one family, as input for the programs ipset, ipvsadm, ip and iptables-restore, in stable
// order. What is written to nftables by netlink is described.
func Render(p *plan.Plan, f plan.Family, o Options) string {
	s := full(p, f, o)
	h := s.target(p.Node.IP(f))
	var out strings.Builder
	out.WriteString("# ipset restore\n")
	h.renderSets(&out, f)
	out.WriteString("# ipvsadm --restore\n")
	for _, id := range slices.SortedFunc(maps.Keys(s.servers), compareServers) {
		if v := s.server(id); len(v.realServers) > 0 { // One without real servers need not exist.
			out.WriteString(strings.Join(serverLines(v), "\n") + "\n")
		}
	}
	h.renderDevice(&out, s.ranges)
	out.WriteString("# nftables by netlink\n" + newMarks(o.MasqueradeBit).guard().Text(f) + nftrules.PortsText(f, h.ports.sorted()))
	if f == plan.IPv6 {
		out.WriteString("# ip6tables-restore\n")
	} else {
		out.WriteString("# iptables-restore\n")
	}
	out.WriteString(rules(p, f, o).Render())
	return out.String()
}

// renderDevice prints the device with its addresses and routes, as host.Device makes them, and those that diverted ports need.
func (h *actual) renderDevice(out *strings.Builder, ranges []netip.Prefix) {
	fmt.Fprintf(out, "# ip -batch\nlink add %s type dummy\nlink set %s addrgenmode none\nlink set %s up\n", names.Device, names.Device, names.Device)
	for _, a := range slices.SortedFunc(maps.Keys(h.vips), netip.Addr.Compare) {
		renderAddress(out, a)
	}
	for _, r := range ranges {
		fmt.Fprintf(out, "route add local %s dev %s table local", r, names.Device)
		if src := h.routes[r]; src.IsValid() {
			fmt.Fprintf(out, " src %s", src)
		}
		out.WriteByte('\n')
	}
	for _, a := range slices.SortedFunc(maps.Keys(h.ports.routes), netip.Addr.Compare) {
		if h.ports.unrouted.Has(a) {
			renderAddress(out, a)
			fmt.Fprintf(out, "route del local %s dev %s table local\n", a, names.Device)
		}
		fmt.Fprintf(out, "route add local %s dev %s table %d\n", a, names.Device, names.PortsRouteTable)
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

func (h *actual) renderSets(out *strings.Builder, f plan.Family) {
	lines := make([][]string, setCount)
	for m, with := range h.members {
		lines[m.set] = append(lines[m.set], m.entry(with).Text(setOf(m.set, f)))
	}
	for id := range setCount {
		set := setOf(id, f)
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

// server is a virtual server to print.
type server struct {
	ipvs.Server
	key         plan.Key // of the ServicePort, if that is known
	realServers []ipvs.RealServer
}

// server returns a desired virtual server.
func (s *state) server(id ipvs.ServerID) server {
	w := s.servers[id]
	v := server{Server: s.options.wanted(id, w), key: w.sp.Key}
	for _, ep := range w.endpoints() {
		v.realServers = append(v.realServers, realServer(ep))
	}
	return v
}

// serverLines are a virtual server as "ipvsadm --save --numeric" prints it.
func serverLines(v server) []string {
	lines := []string{addServerText(v)}
	for _, d := range v.realServers {
		lines = append(lines, addRealServerText(v, d))
	}
	return lines
}

func addServerText(v server) string {
	return fmt.Sprintf("-A %s %s", serverArgs(v.ID), serverOptions(v.Server))
}

func addRealServerText(v server, d ipvs.RealServer) string {
	return fmt.Sprintf("-a %s -r %s -m -w %d", serverArgs(v.ID), d.Addr, d.Weight)
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
