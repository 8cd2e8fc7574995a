package e2e

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"nodeproxy/e2e/harness"
)

// neighbour is a program that uses packet marks, by the rules that it keeps. %s is where ranges of Services go, each in a rule
// of its own.
type neighbour struct {
	name  string
	rules string
	// lost names a chain that packets come to whose mark is not what the program had made it.
	lost string
}

// The rules are reduced to those that look at marks or change them. Felix has them where pods' interfaces begin with "pod".
var markingNeighbours = []neighbour{
	{name: "Calico", rules: `*raw
:cali-PREROUTING - [0:0]
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i pod+ -j MARK --set-xmark 0x40000/0x40000
COMMIT
*filter
:cali-INPUT - [0:0]
:cali-OUTPUT - [0:0]
:cali-FORWARD - [0:0]
-I INPUT 1 -j cali-INPUT
-I OUTPUT 1 -j cali-OUTPUT
-I FORWARD 1 -j cali-FORWARD
-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-INPUT -j MARK --set-xmark 0x0/0xf0000
-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
COMMIT
`},
	// Where Felix sees the device kube-ipvs0, it tells at INPUT by a mark from which endpoint a packet is, and at OUTPUT, behind
	// IPVS, which policies are due by that. What has lost its mark there would get past them all; one it does not know is dropped.
	{name: "Calico beside IPVS", lost: "cali-lost", rules: `*filter
:cali-INPUT - [0:0]
:cali-OUTPUT - [0:0]
:cali-forward-check - [0:0]
:cali-set-endpoint-mark - [0:0]
:cali-forward-endpoint-mark - [0:0]
:cali-from-endpoint-mark - [0:0]
:cali-lost - [0:0]
-I INPUT 1 -j cali-INPUT
-I OUTPUT 1 -j cali-OUTPUT
-A cali-INPUT -j MARK --set-xmark 0x0/0xfff00000
-A cali-INPUT -j cali-forward-check
-A cali-INPUT -m mark ! --mark 0x0/0xfff00000 -j RETURN
-A cali-INPUT -j MARK --set-xmark 0x0/0xf0000
-A cali-forward-check -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN
-A cali-forward-check -p tcp -m multiport --dports 30000:32767 -g cali-set-endpoint-mark
-A cali-forward-check -p udp -m multiport --dports 30000:32767 -g cali-set-endpoint-mark
-A cali-forward-check -d %s -g cali-set-endpoint-mark
-A cali-set-endpoint-mark -i lo -j RETURN
-A cali-set-endpoint-mark -i pod+ -j MARK --set-xmark 0x200000/0xfff00000
-A cali-set-endpoint-mark -m mark --mark 0x0/0xfff00000 -j MARK --set-xmark 0x100000/0xfff00000
-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -m ipvs --ipvs -m conntrack --ctstate NEW -m addrtype ! --src-type LOCAL -m mark --mark 0x0/0xfff00000 -j cali-lost
-A cali-OUTPUT -m mark ! --mark 0x0/0xfff00000 -g cali-forward-endpoint-mark
-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000
-A cali-forward-endpoint-mark -j cali-from-endpoint-mark
-A cali-forward-endpoint-mark -j MARK --set-xmark 0x0/0xfff00000
-A cali-from-endpoint-mark -m mark --mark 0x100000/0xfff00000 -j RETURN
-A cali-from-endpoint-mark -m mark --mark 0x200000/0xfff00000 -j RETURN
-A cali-from-endpoint-mark -j cali-lost
-A cali-from-endpoint-mark -j DROP
COMMIT
`},
	{name: "kube-router", rules: `*filter
:KUBE-ROUTER-INPUT - [0:0]
:KUBE-ROUTER-OUTPUT - [0:0]
:KUBE-NWPLCY-DEFAULT - [0:0]
-I INPUT 1 -j KUBE-ROUTER-INPUT
-I OUTPUT 1 -j KUBE-ROUTER-OUTPUT
-A KUBE-ROUTER-INPUT -j KUBE-NWPLCY-DEFAULT
-A KUBE-ROUTER-INPUT -j MARK --set-xmark 0x20000/0x20000
-A KUBE-ROUTER-OUTPUT -j KUBE-NWPLCY-DEFAULT
-A KUBE-ROUTER-OUTPUT -j MARK --set-xmark 0x20000/0x20000
-A KUBE-NWPLCY-DEFAULT -j MARK --set-xmark 0x10000/0x10000
COMMIT
`},
	// Cilium keeps the identity of whoever sent a packet in the upper half. This one looks like a mark of mode ipvs.
	{name: "Cilium", lost: "identity-lost", rules: `*raw
-A PREROUTING ! -i lo -j MARK --set-xmark 0x2b3c0f00/0xffff0f00
COMMIT
*filter
:identity-lost - [0:0]
-I INPUT 1 ! -i lo -m mark ! --mark 0x2b3c0f00/0xffff0f00 -j identity-lost
-I FORWARD 1 -m mark ! --mark 0x2b3c0f00/0xffff0f00 -j identity-lost
-I OUTPUT 1 -m conntrack --ctstate NEW -m addrtype ! --src-type LOCAL -m mark ! --mark 0x2b3c0f00/0xffff0f00 -j identity-lost
COMMIT
*mangle
:identity-lost - [0:0]
-A POSTROUTING -m conntrack --ctstate NEW -m addrtype ! --src-type LOCAL -m mark ! --mark 0x2b3c0f00/0xffff0f00 -j identity-lost
COMMIT
`},
}

// serviceRanges are what frontends are from, beside the node's own addresses.
var serviceRanges = []netip.Prefix{harness.ServiceCIDR4, harness.ServiceCIDR6, harness.VIPRange4, harness.VIPRange6,
	harness.ExternalIPs4, harness.ExternalIPs6}

