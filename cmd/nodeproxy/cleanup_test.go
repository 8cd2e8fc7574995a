package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
)

// command runs a program and returns what it prints.
func command(t *testing.T, stdin, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

var (
	countersOrComments = regexp.MustCompile(`(?m) *\[\d+:\d+\]|^#.*\n`)
	variantsUnderTest  = []string{"nft", "legacy"}
)

// saved are all rules of this thread's network namespace.
func saved(t *testing.T) string {
	t.Helper()
	out := command(t, "", "nft", "-s", "list", "ruleset")
	for _, family := range []string{"iptables", "ip6tables"} {
		out += countersOrComments.ReplaceAllString(command(t, "", family+"-legacy-save"), "")
	}
	return out
}

// difference shows where two texts part.
func difference(was, is string) string {
	a, b := strings.Split(was, "\n"), strings.Split(is, "\n")
	i := 0
	for i < min(len(a), len(b)) && a[i] == b[i] {
		i++
	}
	few := func(lines []string) string { return strings.Join(lines[max(0, i-5):min(len(lines), i+10)], "\n") }
	return "was\n" + few(a) + "\nis\n" + few(b)
}

// othersRules are the kubelet's and a network plugin's, in tables with all of their built-in chains.
const othersRules = `*mangle
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-HOSTPORT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT
-A CNI-HOSTPORT -p tcp -m tcp --dport 8080 -j ACCEPT
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-ROUTER-INPUT - [0:0]
-A INPUT -j KUBE-FIREWALL
-A INPUT -j KUBE-ROUTER-INPUT
-A OUTPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment "KUBE-SERVICES" -j ACCEPT
-A KUBE-ROUTER-INPUT -m comment --comment "not kube-proxy's" -j RETURN
COMMIT
`

const othersTable = "table inet firewall {\n\tchain KUBE-SERVICES {\n\t}\n}\n"

// populate makes rules of others, and returns all that there is then; after that it adds those of a kube-proxy, in both
// variants, and the tables of its mode nftables.
func populate(t *testing.T) (others string) {
	t.Helper()
	kubeProxys := map[string]string{}
	for family, file := range map[string]string{"iptables": "ipv4", "ip6tables": "ipv6"} {
		text := readFile(t, filepath.Join("..", "..", "e2e", "testdata", "kube-proxy-1.36.3."+file+".rules"))
		for line := range strings.Lines(text) {
			if !strings.Contains(line, "KUBE-FIREWALL") { // The kubelet has it already.
				kubeProxys[family] += line
			}
		}
	}
	for _, variant := range variantsUnderTest {
		for family := range kubeProxys {
			command(t, othersRules, family+"-"+variant+"-restore", "--noflush")
		}
	}
	command(t, othersTable, "nft", "-f", "-")
	others = saved(t)
	for _, variant := range variantsUnderTest {
		for family, rules := range kubeProxys {
			command(t, rules, family+"-"+variant+"-restore", "--noflush")
		}
	}
	for _, family := range []string{"ip", "ip6"} {
		command(t, fmt.Sprintf("table %s kube-proxy { chain services { }; }", family), "nft", "-f", "-")
		command(t, "", "nft", "add", "table", family, names.Trace)
	}
	return others
}

// TestCleanup: everything of kube-proxy's goes, in both variants of iptables and of nftables, and nothing else. What is going to
// be done is told before.
func TestCleanup(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	others := populate(t)
	before := saved(t)
	listed := command(t, "", "nodeproxy", "cleanup", "--dry-run")
	if saved(t) != before {
		t.Error("--dry-run changes something")
	}
	has(t, listed,
		"rule in PREROUTING of table nat that leads to KUBE-SERVICES, iptables 1.8", "chain KUBE-SERVICES of table nat, ip6tables 1.8",
		"(nft)\n", "(legacy)\n", "nftables table ip kube-proxy\n", "nftables table ip6 kube-proxy\n",
		"nftables table ip nodeproxy-trace\n", "nftables table ip6 nodeproxy-trace\n",
	)
	lacks(t, listed, "KUBE-FIREWALL", "KUBELET", "HINT", "CNI-", "ROUTER", "inet")
	if removed := command(t, "", "nodeproxy", "cleanup"); removed != listed {
		t.Errorf("removed\n%s\nlisted\n%s", removed, listed)
	}
	if left := saved(t); left != others {
		t.Error("what others have is not as it was:\n" + difference(others, left))
	}
	// kube-proxy's way to say it; nothing is left, so it has nothing to say.
	if out := command(t, "", "nodeproxy", "--cleanup"); out != "" {
		t.Errorf("the second time removes\n%s", out)
	}
}

// TestCleanupNFTablesOnly: the tables of mode nftables go, and what a kube-proxy may be using stays.
func TestCleanupNFTablesOnly(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	populate(t)
	kubeProxys := saved(t)
	for _, family := range []string{"ip", "ip6"} {
		command(t, fmt.Sprintf("table %s nodeproxy { chain prerouting { }; }", family), "nft", "-f", "-")
	}
	both := saved(t)
	const want = "nftables table ip nodeproxy\nnftables table ip6 nodeproxy\n"
	if listed := command(t, "", "nodeproxy", "cleanup", "--nftables-only", "--dry-run"); listed != want || saved(t) != both {
		t.Errorf("a dry run lists, or changes something:\n%s", listed)
	}
	if removed := command(t, "", "nodeproxy", "cleanup", "--nftables-only"); removed != want {
		t.Errorf("removed\n%s", removed)
	}
	if left := saved(t); left != kubeProxys {
		t.Error("what kube-proxy has is not as it was:\n" + difference(kubeProxys, left))
	}
}

// TestCleanupOneVariant: what --iptables-backend does not name stays.
func TestCleanupOneVariant(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	others := populate(t)
	for i, variant := range variantsUnderTest {
		removed := command(t, "", "nodeproxy", "cleanup", "--iptables-backend="+variant)
		if other := "(" + variantsUnderTest[1-i] + ")"; strings.Contains(removed, other) || !strings.Contains(removed, "("+variant+")") {
			t.Errorf("--iptables-backend=%s removes\n%s", variant, removed)
		}
	}
	if left := saved(t); left != others {
		t.Error("what others have is not as it was:\n" + difference(others, left))
	}
	command(t, "", "nodeproxy", "cleanup", "--iptables-backend=both")
}

// TestCleanupFails: what can't be removed is named, everything else goes, and the exit code tells.
func TestCleanupFails(t *testing.T) {
	t.Parallel()
	for _, variant := range variantsUnderTest {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			populate(t)
			command(t, "", "iptables-"+variant, "-t", "nat", "-A", "CNI-HOSTPORT", "-j", "KUBE-MARK-MASQ")
			out, err := exec.Command("nodeproxy", "cleanup").CombinedOutput()
			if err == nil {
				t.Errorf("the exit code is 0:\n%s", out)
			}
			const still = "still there: "
			if !strings.Contains(string(out), still+"chain KUBE-MARK-MASQ of table nat, iptables 1.8") {
				t.Errorf("it is not said what stays:\n%s", out)
			}
			for line := range strings.Lines(string(out)) {
				if strings.HasPrefix(line, still) && !(strings.Contains(line, "table nat, iptables ") && strings.Contains(line, variant)) {
					t.Errorf("stays too: %s", line)
				}
			}
		})
	}
}

