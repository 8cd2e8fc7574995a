package e2e

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

var comments = regexp.MustCompile(`(?m)^#.*\n`)
var policyCounters = regexp.MustCompile(`(?m)^(:\S+ \S+) \[\d+:\d+\]`)

// rules returns the rules of both families on node1, without counters.
func rules(t *testing.T, w *harness.World, variant harness.Variant) string {
	t.Helper()
	return rulesOn(t, w.Node1(), variant)
}

// rulesOn is rules of any node.
func rulesOn(t *testing.T, n *harness.Node, variant harness.Variant) string {
	t.Helper()
	return policyCounters.ReplaceAllString(countedRules(t, n, variant, false), "$1")
}

// countedRules returns the rules of both families on a node, with the counters of each rule if wanted.
func countedRules(t *testing.T, n *harness.Node, variant harness.Variant, counters bool) string {
	t.Helper()
	var all strings.Builder
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		var args []string
		if counters {
			args = append(args, "-c")
		}
		family, save, _ := strings.Cut(tool, "-")
		out, err := n.Output(variant.Tool(family)+"-"+save, args...)
		require.NoError(t, err)
		all.WriteString(tool + "\n" + comments.ReplaceAllString(out, ""))
	}
	return all.String()
}

// manyServices writes Services of several kinds and returns how many.
func manyServices(t *testing.T, w *harness.World) int {
	t.Helper()
	services := []*v1.Service{
		harness.Service("plain", 1), harness.Service("sticky", 2, sticky(time.Hour)),
		harness.Service("local", 3, harness.Policies("Local", "Local")),
		harness.Service("ranges", 4, sourceRanges("203.0.113.0/24", "2001:db8:c::/64")),
		harness.Service("internal", 5, harness.ClusterOnly),
	}
	for _, s := range services {
		w.Write(t, s.Name+".yaml", harness.Objects(s, w.Ready("n1a", "n2a", "n3a")...)...)
	}
	none := harness.Service("none", len(services)+1)
	w.Write(t, "none.yaml", harness.Objects(none)...)
	return len(services)
}

// TestRestartUnderLoad: the rules stay in force while the daemon is down, and its start disturbs nothing, after a
// SIGTERM as after a SIGKILL, though the cluster changed meanwhile.
func TestRestartUnderLoad(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		services := manyServices(t, w)
		d := w.Run(t, variant, clusterCIDR)
		var loads []*harness.Load
		for _, family := range families {
			loads = append(loads,
				w.Client.StartLoad("tcp", clusterIP(1, family), 2, 3*time.Millisecond),
				w.Client.StartLoad("udp", vip(4, family), 2, 3*time.Millisecond),
				w.Pod("n1c").StartLoad("tcp", nodePort(w.Node1().IP(family), 2), 2, 3*time.Millisecond),
				w.Client.StartLoad("tcp", nodePort(w.Node1().IP(family), 3), 2, 3*time.Millisecond))
		}
		for i, end := range []func() error{func() error { return d.Stop() }, func() error { return d.Kill() }} {
			more(t, aWhile, loads...)
			require.NoError(t, end())
			more(t, aWhile, loads...)
			pod := []string{"n2a", "n3a"}[i]
			changed := harness.Service("internal", services, harness.ClusterOnly)
			w.Write(t, "internal.yaml", harness.Objects(changed, w.Ready(pod)...)...)
			d = w.Run(t, variant, clusterCIDR)
			for _, family := range families {
				wantServers(t, w.Client, clusterIP(services, family), pod)
			}
		}
		more(t, aWhile, loads...)
		noFailures(t, loads...)
	})
}

// TestConnectionsSurvive: open TCP connections go on through edits of their own Service, a restart, and the end of the
// endpoint's membership.
func TestConnectionsSurvive(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a", "n2a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		var open []*harness.Conversation
		for _, family := range families {
			for _, client := range []*harness.Host{w.Client, w.Pod("n1c").Host, w.Node1().Host} {
				c, err := client.Converse(nodePort(w.Node1().IP(family), 1))
				require.NoError(t, err)
				defer c.Close()
				open = append(open, c)
			}
		}
		check := func(when string) {
			t.Helper()
			for _, c := range open {
				assert.NoError(t, c.Echo(when), "%s", when)
			}
		}
		check("at first")
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a", "n2a", "n3a")...)...)
		eventually(t, "third endpoint", answers(w.Client, clusterIP(1, 4), "n3a"))
		check("with another endpoint")
		require.NoError(t, d.Stop())
		check("without the daemon")
		w.Run(t, variant, clusterCIDR)
		check("after its restart")
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n3a")...)...)
		for _, family := range families {
			eventually(t, "endpoints gone", func() error { return serversOf(w.Client, "tcp", clusterIP(1, family), "n3a") })
		}
		check("with their endpoints taken out")
	})
}

