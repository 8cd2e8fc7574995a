package e2e

import (
	"cmp"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// TestSourceRangesWithLocalVIP: where a load balancer puts its IP on the node itself, the node's own requests have that IP
// as their source too. They may pass if the node's address is in the ranges, and not otherwise.
func TestSourceRangesWithLocalVIP(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		const with, without = 1, 2
		for number, s := range map[int]*v1.Service{
			with:    harness.Service("with-node", with, sourceRanges("192.168.77.0/24", "fd00:77::/64")),
			without: harness.Service("without-node", without, sourceRanges("203.0.113.0/24", "2001:db8:c::/64")),
		} {
			w.Write(t, s.Name+".yaml", harness.Objects(s, w.Ready("n1a", "n2a")...)...)
			lo, err := w.Node1().Netlink().LinkByName("lo")
			require.NoError(t, err)
			for _, family := range families {
				addr := vip(number, family).Addr()
				parsed, err := netlink.ParseAddr(netip.PrefixFrom(addr, addr.BitLen()).String())
				if err == nil {
					err = w.Node1().Netlink().AddrAdd(lo, parsed)
				}
				require.NoError(t, err)
			}
		}
		w.Run(t, variant, clusterCIDR)
		for _, family := range families {
			wantServers(t, w.Node1().Host, vip(with, family), "n1a", "n2a")
			wantOutcome(t, w.Node1().Host, vip(without, family), harness.TimedOut)
			wantServers(t, w.Client, vip(without, family), "n1a", "n2a")
		}
	})
}

// TestSingleStack: on a node without IPv6, IPv4 works and nothing is asked of ip6tables.
func TestSingleStack(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{})
		require.NoError(t, w.Node1().Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		w.Run(t, variant, clusterCIDR)
		for _, to := range []netip.AddrPort{clusterIP(1, 4), nodePort(w.Node1().IP4, 1), vip(1, 4), externalIP(1, 4)} {
			wantServers(t, w.Client, to, "n1a", "n2a")
		}
		out, err := w.Node1().Output(variant.Tool("ip6tables") + "-save")
		require.NoError(t, err)
		if strings.Contains(out, "KUBE-") {
			t.Errorf("IPv6 rules on a node without IPv6:\n%s", out)
		}
	})
}

// TestBackendAuto: without a variant given, the one that already holds rules is used.
func TestBackendAuto(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		// What a kubelet makes is the sign to go by, as in the iptables-wrappers of the Kubernetes images.
		rule(t, w, variant, "-t mangle -N KUBE-IPTABLES-HINT")
		w.Run(t, "auto", clusterCIDR)
		for _, family := range families {
			wantServers(t, w.Client, nodePort(w.Node1().IP(family), 1), "n1a", "n2a")
		}
		for _, v := range harness.Variants {
			if got := strings.Contains(rules(t, w, v), byMode("-A KUBE-SVC-", "-A KUBE-IPVS-FILTER")); got != (v == variant) {
				t.Errorf("rules in variant %s: %v", v, got)
			}
		}
	})
}

// TestRenderIsWhatRunApplies: what `render` prints, restored in an empty namespace, gives the same rules as `run`.
func TestRenderIsWhatRunApplies(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		// run leaves a rule out where conntrack is liberal, and render knows nothing of the node.
		require.NoError(t, w.Node1().Sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "0"))
		w.Run(t, variant, clusterCIDR)
		path, err := harness.Binary()
		require.NoError(t, err)
		node2 := w.Nodes[1]
		var applied, rendered strings.Builder
		for _, f := range []struct{ family, tool string }{{"ipv4", "iptables"}, {"ipv6", "ip6tables"}} {
			render := exec.Command(path, "render", "--mode=iptables", "--manifests="+w.Manifests, "--node-name=node1", clusterCIDR,
				"--service-cidr="+harness.ServiceCIDR4.String()+","+harness.ServiceCIDR6.String(), "--family="+f.family)
			text, err := render.Output()
			require.NoError(t, err, "render")
			if _, err := node2.OutputWithInput(string(text), variant.Tool(f.tool)+"-restore", "-w", "--noflush"); err != nil {
				t.Fatal(err)
			}
			for node, into := range map[*harness.Node]*strings.Builder{w.Node1(): &applied, node2: &rendered} {
				for _, table := range []string{"nat", "filter"} {
					out, err := node.Output(variant.Tool(f.tool)+"-save", "-t", table)
					require.NoError(t, err)
					into.WriteString(policyCounters.ReplaceAllString(comments.ReplaceAllString(out, ""), "$1"))
				}
			}
		}
		if strip(applied.String()) != strip(rendered.String()) {
			t.Errorf("rules differ, run before render:\n%s", firstDifference(strip(applied.String()), strip(rendered.String())))
		}
	})
}