// TestCleanupBesideProxy: a proxy that runs is warned of, since it makes everything anew.
func TestCleanupBesideProxy(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	proxy, err := net.Listen("unix", "@nodeproxy") // what a running nodeproxy has
	require.NoError(t, err)
	warning := fmt.Sprintf("warning: nodeproxy (process %d) runs, and will write anew what is removed now\n", os.Getpid())
	for _, args := range [][]string{{"cleanup"}, {"--cleanup"}, {"cleanup", "--dry-run"}} {
		want := warning
		if len(args) > 1 {
			want = strings.Replace(want, "removed now", "removed without --dry-run", 1)
		}
		if out := command(t, "", "nodeproxy", args...); out != want {
			t.Errorf("%v prints %q, want %q", args, out, want)
		}
	}
	require.NoError(t, proxy.Close())
	if out := command(t, "", "nodeproxy", "cleanup"); out != "" {
		t.Errorf("without a proxy it prints %q", out)
	}
}

// TestCleanupUnprivileged: without the rights, cleanup says in a sentence what it lacks, and nothing else.
func TestCleanupUnprivileged(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, args := range [][]string{{"cleanup"}, {"cleanup", "--dry-run"}, {"--cleanup"}} {
		cmd := exec.Command("setpriv", append([]string{"--bounding-set=-net_admin", "--inh-caps=-net_admin", "nodeproxy"}, args...)...)
		out, err := cmd.CombinedOutput()
		const want = "nodeproxy: cleanup needs the capability CAP_NET_ADMIN to see and to remove rules, and this process lacks it: " +
			"run it as root; nothing has been removed\n"
		if cmd.ProcessState.ExitCode() != 1 || string(out) != want {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
}
