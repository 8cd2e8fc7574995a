package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// driftFault is what somebody does to the kernel.
type driftFault struct {
	name string
	do   string // {} stands for the variant, CHAIN for the chain of the Service's endpoints
	// kind is that of what is found, by which metrics know it.
	kind  string
	words string // in the log
}

var driftFaults = map[harness.Mode][]driftFault{
	harness.IPTables: {
		{"table nat emptied", "iptables-{} -w -t nat -F", "rule", "of table nat (IPv4): missing"},
		{"table filter emptied", "iptables-{} -w -t filter -F", "rule", "of table filter (IPv4): missing"},
		{"one rule removed", "iptables-{} -w -t nat -D CHAIN 2", "rule", "in CHAIN of table nat (IPv4): missing"},
		{"a foreign rule in a chain", "iptables-{} -w -t nat -I CHAIN -p tcp --dport 80 -j ACCEPT", "rule",
			"in CHAIN of table nat (IPv4): unexpected"},
		{"jumps removed", "iptables-{} -w -t nat -F PREROUTING", "rule", "in PREROUTING of table nat (IPv4): missing"},
	},
	harness.IPVS: {
		{"a virtual server removed", "ipvsadm -D -t 10.96.0.11:80", "virtual_server", "virtual server TCP 10.96.0.11:80: missing"},
		{"all virtual servers removed", "ipvsadm -C", "virtual_server", "virtual server TCP 10.96.0.11:80: missing"},
		{"a set emptied", "ipset flush KUBE-CLUSTER-IP", "set_element", "of set KUBE-CLUSTER-IP: missing"},
		{"the device removed", "ip link del kube-ipvs0", "address", "interface kube-ipvs0 with all addresses: it was removed"},
		{"table filter emptied", "iptables-{} -w -t filter -F", "rule", "of table filter (IPv4): missing"},
	},
	harness.NFTables: {
		{"a table removed", "nft delete table ip nodeproxy", "table", "table ip nodeproxy of nftables: missing"},
		{"the other table removed", "nft delete table ip6 nodeproxy", "table", "table ip6 nodeproxy of nftables: missing"},
		{"a chain emptied", "nft flush chain ip nodeproxy prerouting", "chain", "prerouting of nftables table ip nodeproxy: changed"},
		{"a foreign rule in a chain", "nft insert rule ip nodeproxy to-services accept", "chain",
			"to-services of nftables table ip nodeproxy: changed"},
		{"a Service removed", "nft delete element ip nodeproxy services { 10.96.0.11 . tcp . 80 }", "set_element",
			"10.96.0.11 . tcp . 80 of set services of nftables table ip nodeproxy: missing"},
		{"an endpoint removed", "nft delete element ip nodeproxy endpoints { 10.96.0.11 . tcp . 80 . 1 }", "set_element",
			" of set endpoints of nftables table ip nodeproxy: missing"},
		{"all Services removed", "nft flush map ip nodeproxy services", "set_element",
			"10.96.0.11 . tcp . 80 of set services of nftables table ip nodeproxy: missing"},
		{"a foreign Service", "nft add element ip nodeproxy services { 10.96.9.9 . tcp . 80 : 2000:2 }", "set_element",
			"10.96.9.9 . tcp . 80 of set services of nftables table ip nodeproxy: unexpected"},
		{"a Service for all that is none", "nft add element ip nodeproxy services { * : 2000:2 }", "set_element",
			"* of set services of nftables table ip nodeproxy: unexpected"},
		{"a foreign chain that drops what is forwarded", "nft add chain ip nodeproxy evil { type filter hook forward priority 10; policy drop; }",
			"chain", "chain evil of nftables table ip nodeproxy: unexpected"},
		{"a table put to sleep", "nft add table ip nodeproxy { flags dormant; }", "table", "table ip nodeproxy of nftables: changed"},
	},
}

