package e2e

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// held returns what node1 holds that nodeproxy may have put there: the rules of both families and, on a kernel that has
// them, sets, virtual servers, and addresses and routes of kube-ipvs0; all without what counts or goes by itself.
func held(t *testing.T, w *harness.World, variant harness.Variant) string {
	t.Helper()
	return heldOn(t, w.Node1(), variant)
}

// heldOn is held of any node.
func heldOn(t *testing.T, n *harness.Node, variant harness.Variant) string {
	t.Helper()
	out := rulesOn(t, n, variant)
	if mode == harness.NFTables {
		return nftTablesOn(t, n) + out
	}
	if mode == harness.IPVS {
		out += ipSetsOn(t, n) + virtualServersOn(t, n) + deviceOn(t, n)
	}
	return out
}

func output(t *testing.T, w *harness.World, command string) string {
	t.Helper()
	return outputOn(t, w.Node1(), command)
}

func outputOn(t *testing.T, n *harness.Node, command string) string {
	t.Helper()
	words := strings.Fields(command)
	out, err := n.Output(words[0], words[1:]...)
	require.NoError(t, err)
	return out
}

var setSizes = regexp.MustCompile(` (hashsize|bucketsize|initval) \S+`)

// ipSets returns all sets of node1 with their entries, in the form of ipset save.
func ipSets(t *testing.T, w *harness.World) string {
	t.Helper()
	return ipSetsOn(t, w.Node1())
}

func ipSetsOn(t *testing.T, n *harness.Node) string {
	t.Helper()
	return sortedLines(setSizes.ReplaceAllString(outputOn(t, n, "ipset save"), ""))
}

// virtualServers returns those of node1 with their real servers, in the form of ipvsadm --save.
func virtualServers(t *testing.T, w *harness.World) string {
	t.Helper()
	return virtualServersOn(t, w.Node1())
}

func virtualServersOn(t *testing.T, n *harness.Node) string {
	t.Helper()
	return sortedLines(outputOn(t, n, "ipvsadm --save --numeric"))
}

// device returns addresses and local routes of kube-ipvs0, and what diverts ports of external IPs, or "" if it is not there.
func device(t *testing.T, w *harness.World) string {
	t.Helper()
	return deviceOn(t, w.Node1())
}

func deviceOn(t *testing.T, n *harness.Node) string {
	t.Helper()
	const name = "kube-ipvs0"
	out := ""
	for _, line := range strings.Split(outputOn(t, n, "ip -o addr show"), "\n") {
		if f := strings.Fields(line); len(f) > 3 && f[1] == name && !strings.HasPrefix(f[3], "fe80:") {
			out += f[3] + "\n"
		}
	}
	for _, family := range []string{"-4", "-6"} {
		for _, line := range strings.Split(outputOn(t, n, "ip "+family+" route show table local"), "\n") {
			if strings.Contains(line, " dev "+name+" ") {
				out += line + "\n"
			}
		}
	}
	for _, family := range []string{"-4", "-6"} {
		for _, line := range strings.Split(outputOn(t, n, "ip "+family+" rule"), "\n") {
			if strings.Contains(line, " lookup 2496") {
				out += line + "\n"
			}
		}
		for _, line := range strings.Split(outputOn(t, n, "ip "+family+" route show table all"), "\n") {
			if strings.Contains(line, " table 2496") {
				out += line + "\n"
			}
		}
	}
	ruleset := outputOn(t, n, "nft list ruleset") // One look, as the tables may go between two.
	for _, family := range []string{"ip", "ip6"} {
		if _, table, has := strings.Cut(ruleset, "table "+family+" nodeproxy-ipvs-ports {\n"); has {
			table, _, _ = strings.Cut(table, "\n}\n")
			out += family + diverted(table) + "\n"
		}
	}
	if strings.Contains(outputOn(t, n, "ip -o link"), " "+name+":") {
		out += name + "\n"
	}
	return sortedLines(out)
}

// diverted is a table that diverts ports, with the elements of its set in order.
func diverted(table string) string {
	head, rest, _ := strings.Cut(table, "elements = {")
	elements, tail, _ := strings.Cut(rest, "}")
	list := strings.Split(strings.Join(strings.Fields(elements), " "), ", ")
	slices.Sort(list)
	return head + strings.Join(list, "\n") + tail
}

func sortedLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	slices.Sort(lines)
	return strings.TrimLeft(strings.Join(lines, "\n")+"\n", "\n")
}

// essence returns what rules does, table by table and line by line in order of name, since jumps from built-in chains may
// stand in another order after a switch; and without what may stay when a mode ends: tables without rules or chains of
// anybody's, and KUBE-FIREWALL, which is the kubelet's as well.
func essence(rules string) string {
	var tables []string
	family := ""
	for _, table := range strings.SplitAfter(rules, "COMMIT\n") {
		var lines []string
		used := false
		for _, line := range strings.Split(table, "\n") {
			switch {
			case strings.HasSuffix(line, "tables-save"):
				family = line
			case !strings.Contains(line, "KUBE-FIREWALL"):
				lines = append(lines, line)
				used = used || strings.HasPrefix(line, "-A ") || strings.HasPrefix(line, ":KUBE-")
			}
		}
		if used {
			slices.Sort(lines)
			lines = append([]string{family}, lines...)
			tables = append(tables, strings.Join(lines, "\n"))
		}
	}
	slices.Sort(tables)
	return strings.Join(tables, "")
}