// TestStartWritesNothing: a start over rules that are already right changes none of them: on the nft variant every rule
// keeps its handle, and on both every rule keeps its counters.
func TestStartWritesNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		services := manyServices(t, w)
		d := w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			for i := 1; i <= services; i++ {
				eventually(t, "Services", answers(w.Client, clusterIP(i, family), "n1a", "n2a", "n3a"))
			}
		}
		for _, how := range []struct {
			name string
			end  func() error
		}{{"SIGTERM", func() error { return d.Stop() }}, {"SIGKILL", func() error { return d.Kill() }}} {
			require.NoError(t, how.end())
			rulesBefore, countersBefore := splitCounters(countedRules(t, w.Node1(), variant, true))
			handles := ruleHandles(t, w, variant)
			d = w.Run(t, variant, clusterCIDR)
			time.Sleep(300 * time.Millisecond) // It is to write nothing, and there is no sign of that.
			rulesAfter, countersAfter := splitCounters(countedRules(t, w.Node1(), variant, true))
			if rulesAfter != rulesBefore {
				t.Fatalf("the start after %s changed rules:\n%s", how.name, firstDifference(rulesBefore, rulesAfter))
			}
			if now := ruleHandles(t, w, variant); now != handles {
				t.Errorf("the start after %s wrote rules again:\n%s", how.name, firstDifference(handles, now))
			}
			counted := 0
			for i, before := range countersBefore {
				// A straggler of an earlier connection may still be counted, so that counters can grow.
				if countersAfter[i] < before {
					t.Errorf("after %s, a rule's counter went from %d to %d", how.name, before, countersAfter[i])
				}
				if before > 0 {
					counted++
				}
			}
			if counted < 20 && mode != harness.NFTables { // whose rules do not count
				t.Errorf("only %d rules had counted anything: this shows too little", counted)
			}
		}
	})
}

var counters = regexp.MustCompile(`(?m)\[(\d+):\d+\]`)

// splitCounters takes the packet counters out of what iptables-save prints.
func splitCounters(text string) (string, []int) {
	var out []int
	for _, m := range counters.FindAllStringSubmatch(text, -1) {
		n, _ := strconv.Atoi(m[1]) // the expression lets only digits through
		out = append(out, n)
	}
	return counters.ReplaceAllString(text, "[]"), out
}

var nftCounters = regexp.MustCompile(`packets \d+ bytes \d+|expires \S+`)

// ruleHandles lists all rules with the numbers that the kernel gave them when they were written; the legacy variant has
// none.
func ruleHandles(t *testing.T, w *harness.World, variant harness.Variant) string {
	t.Helper()
	if variant != harness.NFT {
		return ""
	}
	out, err := w.Node1().Output("nft", "-a", "list", "ruleset")
	require.NoError(t, err)
	if !strings.Contains(out, "# handle ") {
		t.Fatalf("no handles in %q", out)
	}
	return nftCounters.ReplaceAllString(out, "")
}

// firstDifference shows the lines around the first one in which two texts differ.
func firstDifference(before, after string) string {
	b, a := strings.Split(before, "\n"), strings.Split(after, "\n")
	for i := 0; i < max(len(a), len(b)); i++ {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			part := func(lines []string) string {
				return strings.Join(lines[min(i, len(lines)):min(i+8, len(lines))], "\n")
			}
			return fmt.Sprintf("line %d (%d lines before, %d after)\nbefore:\n%s\nafter:\n%s", i+1, len(b), len(a), part(b), part(a))
		}
	}
	return "none"
}

