package ipvs_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
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
				if err != nil {
					t.Fatal(err)
				}
				node := packetsim.Node{Local: c.Local}
				want, err := all.Trace(pkt, node)
				if err != nil {
					t.Fatal(err)
				}
				got, err := near.Trace(pkt, node)
				if err != nil {
					t.Fatal(err)
				}
				if plantest.Ways(got) != plantest.Ways(want) {
					t.Fatalf("%s goes\n%swant\n%s", pkt, plantest.Ways(got), plantest.Ways(want))
				}
			}
		}
	})
}

// TestRenderedObjects: Render prints the objects that packets meet, each once.
func TestRenderedObjects(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := drawCluster(t)
		options := drawOptions(t, c)
		for _, f := range plan.Families {
			text := ipvs.Render(c.Plan, f, options)
			m := machineOf(t, c.Plan, f, options)
			var want, got []string
			for _, s := range m.Sets {
				for _, e := range s.Entries {
					want = append(want, "add "+s.Name+" "+strings.TrimSuffix(e.String(), "/0xffffffff"))
				}
			}
			for _, v := range m.Servers {
				want = append(want, string(v.Text))
				for _, r := range v.RealServers {
					want = append(want, string(r.Text))
				}
			}
			objects, rest, _ := strings.Cut(text, "# ip -batch\n")
			for line := range strings.Lines(objects) {
				if line = strings.TrimSpace(line); line[0] != '#' && !strings.HasPrefix(line, "create ") {
					got = append(got, line)
				}
			}
			if slices.Sort(want); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
				t.Fatalf("rendered are\n%q\nand packets meet\n%q", got, want)
			}
			for a := range m.Added {
				if n := strings.Count(rest, " add "+a.String()+" dev ") + strings.Count(rest, " add local "+a.String()+" dev "); n != 1 {
					t.Fatalf("%s is local by %d lines", a, n)
				}
			}
			for a := range m.Diverted {
				element := fmt.Sprintf(" { %s . %s . %d }\n", a.Addr, a.Protocol.Lower(), a.Port)
				if strings.Count(rest, element) != 1 || strings.Count(rest, "route add local "+a.Addr.String()+" dev kube-ipvs0 table 2496\n") != 1 {
					t.Fatalf("%v is not local", a)
				}
			}
		}
	})
}
