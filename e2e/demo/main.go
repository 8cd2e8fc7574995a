// Command demo shows nodeproxy at work: on a node with pods and an outside client, all of them network namespaces, over the manifests in
// examples/. The mode and the nodeproxy to run are in the environment, as for the tests with packets. It ends with exit code 1 if anything
// that it shows does not hold.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/inspect"
	"nodeproxy/source"
)

func main() {
	os.Exit(harness.Supervise(func() int {
		start := time.Now()
		d := &demo{}
		for _, step := range []func(){d.setUp, d.start, d.services, d.rules, d.requests, d.edit, d.remove, d.restart} {
			step()
		}
		must(d.world.Close())
		fmt.Printf("\nEverything held, and everything is removed again. %.1f s.\n", time.Since(start).Seconds())
		return 0
	}))
}

type demo struct {
	world  *harness.World
	daemon *harness.Daemon
	socket string
}

func title(text string) { fmt.Printf("\n== %s\n", text) }

// check ends the demo, and removes all that it has made, if something does not hold.
func check(holds bool, format string, args ...any) {
	if !holds {
		fmt.Fprintf(os.Stderr, "demo: "+format+"\n", args...)
		_ = harness.Sweep()
		os.Exit(1)
	}
}

func must(err error) { check(err == nil, "%v", err) }

// until waits for something that is due.
func until(what string, holds func() bool) {
	for begun := time.Now(); !holds(); time.Sleep(5 * time.Millisecond) {
		check(time.Since(begun) < harness.Limit, "not within %v: %s", harness.Limit, what)
	}
}

func (d *demo) setUp() {
	title("A node with pods, two more nodes, and a client outside, in network namespaces")
	w, err := harness.Build(harness.Options{})
	must(err)
	d.world, d.socket = w, filepath.Join(w.Dir, "nodeproxy.sock")
	must(w.ServeTCP(w.Client.Netns, "database", netip.AddrPortFrom(w.Client.IP4, 5432)))
	for _, n := range w.Nodes {
		fmt.Printf("   %-6s %-14s pods", n.Name, n.IP4)
		for _, p := range n.Pods {
			fmt.Printf(" %s=%s", p.Name, p.IP4)
		}
		fmt.Println()
	}
	fmt.Printf("   client %s\n", w.Client.IP4)
	must(os.CopyFS(w.Manifests, os.DirFS("examples"))) // Edits do not change the originals.
}

func (d *demo) startDaemon() {
	var err error
	d.daemon, err = d.world.StartDaemon(d.world.Node1(), "--socket="+d.socket,
		"--cluster-cidr="+harness.ClusterCIDR4.String()+","+harness.ClusterCIDR6.String())
	must(err)
	must(d.daemon.WaitFor(harness.StartupTimeout, harness.InSync))
}

func (d *demo) start() {
	title("nodeproxy run --mode=" + string(harness.ModeUnderTest()) + ", on node1, over examples/")
	start := time.Now()
	d.startDaemon()
	fmt.Printf("   in sync %d ms after its start\n", time.Since(start).Milliseconds())
	var findings []inspect.Finding
	must(json.Unmarshal([]byte(d.nodeproxy("get findings --output=json")), &findings))
	reported := map[string]bool{}
	for _, f := range findings {
		if f.Object == "" { // It is about the machine.
			continue
		}
		fmt.Printf("   %-20s %s\n", f.Object, source.Finding{Field: f.Field, Detail: f.Detail, Effect: f.Effect})
		reported[f.Object] = true
	}
	for _, object := range []string{"Service shop/mail", "Service shop/peers", "Ingress shop/shop"} {
		check(reported[object], "%s is not reported as not proxied", object)
	}
}

// nodeproxy runs a command that asks the daemon, and returns what it prints.
func (d *demo) nodeproxy(command string) string {
	path, err := harness.Binary()
	must(err)
	out, err := d.world.Node1().Output(path, append(strings.Fields(command), "--socket="+d.socket)...)
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 { // With 1 it has answered that something is wrong.
		must(err)
	}
	return out
}