// externalIPFaults are done to what makes ports of external IPs local in mode ipvs.
var externalIPFaults = []driftFault{
	{"the routing rule of external IPs removed", "ip rule del pref 90", "chain", "nftables table nodeproxy-ipvs-ports or its routing rule (IPv4): changed"},
	{"a route of an external IP removed", "ip route del local 192.0.2.1 table 2496", "route",
		"192.0.2.1 of interface kube-ipvs0 in table 2496: missing"},
	{"the nftables table of external IPs removed", "nft delete table ip nodeproxy-ipvs-ports", "chain",
		"nftables table nodeproxy-ipvs-ports or its routing rule (IPv4): changed"},
	{"a port of an external IP removed", "nft delete element ip6 nodeproxy-ipvs-ports ports { fd00:192::1 . tcp . 80 }", "set_element",
		"fd00:192::1 . tcp . 80 of nftables table nodeproxy-ipvs-ports: missing"},
}

// TestDrift: what another program does to what nodeproxy has written is repaired within seconds, logged with what it was, and
// counted once; the rules of others stay as they are. Each is a row of the table of faults, with requests that are under way. Those
// that begin before the repair may fail, for the kernel goes on with a connection as it began; later ones may not.
func TestDrift(t *testing.T) { repairs(t, driftFaults[mode]) }

// TestIPVSDriftOfExternalIPs is TestDrift for externalIPFaults. Comparisons that follow each other closely are few in number, so
// these have a process of their own.
func TestIPVSDriftOfExternalIPs(t *testing.T) { repairs(t, externalIPFaults) }

func repairs(t *testing.T, faults []driftFault) {
	t.Helper()
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := harness.New(t, harness.Options{OwnFirewall: true})
		w.Write(t, "nodes.yaml", w.NodeObjects()...)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a", "n2a")...)...)
		for _, table := range []string{"nat", "filter"} {
			rule(t, w, variant, "-t "+table+" -N CNI-OTHER")
		}
		d := w.Run(t, variant, clusterCIDR)
		wantServers(t, w.Client, clusterIP(1, 4), "n1a", "n2a")
		want := heldTwice(t, w, variant)
		chain := regexp.MustCompile(`-A (KUBE-SVC-\S+) `).FindStringSubmatch(want)
		for _, f := range faults {
			loads := []*harness.Load{
				w.Client.StartLoad("tcp", clusterIP(1, 4), 1, 10*time.Millisecond),
				w.Client.StartLoad("udp", clusterIP(1, 4), 1, 10*time.Millisecond),
			}
			for _, l := range loads {
				eventually(t, "requests", func() error { return requestsMade(l, 20) })
			}
			if chain != nil {
				f.do, f.words = strings.ReplaceAll(f.do, "CHAIN", chain[1]), strings.ReplaceAll(f.words, "CHAIN", chain[1])
			}
			found, repaired := driftCount(t, w, "found", f.kind), driftCount(t, w, "repaired", f.kind)
			lines := len(d.Log())
			output(t, w, strings.ReplaceAll(f.do, "{}", string(variant)))
			begin := time.Now()
			require.NoError(t, d.WaitForAfter(lines, harness.Limit, hasRepaired, f.words), "%s", f.name)
			took := time.Since(begin)
			eventually(t, f.name+": everything is as it was", func() error { // The other family may follow.
				if now := heldTwice(t, w, variant); now != want {
					return errors.New(firstDifference(want, now))
				}
				return nil
			})
			wantServers(t, w.Client, clusterIP(1, 4), "n1a", "n2a")
			newFound, newRepaired := driftCount(t, w, "found", f.kind)-found, driftCount(t, w, "repaired", f.kind)-repaired
			if newFound < 1 || newRepaired != newFound {
				t.Errorf("%s: counted %d found and %d repaired of kind %s", f.name, newFound, newRepaired, f.kind)
			}
			most := 1
			if mode == harness.IPVS { // It may find out about the families in different ways, one after the other.
				most = 2
			}
			if n := count(d.Log()[lines:], hasRepaired); n > most {
				t.Errorf("%s: it was logged %d times", f.name, n)
			}
			row := faultRow{Fault: "others change what is ours", Injected: f.name, Mode: mode, Variant: variant, OK: !t.Failed(),
				Repair: took.Round(10 * time.Millisecond).String()}
			const after = 2 * time.Second // the repair, requests go on
			time.Sleep(time.Until(begin.Add(took + after)))
			for _, l := range loads {
				l.Stop()
				row.Requests += l.Requests()
				row.Failed += len(l.Failures())
				for _, failed := range l.Failures() {
					if since := failed.Begun.Sub(begin) - took; since > 0 {
						t.Errorf("%s: a request that began %v after the repair: %v", f.name, since, failed)
					}
				}
			}
			addFault(row)
		}
	})
}