// strip leaves out what render can't know of: jump rules have no chain of their own to be restored into. It sorts the chains of each table,
// which iptables-save 1.8.4 prints in no order; rules stay in that of their chain.
func strip(text string) string {
	var out []string
	table := 0
	for _, line := range strings.Split(text, "\n") {
		switch {
		case strings.HasPrefix(line, "*"):
			table = len(out) + 1
		case strings.HasPrefix(line, "COMMIT"):
			slices.SortStableFunc(out[table:], func(a, b string) int { return cmp.Compare(chainOf(a), chainOf(b)) })
		}
		if !strings.HasPrefix(line, "-A ") || strings.HasPrefix(line, "-A KUBE-") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

// chainOf is what iptables-save prints of a line as far as the name of its chain, which a declaration and rules begin with differently.
func chainOf(line string) string {
	fields := strings.Fields(line)
	if len(fields) > 1 && fields[0] == "-A" {
		return "-A " + fields[1]
	}
	return ":" + line
}

// badInput is one manifest of each sort that must not be accepted, by a name for it.
func badInput() map[string]string {
	service := func(name, spec string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: e2e}\nspec: %s\n", name, spec)
	}
	slice := func(address string) string {
		return fmt.Sprintf(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: bad-slice, namespace: e2e, labels: {kubernetes.io/service-name: good}}
addressType: IPv4
ports: [{name: a, port: 8080}]
endpoints: [{addresses: ["%s"]}]
`, address)
	}
	return map[string]string{
		"broken-yaml":     "apiVersion: v1\nkind: [Service\n",
		"tab":             "apiVersion: v1\nkind:\tService\n\tmetadata: {}\n",
		"binary":          "\x00\x01\xff\xfe",
		"bad-ip":          service("bad-ip", `{clusterIP: 10.96.0.999, ports: [{port: 80}]}`),
		"port-zero":       service("port-zero", `{ports: [{port: 0}]}`),
		"port-too-big":    service("port-too-big", `{ports: [{port: 70000}]}`),
		"duplicate-ports": service("duplicate-ports", `{ports: [{name: a, port: 80}, {name: b, port: 80}]}`),
		"same-names":      service("same-names", `{ports: [{name: a, port: 80}, {name: a, port: 81}]}`),
		"long-name":       service(strings.Repeat("x", 300), `{ports: [{port: 80}]}`),
		"injection":       service("injection", `{ports: [{name: "a\"\n-A PREROUTING -j DROP\n-A INPUT -j DROP #", port: 80}]}`),
		"injection-name":  service(`"x\"\n-A INPUT -j DROP"`, `{ports: [{port: 80}]}`),
		"protocol":        service("protocol", `{ports: [{port: 80, protocol: ICMP}]}`),
		"loopback":        slice("127.0.0.1"),
		"link-local":      slice("169.254.169.254"),
		"multicast":       slice("224.0.0.1"),
		"no-address":      slice("not-an-address"),
	}
}

// TestBadInputLeavesTheRestAlone: bad objects of every sort are named, each with its file, and change nothing for good
// ones: not while the daemon starts, and not when they come while it runs.
func TestBadInputLeavesTheRestAlone(t *testing.T) {
	bad := badInput()
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "good.yaml", harness.Objects(harness.Service("good", 1), w.Ready("n1a", "n2a")...)...)
		d := w.Run(t, variant, clusterCIDR)
		want := rules(t, w, variant)
		load := w.Client.StartLoad("tcp", clusterIP(1, 4), 2, 3*time.Millisecond)
		for name, text := range bad {
			logged := len(d.Log())
			w.WriteText(t, "bad-"+name+".yaml", text)
			assert.NoError(t, d.WaitForAfter(logged, harness.Limit, "level=WARN", "bad-"+name+".yaml"), "%s is not named", name)
		}
		more(t, aWhile, load)
		noFailures(t, load)
		check := func(when string) {
			t.Helper()
			if now := rules(t, w, variant); now != want {
				// Some of these leave a Service with what was good in it; that must not touch what was there.
				for _, line := range strings.Split(want, "\n") {
					if !strings.Contains(now, line) {
						t.Errorf("%s, this rule is gone: %s", when, line)
					}
				}
				for _, line := range strings.Split(now, "\n") {
					if strings.Contains(line, "PREROUTING -j DROP") || strings.HasPrefix(line, "-A INPUT -j DROP") {
						t.Errorf("%s, injected rule: %s", when, line)
					}
				}
			}
			for _, family := range families {
				wantServers(t, w.Client, clusterIP(1, family), "n1a", "n2a")
			}
		}
		check("with bad input")
		require.NoError(t, d.Stop())
		d = w.Run(t, variant, clusterCIDR)
		check("after a restart over bad input")
		for name := range bad {
			if err := d.WaitFor(harness.Limit, "level=WARN", filepath.Join(w.Manifests, "bad-"+name+".yaml")); err != nil {
				t.Errorf("%s is not named at the start: %v", name, err)
			}
		}
		for name := range bad {
			w.Remove(t, "bad-"+name+".yaml")
		}
		eventually(t, "rules as before", func() error {
			if now := rules(t, w, variant); now != want {
				return fmt.Errorf("%s", firstDifference(want, now))
			}
			return nil
		})
	})
}