// show prints what a command has printed.
func show(command, out string) {
	check(out != "", "%s prints nothing", command)
	fmt.Println("   # " + command)
	for line := range strings.Lines(out) {
		fmt.Println(strings.TrimRight("   "+line, " \n"))
	}
}

func (d *demo) services() {
	title("What it serves, and what becomes of one Service")
	for _, command := range []string{"get services --all-namespaces", "explain shop/web"} {
		show("nodeproxy "+command, d.nodeproxy(command))
	}
}

// rules shows what the kernel has of shop/web, by the kernel's own tools.
func (d *demo) rules() {
	title("What the kernel has of shop/web")
	for _, command := range map[harness.Mode][]string{
		harness.IPTables: {"iptables-nft-save -t nat | grep shop/web"},
		harness.NFTables: {"nft -s list map ip nodeproxy services | grep -o '[0-9].*shop/web.*'",
			"nft -s list map ip nodeproxy endpoints | grep -o '[0-9].* 10.244.[12].10 . 8080'"},
		harness.IPVS: {"ipset list KUBE-NODE-PORT | grep tcp:30080", "ipvsadm -Ln | grep -B2 10.244.2.10:8080",
			"ip route show table local type local dev kube-ipvs0"},
	}[harness.ModeUnderTest()] {
		out, err := d.world.Node1().Output("sh", "-c", command)
		must(err)
		show(command, out)
	}
}

// request is one that is made again and again.
type request struct {
	from                       *harness.Netns
	network, service, kind, to string
	want                       []string // who may answer; nobody if empty, and the connection is refused
	sticky                     bool     // the Service has session affinity
	kept                       bool     // the server has to see the client's own address
}

// Where shop/web is reached. nodeproxy allots its cluster IP, the same one everywhere.
const (
	webClusterIP = "10.96.25.205:80"
	webNodePort  = "192.168.77.11:30080"
)

func (d *demo) requests() {
	title("Requests")
	node, client, pod := d.world.Node1().Netns, d.world.Client.Netns, func(name string) *harness.Netns { return d.world.Pod(name).Netns }
	web, api := []string{"n1a", "n2a"}, []string{"n1b", "n2b"}
	for _, r := range []request{
		{pod("n1c"), "tcp", "shop/web", "cluster IP", webClusterIP, web, false, false},
		{pod("n1c"), "tcp", "shop/web", "cluster IP", "[fd00:10:96::ba92]:80", web, false, false},
		{node, "tcp", "shop/web", "cluster IP", webClusterIP, web, false, false},
		{client, "tcp", "shop/web", "node port", webNodePort, web, false, false},
		{client, "tcp", "shop/api", "load balancer IP", "198.51.100.20:80", api[:1], false, true},
		{pod("n1c"), "tcp", "shop/api", "load balancer IP", "198.51.100.20:80", api, false, false},
		{client, "tcp", "shop/cache", "external IP", "192.0.2.30:6379", web, true, false},
		{pod("n2a"), "udp", "kube-system/kube-dns", "cluster IP", "10.96.0.10:53", []string{"n1c"}, false, false},
		{pod("n1a"), "tcp", "shop/database", "cluster IP", "10.96.0.40:5432", []string{"database"}, false, false},
		{pod("n1a"), "tcp", "shop/nobody", "cluster IP", "10.96.0.50:80", nil, false, false},
	} {
		d.ask(r)
	}
}

