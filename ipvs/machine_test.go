package ipvs_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
	"nodeproxy/plan/plantest"
)

// TestMachine: the objects of ServicePorts near a packet lead it where all objects do, by the same rules, sets and servers.
func TestMachine(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		for _, f := range plan.Families {
			all := machineOf(t, c.Plan, f, options)
			for range packetsPerPlan / 3 {
				pkt := c.Packets(f).Draw(t, "packet")
				near, err := ipvs.Machine(c.Plan.Near(pkt), f, options)
				require.NoError(t, err)
				node := packetsim.Node{Local: c.Local}
				want, err := all.Trace(pkt, node)
				require.NoError(t, err)
				got, err := near.Trace(pkt, node)
				require.NoError(t, err)
				if plantest.Ways(got) != plantest.Ways(want) {
					t.Fatalf("%s goes\n%swant\n%s", pkt, plantest.Ways(got), plantest.Ways(want))
				}
			}
		}
	})
}

// TestRenderedObjects: Render prints the objects that packets meet, each once, and no others. What its lines say is made of the objects' data
// here, which decides where packets go.
func TestRenderedObjects(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		for _, f := range plan.Families {
			text := ipvs.Render(c.Plan, f, options)
			m := machineOf(t, c.Plan, f, options)
			objects, rest, _ := strings.Cut(text, "# ip -batch\n")
			addresses, rules, _ := strings.Cut(rest, map[plan.Family]string{plan.IPv4: "# iptables", plan.IPv6: "# ip6tables"}[f]+"-restore\n")
			equalLines(t, "objects", lines(objects), objectLines(m))
			equalLines(t, "local addresses", localIn(t, addresses), localOf(m))
			alone := packetsim.New(f)
			alone.Sets = m.Sets
			require.NoError(t, restore.IPTables(alone, rules))
			equalLines(t, "rules", ruleLines(alone), ruleLines(m))
		}
	})
}

func equalLines(t *rapid.T, what string, rendered, met []string) {
	slices.Sort(rendered)
	if slices.Sort(met); !slices.Equal(rendered, met) {
		t.Fatalf("%s: rendered are\n%s\nand packets meet\n%s", what, strings.Join(rendered, "\n"), strings.Join(met, "\n"))
	}
}

// lines are those of a text that are no headings. Of those that create sets, what decides which packets are found is kept.
func lines(text string) (out []string) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line[0] != '#' {
			line, _, _ = strings.Cut(line, " hashsize ")
			out = append(out, strings.TrimSuffix(line, " skbinfo"))
		}
	}
	return out
}

// objectLines are the lines for the sets and the virtual servers of a machine.
func objectLines(m *packetsim.Machine) (out []string) {
	for _, s := range m.Sets {
		kind := strings.Join(s.Dimensions, ",")
		switch s.Family {
		case 0:
			kind = "bitmap:" + kind + " range 0-65535"
		case plan.IPv4:
			kind = "hash:" + kind + " family inet"
		default:
			kind = "hash:" + kind + " family inet6"
		}
		out = append(out, "create "+s.Name+" "+kind)
		for at, e := range s.Entries {
			line := "add " + s.Name + " " + elementText(s, at)
			if e.Mask != 0 {
				line += strings.TrimSuffix(fmt.Sprintf(" skbmark %#x/%#x", e.Mark, e.Mask), "/0xffffffff")
			}
			out = append(out, line)
		}
	}
	for at, v := range m.Servers {
		key := map[string]string{"tcp": "-t", "udp": "-u", "sctp": "--sctp-service"}[at.Protocol] + " " + at.Addr.String()
		if at.Mark != 0 {
			key = fmt.Sprintf("-f %d", at.Mark)
			if m.Family == plan.IPv6 {
				key += " -6"
			}
		}
		line := "-A " + key + " -s " + v.Scheduler
		if text := string(v.Text); strings.HasPrefix(text, line+" -") {
			line = text // Persistence and flags of a scheduler decide nothing for a first packet.
		}
		out = append(out, line)
		for _, r := range v.RealServers {
			out = append(out, fmt.Sprintf("-a %s -r %s -m -w %d", key, r.Addr, r.Weight))
		}
	}
	return out
}

func elementText(s *packetsim.Set, at packetsim.Element) string {
	var parts []string
	for i, d := range s.Dimensions {
		switch {
		case d == "port" && s.Family == 0:
			parts = append(parts, fmt.Sprint(at[i].Port))
		case d == "port":
			parts = append(parts, fmt.Sprintf("%s:%d", at[i].Protocol, at[i].Port))
		case at[i].Prefix.Bits() == 0:
			parts = append(parts, "a net that the kernel does not take")
		default:
			parts = append(parts, strings.TrimSuffix(at[i].Prefix.String(), fmt.Sprintf("/%d", s.Family.Bits())))
		}
	}
	return strings.Join(parts, ",")
}

// localIn are the ranges and the ports that are local once the lines for the device, and what is said of nftables, are carried out.
func localIn(t *rapid.T, text string) (out []string) {
	add := func(line string) {
		if slices.Contains(out, line) {
			t.Fatalf("%s is local twice", line)
		}
		out = append(out, line)
	}
	routed := map[string]bool{} // by port
	for line := range strings.Lines(text) {
		switch w := strings.Fields(line); {
		case strings.HasPrefix(line, "address add "):
			add(w[2])
		case strings.HasPrefix(line, "route add local ") && strings.Contains(line, " dev kube-ipvs0 table local"):
			add(w[3])
		case strings.HasPrefix(line, "route del local "): // Single addresses are such routes.
			i := slices.IndexFunc(out, func(a string) bool { return strings.HasPrefix(a, w[3]+"/") })
			if i < 0 {
				t.Fatalf("there is no route to remove: %s", line)
			}
			out = slices.Delete(out, i, i+1)
		case strings.HasPrefix(line, "route add local ") && strings.HasSuffix(line, " dev kube-ipvs0 table 2496\n"):
			routed[w[3]] = true
		case strings.HasPrefix(line, "add element ") && routed[w[6]] && strings.Count(text, " fwmark 0x28030000 lookup 2496\n") == 1 &&
			strings.Contains(text, " @ports meta priority set meta mark meta mark set 0x28030000\n"):
			add(strings.Join(w[6:11], " "))
		case strings.HasPrefix(line, "route ") || strings.HasPrefix(line, "add element "):
			t.Fatalf("%s makes nothing local", line)
		}
	}
	return out
}

// localOf are the ranges and the ports that are local to a machine for Services.
func localOf(m *packetsim.Machine) (out []string) {
	for a := range m.Added {
		out = append(out, a.String())
	}
	for a := range m.Diverted {
		out = append(out, fmt.Sprintf("%s . %s . %d", a.Addr, a.Protocol.Lower(), a.Port))
	}
	return out
}

// ruleLines are the rules of a machine with their chains and their places there.
func ruleLines(m *packetsim.Machine) (out []string) {
	for table, chains := range m.Tables {
		for name, c := range chains {
			for i, r := range c.Rules {
				out = append(out, fmt.Sprintf("%s %s %d: %s", table, name, i, r))
			}
		}
	}
	return out
}