// behind has the neighbour's rules come behind others.
func (n neighbour) behind() neighbour {
	n.rules = strings.NewReplacer("-I INPUT 1 ", "-A INPUT ", "-I OUTPUT 1 ", "-A OUTPUT ", "-I FORWARD 1 ", "-A FORWARD ").Replace(n.rules)
	return n
}

// text is the neighbour's rules for a family.
func (n neighbour) text(family int) string {
	var out strings.Builder
	for _, line := range strings.SplitAfter(n.rules, "\n") {
		if !strings.Contains(line, "%s") {
			out.WriteString(line)
			continue
		}
		for _, r := range serviceRanges {
			if r.Addr().Is6() == (family == 6) {
				fmt.Fprintf(&out, line, r)
			}
		}
	}
	return out.String()
}

// xtables runs a program of a variant's, iptables-restore or iptables-save, in node1.
func xtables(t *testing.T, w *harness.World, variant harness.Variant, family int, program, input string, args ...string) string {
	t.Helper()
	name := map[int]string{4: "iptables", 6: "ip6tables"}[family] + "-" + string(variant) + "-" + program
	out, err := w.Node1().OutputWithInput(input, name, args...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, input)
	}
	return out
}

func (n neighbour) install(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	for _, family := range families {
		xtables(t, w, variant, family, "restore", n.text(family), "--noflush")
	}
}

// remove takes the rules away again, from built-in chains first.
func (n neighbour) remove(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	for _, family := range families {
		var undo, chains strings.Builder
		for _, line := range strings.SplitAfter(n.text(family), "\n") {
			words := strings.Fields(line)
			switch {
			case strings.HasPrefix(line, "*"):
				undo.WriteString(line)
			case strings.HasPrefix(line, "COMMIT"):
				undo.WriteString(chains.String() + line)
				chains.Reset()
			case strings.HasPrefix(line, ":"):
				fmt.Fprintf(&chains, "-F %s\n", words[0][1:])
			case len(words) > 1 && strings.ToUpper(words[1]) == words[1] && !strings.Contains(words[1], "-"):
				rule := strings.Join(words[2:], " ")
				if words[0] == "-I" {
					rule = strings.Join(words[3:], " ")
				}
				fmt.Fprintf(&undo, "-D %s %s\n", words[1], rule)
			}
		}
		xtables(t, w, variant, family, "restore", undo.String(), "--noflush")
		var gone strings.Builder
		for _, line := range strings.SplitAfter(n.text(family), "\n") {
			switch {
			case strings.HasPrefix(line, "*"), strings.HasPrefix(line, "COMMIT"):
				gone.WriteString(line)
			case strings.HasPrefix(line, ":"):
				fmt.Fprintf(&gone, "-X %s\n", strings.Fields(line)[0][1:])
			}
		}
		xtables(t, w, variant, family, "restore", gone.String(), "--noflush")
	}
}

// mangled says which rules lead to the chain of lost marks and have been met, in both families.
func (n neighbour) mangled(t *testing.T, w *harness.World, variant harness.Variant) []string {
	t.Helper()
	var out []string
	for _, family := range families {
		for _, line := range strings.Split(xtables(t, w, variant, family, "save", "", "-c"), "\n") {
			if n.lost != "" && strings.HasSuffix(line, "-j "+n.lost) && !strings.HasPrefix(line, "[0:0]") {
				out = append(out, line)
			}
		}
	}
	return out
}

// TestMatrixBesideMarks: programs that use marks too, as network policies do, neither keep packets from their endpoints nor
// find marks changed that they have set; whoever comes first.
func TestMatrixBesideMarks(t *testing.T) {
	onVariants(t, harness.Variants, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		m := newMatrix(t, w)
		m.atOnce = 8
		// What is found by mark in mode ipvs, and something that is not, each from where it makes a difference.
		m.cells = slices.DeleteFunc(m.cells, func(c cell) bool {
			return !slices.Contains([]string{"pod", "own-node", "outside"}, c.source) || c.network == "udp" ||
				!slices.Contains([]string{"cluster-ip", "node-port", "lb-vip"}, c.row.frontend) ||
				!slices.Contains([]string{"local+remote", "remote-only"}, c.row.situation) || c.other != "Cluster"
		})
		check := func(n neighbour, who string) {
			t.Helper()
			wrong := m.run()
			t.Logf("%s, %s first: %d of %d questions answered as expected", n.name, who, len(m.cells)-len(wrong), len(m.cells))
			for i, index := range slices.Sorted(maps.Keys(wrong)) {
				if i == 5 {
					break
				}
				t.Errorf("%s, %s first: %s: %s", n.name, who, m.cells[index], wrong[index])
			}
			for _, line := range n.mangled(t, w, variant) {
				t.Errorf("%s, %s first: packets had lost their mark: %s", n.name, who, line)
			}
		}
		neighbours := markingNeighbours
		if mode != harness.IPVS { // Without kube-ipvs0, Felix has no rules for IPVS, nor need the kernel know what they ask for.
			neighbours = slices.DeleteFunc(slices.Clone(neighbours), func(n neighbour) bool { return n.name == "Calico beside IPVS" })
		}
		for i, n := range neighbours {
			n.install(t, w, variant)
			if i == 0 {
				w.Run(t, variant, clusterCIDR)
			}
			check(n, n.name)
			n.remove(t, w, variant)
		}
		for _, n := range neighbours {
			n = n.behind()
			n.install(t, w, variant)
			check(n, "nodeproxy")
			n.remove(t, w, variant)
		}
	})
}