// TestForeignRulesSurvive: rules and chains of others are left alone, and stay where they are, through first
// programming, edits, a restart and the end of all Services.
func TestForeignRulesSurvive(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		for _, table := range []string{"nat", "filter", "mangle"} {
			rule(t, w, variant, "-t "+table+" -N CNI-OTHER")
			rule(t, w, variant, "-t "+table+" -A CNI-OTHER -p tcp --dport 4242 -j RETURN")
			rule(t, w, variant, "-t "+table+" -A OUTPUT -p tcp --dport 4242 -j CNI-OTHER")
			rule(t, w, variant, "-t "+table+" -N KUBE-LIKE") // not every KUBE- chain is a service proxy's
		}
		rule(t, w, variant, "-t nat -A POSTROUTING -p udp --dport 4242 -j MASQUERADE")
		rule(t, w, variant, "-t filter -A FORWARD -p udp --dport 4242 -j DROP")
		rule(t, w, variant, "-t mangle -A PREROUTING -p udp --dport 4242 -j MARK --set-xmark 0x1/0xffffffff")
		foreign := func() []string {
			var out []string
			for _, line := range strings.Split(rules(t, w, variant), "\n") {
				if strings.Contains(line, "4242") || strings.Contains(line, "CNI-OTHER") || strings.Contains(line, "KUBE-LIKE") {
					out = append(out, line)
				}
			}
			return out
		}
		want := strings.Join(foreign(), "\n")
		check := func(when string) {
			t.Helper()
			if got := strings.Join(foreign(), "\n"); got != want {
				t.Errorf("foreign rules %s:\n%s\nwant:\n%s", when, got, want)
			}
		}
		manyServices(t, w)
		d := w.Run(t, variant, clusterCIDR)
		check("after the first programming")
		w.Write(t, "plain.yaml", harness.Objects(harness.Service("plain", 1), w.Ready("n3a")...)...)
		for _, family := range families {
			eventually(t, "edit", func() error { return serversOf(w.Client, "tcp", clusterIP(1, family), "n3a") })
		}
		check("after an edit")
		require.NoError(t, d.Stop())
		w.Run(t, variant, clusterCIDR)
		check("after a restart")
		for _, name := range []string{"plain", "sticky", "local", "ranges", "internal", "none"} {
			w.Remove(t, name+".yaml")
		}
		for _, family := range families {
			eventually(t, "Services gone", ends(w.Client, nodePort(w.Node1().IP(family), 1), harness.Refused))
			eventually(t, "Services gone", ends(w.Client, clusterIP(1, family), freeClusterIP(variant)))
		}
		check("without Services")
	})
}

// TestStaleChainsRemoved: what an earlier run (or kube-proxy) left for Services that are gone is removed at the start,
// and rules that somebody changed while no daemon ran are put right.
func TestStaleChainsRemoved(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "kept.yaml", harness.Objects(harness.Service("kept", 1), w.Ready("n1a", "n2a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		want := rules(t, w, variant)
		var gone []string
		changes := []func(*v1.Service){sticky(time.Hour), harness.Policies("Local", "Local"), sourceRanges("203.0.113.0/24")}
		for i, change := range changes {
			s := harness.Service(fmt.Sprintf("gone-%d", i), 10+i, change)
			w.Write(t, s.Name+".yaml", harness.Objects(s, w.Ready("n1b", "n3a")...)...)
			gone = append(gone, s.Name+".yaml")
		}
		for _, family := range families {
			eventually(t, "Services that will go", answers(w.Client, vip(12, family), "n1b", "n3a"))
			eventually(t, "Services that will go", answers(w.Client, vip(10, family), "n1b", "n3a"))
		}
		require.NoError(t, d.Kill())
		for _, file := range gone {
			w.Remove(t, file)
		}
		// What others leave behind: chains of kube-proxy's names in the way that it makes them.
		for _, chain := range []string{"KUBE-SVC-ABCDEFGHIJKLMNOP", "KUBE-SEP-ABCDEFGHIJKLMNOP", "KUBE-EXT-ABCDEFGHIJKLMNOP"} {
			rule(t, w, variant, "-t nat -N "+chain)
		}
		rule(t, w, variant, "-t nat -A KUBE-SVC-ABCDEFGHIJKLMNOP -j KUBE-SEP-ABCDEFGHIJKLMNOP")
		rule(t, w, variant, "-t nat -A KUBE-SERVICES -p tcp --dport 1 -j KUBE-SVC-ABCDEFGHIJKLMNOP")
		rule(t, w, variant, "-t nat -F KUBE-POSTROUTING")
		w.Run(t, variant, clusterCIDR)
		eventually(t, "rules as before", func() error {
			if now := rules(t, w, variant); now != want {
				return fmt.Errorf("%s", firstDifference(want, now))
			}
			return nil
		})
		for _, family := range families {
			wantSource(t, w.Client, clusterIP(1, family), w.Node1().IP(family))
		}
	})
}
