package main

import (
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// checkedService is a Service whose endpoint is on the node itself, so that the tests can connect to it.
const checkedService = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, clusterIP: 10.96.0.10, ports: [{port: 80, nodePort: 30080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [192.0.2.1], nodeName: n1}]
---
apiVersion: v1
kind: Node
metadata: {name: n1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
`

// checked is a nodeproxy in a network namespace of the test, which is asked about one Service.
type checked struct {
	*asked
	endpoint net.Listener // ends with the test
}

// startChecked starts a nodeproxy with checkedService on a node with the address 192.0.2.1, and waits until it is programmed.
func startChecked(t *testing.T, env []string, args ...string) checked {
	t.Helper()
	nstest.Enter(t)
	for _, line := range []string{"link set lo up", "addr add 192.0.2.1/32 dev lo", "route add 10.96.0.0/16 dev lo"} {
		nstest.Exec(t, "ip", strings.Fields(line)...)
	}
	c := checked{newAsked(t), listen(t, "192.0.2.1:8080")}
	c.env = env
	c.write(checkedService)
	c.start(args...)
	c.awaitProgrammed()
	return c
}

// listener is one whose address is free once it is closed.
type listener struct{ net.Listener }

func (l listener) Close() error { return nstest.Close(l.Listener) }

func listen(t *testing.T, at string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", at)
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return listener{l}
}

// variable is what differs from run to run in an explanation, and what told has in its place.
var variable = []struct {
	is  *regexp.Regexp
	put string
}{
	{regexp.MustCompile(`/\S*/`), ""},
	{regexp.MustCompile(`rocess \d+ \([^)]*\)`), "rocess PID (PROGRAM)"},
	{regexp.MustCompile(`\d+(ms|s|m) ago`), "AGE ago"},
	{regexp.MustCompile(`\d+ (chains|rules|set elements).* such as .*\.`), "THINGS."},
}

// told returns what is wrong, and what to know, by an explanation, with names in place of what differs from run to run.
func told(text string) string {
	i := strings.Index(text, "\nWhat is wrong:")
	if i < 0 {
		if i = strings.Index(text, "\nWhat to know:"); i < 0 {
			i = max(0, strings.Index(text, "\nNothing is wrong"))
		}
	}
	text = text[i:]
	for _, v := range variable {
		text = v.is.ReplaceAllString(text, v.put)
	}
	return strings.TrimSpace(text)
}

// await waits until explain says what is wanted, and ends with an exit code.
func (c checked) await(want string, wantCode int) {
	c.Helper()
	var text string
	var code int
	defer func() {
		if c.Failed() {
			c.Logf("exit code %d, want %d:\n%s\nwant:\n%s", code, wantCode, text, want)
		}
	}()
	eventually(c.T, "explain says what is wrong", func() bool {
		text, code = c.ask("explain", "web")
		return code == wantCode && told(text) == strings.TrimSpace(want)
	})
}

// awaitPart waits until explain says this among other things, and ends with an exit code.
func (c checked) awaitPart(want string, wantCode int) {
	c.Helper()
	eventually(c.T, "explain says "+want, func() bool {
		text, code := c.ask("explain", "web")
		return code == wantCode && strings.Contains(text, want)
	})
}

// onNode is what explain says of what is wrong on the node itself. TestTroubleshooting documents it.
var onNode = map[string]string{
	"drop": `
What is wrong:
  - A rule of another program drops what is for the cluster IP 10.96.0.10:80/TCP from this node: "ip daddr 10.96.0.10 tcp dport 80 drop" in chain out of table ip other.
    To do: let its owner admit this traffic`,
	"untracked": `
What is wrong:
  - A rule of another program keeps what is for the cluster IP 10.96.0.10:80/TCP from this node from being tracked, so that nothing translates it: "ip daddr 10.96.0.0/16 notrack" in chain out of table ip other.
    To do: let its owner except this traffic`,
	"unrouted": `
What is wrong:
  - This node does not forward packets of IPv4 (net.ipv4.ip_forward is 0): of the connections to endpoints elsewhere, or from elsewhere to Pods, only its own get there.
    To do: set net.ipv4.ip_forward to 1, and see what has cleared it: every node needs it, at every start
  - The kernel sends nothing to 1 of the 2 endpoints in use, and connections that go there fail: 10.244.2.5 (network is unreachable).
    To do: see whether the network plugin runs on this node and on theirs, and whether it has left a route: ip route show table all match 10.244.2.5`,
	"not-mine": `
What is wrong:
  - Nothing answers at node port 30080/TCP of this node: node ports are limited to addresses that this machine does not have (nodePortAddresses): 192.0.2.2.
    To do: correct status.addresses of the Node (--node-ip of the kubelet), or set nodePortAddresses otherwise`,
	"broken": `
What is wrong:
  - web.yaml: broken YAML: did not find expected node content; all objects of the file stay as they were.
    To do: correct it in web.yaml`,
	"refuses": `
What is wrong:
  - Endpoint 192.0.2.1:8080 gets traffic, but refuses it: nothing listens at port 8080/TCP on this node.
    To do: set spec.ports[].targetPort to the port at which the program listens, or have it listen at this one`,
	"loopback": `
What is wrong:
  - Endpoint 192.0.2.1:8080 gets traffic, but refuses it: what listens at port 8080/TCP on this node does so at a loopback address alone.
    To do: have the program listen at all addresses (0.0.0.0 or ::)`,
	"flushed": `
What to know:
  - Another program changed what nodeproxy had programmed, AGE ago, and nodeproxy has written it again: THINGS.
    To do: find the program that does this, if connections failed then`,
	"port": `
What is wrong:
  - Process PID (PROGRAM) listens at 192.0.2.1, port 30080/TCP, which this Service captures as its node port 30080/TCP: what is sent there goes to the Service, and not to the process.
    To do: end that program, or give one of the two another port`,
	"refused": `
What is wrong:
  - The kernel refuses port "" (IPv4) of Service default/web: iptables-nft-restore: exit status 2: iptables-restore: line 2 failed; it is not proxied on this node, and is retried from time to time.
    To do: see what the kernel lacks or has run out of (dmesg); all other Services go on`,
	"away": `
What is wrong:
  - The API server has sent nothing about services for 10m, so what this node knows may be out of date: dial tcp 192.0.2.9:6443: connect: connection refused.
    To do: see whether the API server runs and can be reached from this node; what was known last stays in force until then`,
}

// TestChecks: explain finds what is wrong on the node itself, in the modes that every kernel has.
func TestChecks(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := startChecked(t, nil, "--mode="+mode)
			c.await("Nothing is wrong with it on this node.", 0)
			text, _ := c.ask("explain", "web")
			for _, want := range []string{"rules in the kernel +ok +all \\d+ are as written\n", "connections +ok +none is open\n",
				"listeners on the node +ok ", "traffic +ok +0 connections since the rules were written"} {
				if mode == "iptables" && strings.HasPrefix(want, "traffic") {
					continue // Its counters are off by default.
				}
				if !regexp.MustCompile(want).MatchString(text) {
					t.Errorf("no %q in\n%s", want, text)
				}
			}

			conn, err := net.Dial("tcp", "10.96.0.10:80")
			require.NoError(t, err)
			defer conn.Close()
			if text, _ := c.ask("get", "services", "-o", "wide"); mode == "nftables" && !strings.Contains(text, "  IPv4     1             <none>     <none>\n") {
				t.Errorf("a connection is not counted:\n%s", text)
			}
			text, _ = c.ask("explain", "web")
			has(t, text, "1 tracked: 1 to 192.0.2.1:8080\n")

			c.endpoint.Close()
			c.await(onNode["refuses"], 1)
			local := listen(t, "127.0.0.1:8080")
			c.await(onNode["loopback"], 1)
			local.Close()
			listen(t, "0.0.0.0:8080")
			c.await("Nothing is wrong with it on this node.", 0)

			taken := listen(t, "192.0.2.1:30080")
			c.await(onNode["port"], 1)
			c.says(1, "get findings", "listens at 192.0.2.1, port 30080/TCP")
			taken.Close()
			c.await("Nothing is wrong with it on this node.", 0)

			nstest.Exec(t, "nft", "add table ip other; add chain ip other out { type filter hook output priority -300; }; "+
				"add rule ip other out ip daddr 10.96.0.10 tcp dport 80 drop")
			c.await(onNode["drop"], 1)
			nstest.Exec(t, "nft", "flush chain ip other out; add rule ip other out ip daddr 10.96.0.0/16 notrack")
			c.await(onNode["untracked"], 1)
			nstest.Exec(t, "nft", "delete", "table", "ip", "other")

			nstest.Exec(t, "nft", "flush", "table", "ip", map[string]string{"iptables": "nat", "nftables": "nodeproxy"}[mode])
			c.await(onNode["flushed"], 0)
		})
	}
}

// TestCheckRoutes: explain finds what keeps packets from endpoints on other nodes.
func TestCheckRoutes(t *testing.T) {
	t.Parallel()
	c := startChecked(t, nil, "--mode=nftables")
	// By a pair of interfaces, they would be taken for Pods of this node, which other tests may have.
	nstest.Exec(t, "ip", "route", "add", "10.244.1.0/24", "dev", "lo")
	forward := func(value string) {
		t.Helper()
		require.NoError(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte(value), 0))
	}
	forward("0")
	elsewhere := strings.Replace(checkedService, "endpoints: [{addresses: [192.0.2.1], nodeName: n1}]",
		"endpoints: [{addresses: [10.244.1.5], nodeName: n2}, {addresses: [10.244.2.5], nodeName: n3}]", 1)
	c.write(elsewhere)
	c.await(onNode["unrouted"], 1)
	forward("1")
	nstest.Exec(t, "ip", "route", "add", "10.244.2.0/24", "dev", "lo")
	c.await("Nothing is wrong with it on this node.", 0)
	c.says(0, "explain web", "there is one to each of the 2 endpoints in use\n")
}

// TestNodeElsewhere: the Node has an address that the machine does not have, and node ports are limited to it. A file that is broken stays in
// force, and explain says so.
func TestNodeElsewhere(t *testing.T) {
	t.Parallel()
	c := startChecked(t, nil, "--mode=nftables")
	elsewhere := strings.Replace(checkedService, "{type: InternalIP, address: 192.0.2.1}", "{type: InternalIP, address: 192.0.2.2}", 1)
	c.write(elsewhere)
	c.await(onNode["not-mine"], 1)
	c.says(1, "status", "There is a problem with objects or with the node")
	c.says(1, "get findings", "192.0.2.2 is no address of this machine; no node port answers there")
	c.write(strings.ReplaceAll(elsewhere, "addresses: [192.0.2.1]", "addresses: [192.0.2.2]"))
	c.awaitPart("Endpoint 192.0.2.2:8080 is this node itself, but the machine does not have the address that its Node names", 1)
	c.write(checkedService)
	c.await("Nothing is wrong with it on this node.", 0)

	c.write(checkedService + "---\nkind: [\n")
	c.await(onNode["broken"], 1)
	c.write(checkedService)
	c.await("Nothing is wrong with it on this node.", 0)
}

// TestCheckRefused: explain of a Service that the kernel refuses has the kernel's words, and so has get findings.
func TestCheckRefused(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can change rules")
	}
	dir := t.TempDir()
	const refuses = "input=$(cat)\ncase \"$input\" in *10.96.0.66*) echo 'iptables-restore: line 2 failed' >&2; exit 2;; esac\n" +
		"echo \"$input\" | /usr/sbin/iptables-nft-restore \"$@\"\n"
	nstest.Script(t, filepath.Join(dir, "iptables-nft-restore"), refuses)
	c := startChecked(t, []string{"PATH=" + dir + ":" + os.Getenv("PATH")}, "--mode=iptables")
	c.write(strings.ReplaceAll(checkedService, "10.96.0.10", "10.96.0.66"))
	c.await(onNode["refused"], 1)
	c.says(1, "get findings", "the kernel refuses port")
}

// TestFindingsOfProcess: get findings and status have what is wrong with the process itself: an address at which another program listens, and a
// configuration file that is not in force.
func TestFindingsOfProcess(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	nstest.Exec(t, "ip", "link", "set", "lo", "up")
	other := listen(t, "127.0.0.1:10249")
	a := newAsked(t)
	a.write(inspectedService)
	const kind = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	config := filepath.Join(a.dir, "config.yaml")
	writeFile(t, config, kind)
	a.start("--config=" + config)
	a.awaitProgrammed()
	says := func(command, want string) func() bool {
		return func() bool {
			text, code := a.ask(strings.Fields(command)...)
			return code == 1 && strings.Contains(text, want)
		}
	}
	const refused = "listen tcp 127.0.0.1:10249: bind: address already in use; requests to it are not answered, and it is retried"
	eventually(t, "the server's address is a finding", says("get findings", refused))
	writeFile(t, config, kind+"mode: whatever\n")
	eventually(t, "the configuration is a finding", says("get findings", "the former configuration stays in force"))
	if text, _ := a.ask("status"); strings.Count(text, "former configuration stays in force") != 1 || !strings.Contains(text, "There is a problem with objects or with the node") {
		t.Errorf("status says\n%s", text)
	}
	writeFile(t, config, kind)
	other.Close()
	eventually(t, "nothing is wrong", func() bool {
		text, code := a.ask("get", "findings")
		return code == 0 && !strings.Contains(text, "10249") && !strings.Contains(text, "former configuration")
	})
}