// ask makes so many requests that no endpoint is left out by chance, prints who answered and which addresses the servers saw, and checks that.
func (d *demo) ask(r request) {
	fmt.Printf("   %-6s -> %-21s %-42s ", r.from.Name, r.service, fmt.Sprintf("%s %s/%s", r.kind, r.to, strings.ToUpper(r.network)))
	counts, sources := map[string]int{}, map[netip.Addr]bool{}
	for range 100 {
		a := r.from.Ask(r.network, netip.MustParseAddrPort(r.to), harness.Patient)
		if len(r.want) == 0 {
			check(a.Outcome == harness.Refused, "%s", a)
			fmt.Println("refused")
			return
		}
		check(slices.Contains(r.want, a.Server), "answered by none of its endpoints: %s", a)
		counts[a.Server]++
		sources[a.Source] = true
	}
	for _, name := range r.want {
		fmt.Printf("%s %d  ", name, counts[name])
	}
	for source := range sources {
		fmt.Printf("  seen from %s", source)
	}
	fmt.Println()
	check(!r.kept || len(sources) == 1 && sources[d.world.Client.IP4], "the client's address was not kept")
	if r.sticky {
		check(len(counts) == 1, "one client's requests went to %d endpoints despite affinity", len(counts))
	} else {
		check(len(counts) == len(r.want), "no request went to one of the endpoints")
	}
}

// replace edits a manifest as an editor does, by a new file in the place of the old one, and returns when that was.
func (d *demo) replace(file, old, new string) time.Time {
	path, fresh := filepath.Join(d.world.Manifests, file), filepath.Join(d.world.Dir, "edited")
	content, err := os.ReadFile(path)
	must(err)
	check(strings.Contains(string(content), old), "%s has no %s", file, old)
	must(os.WriteFile(fresh, []byte(strings.Replace(string(content), old, new, 1)), 0o644))
	saved := time.Now()
	must(os.Rename(fresh, path))
	return saved
}

func (d *demo) edit() {
	title("A manifest is edited: pod web-3 becomes ready")
	from, requests := d.world.Pod("n1c").Netns, 0
	saved := d.replace("pod-web-3.yaml", `"False"`, `"True"`)
	until("n3a answers", func() bool {
		requests++
		a := from.Ask("tcp", netip.MustParseAddrPort(webClusterIP), harness.Patient)
		check(a.Outcome == harness.Answered, "a request meanwhile: %s", a)
		return a.Server == "n3a"
	})
	fmt.Printf("   its first answer came %d ms after the file was saved (request %d since)\n", time.Since(saved).Milliseconds(), requests)
	d.ask(request{from, "tcp", "shop/web", "cluster IP", webClusterIP, []string{"n1a", "n2a", "n3a"}, false, false})
}

// more waits until so many further requests have ended that each of three endpoints gets one of them, but for a chance of 10^-34.
func more(l *harness.Load) {
	before := l.Requests()
	until("200 requests have ended", func() bool { return l.Requests() >= before+200 })
}

// load makes requests to shop/web before, while and after something happens; none of them may fail.
func (d *demo) load(happens func(*harness.Load)) *harness.Load {
	l := d.world.Client.StartLoad("tcp", netip.MustParseAddrPort(webNodePort), 4, time.Millisecond)
	more(l)
	happens(l)
	more(l)
	l.Stop()
	check(len(l.Failures()) == 0, "requests failed: %v", l.Failures())
	return l
}

func (d *demo) remove() {
	title("An endpoint goes away under load: pod web-1 is no longer ready")
	var saved time.Time
	l := d.load(func(l *harness.Load) {
		check(l.Answers("n1a") > 0, "web-1 never got traffic, so that nothing is taken from it")
		saved = d.replace("pods.yaml", `"True"`, `"False"`) // web-1 is the first
		until("web-1 gets no new requests", func() bool {
			before := l.Answers("n1a")
			more(l)
			return l.Answers("n1a") == before
		})
	})
	fmt.Printf("   %d requests from outside, 0 failed; the last new one to web-1 began %d ms after the file was saved\n",
		l.Requests(), max(0, l.LastFrom("n1a").Sub(saved).Milliseconds()))
}

func (d *demo) restart() {
	title("nodeproxy is killed and started again under load")
	l := d.load(func(*harness.Load) {
		must(d.daemon.Kill())
		time.Sleep(300 * time.Millisecond)
		d.startDaemon()
	})
	fmt.Printf("   kill -9, 0.3 s without it, a new start: %d requests from outside, 0 failed\n", l.Requests())
}