// requestsMade is an error as long as a load has made fewer requests.
func requestsMade(l *harness.Load, want int) error {
	if n := l.Requests(); n < want {
		return fmt.Errorf("%d requests, want %d", n, want)
	}
	return nil
}

// heldTwice is what held returns two times in a row: where virtual servers of another network namespace come and go meanwhile,
// the kernel lists some of this one twice, or not at all.
func heldTwice(t *testing.T, w *harness.World, variant harness.Variant) string {
	t.Helper()
	for last := held(t, w, variant); ; {
		now := held(t, w, variant)
		if now == last {
			return now
		}
		last = now
	}
}

func count(lines []string, part string) (n int) {
	for _, l := range lines {
		if strings.Contains(l, part) {
			n++
		}
	}
	return n
}

// driftCount reads one of the counters nodeproxy_drift_*_total.
func driftCount(t *testing.T, w *harness.World, which, kind string) int {
	t.Helper()
	text := scrape(t, w)
	m := regexp.MustCompile(`(?m)^nodeproxy_drift_` + which + `_total\{kind="` + kind + `"\} (\S+)$`).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("no counter of drift %s of kind %s", which, kind)
	}
	n, err := strconv.Atoi(m[1])
	require.NoError(t, err)
	return n
}

// scrape reads the metrics of the daemon on node1.
func scrape(t *testing.T, w *harness.World) string {
	t.Helper()
	text, err := scraped(w)
	require.NoError(t, err)
	return text
}

func scraped(w *harness.World) (string, error) {
	var c net.Conn
	err := w.Node1().Do(func() (err error) {
		c, err = net.DialTimeout("tcp4", "127.0.0.1:10249", harness.Patient)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	fmt.Fprint(c, "GET /metrics HTTP/1.0\r\n\r\n")
	text, err := io.ReadAll(c)
	return string(text), err
}

// TestDriftNoStorm: another program that writes a hundred unrelated rules a second does not keep nodeproxy busy comparing.
func TestDriftNoStorm(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		manyServices(t, w)
		rule(t, w, variant, "-t nat -N CNI-OTHER")
		d := w.Run(t, variant, clusterCIDR)
		time.Sleep(2 * time.Second) // A comparison that the start led to may still come; nothing says that none will.
		lines := len(d.Log())
		const seconds = 4
		for end := time.Now().Add(seconds * time.Second); time.Now().Before(end); {
			next := time.Now().Add(100 * time.Millisecond)
			restore := "*nat\n"
			for i := range 10 {
				restore += fmt.Sprintf("-A CNI-OTHER -s 192.0.2.%d -j RETURN\n", i)
			}
			if _, err := w.Node1().OutputWithInput(restore+"COMMIT\n", variant.Tool("iptables")+"-restore", "--noflush"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Until(next)) // ten transactions a second
		}
		time.Sleep(2 * time.Second) // What it is to leave alone gives no sign of that.
		log := d.Log()[lines:]
		if n := count(log, "had changed what was written"); n > 0 {
			t.Errorf("it took rules of others for its own:\n%s", strings.Join(log, "\n"))
		}
		// The legacy variant can't tell whose rules have changed; it looks each time, but no more often than once a second.
		// In mode ipvs, a look every three seconds may take virtual servers that other tests change in other network
		// namespaces for its own: the kernel's list is unsteady then.
		families, most := 2, 0
		if mode == harness.IPVS {
			most = families * (seconds + 2 + 3) / 3
		}
		if variant == harness.Legacy {
			most += families * (seconds + 3)
		}
		if n := count(log, "compared all rules"); n > most {
			t.Errorf("it compared %d times in %d seconds, want at most %d:\n%s", n, seconds, most, strings.Join(log, "\n"))
		}
	})
}
