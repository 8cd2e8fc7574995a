// Command demo shows nodeproxy at work: on a node with pods and an outside client, all of them network namespaces, over
// the manifests in examples/. It ends with exit code 1 if anything that it shows does not hold.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/inspect"
	"nodeproxy/plan"
)

func main() {
	mode := flag.String("mode", "iptables", "the mode to show")
	binary := flag.String("binary", "", "the nodeproxy to run; by default one is built")
	examples := flag.String("examples", "examples", "the manifests to serve")
	flag.Parse()
	switch harness.Mode(*mode) {
	case harness.IPTables, harness.NFTables:
	case harness.IPVS:
		if err := kernelHasIPVS(); err != nil {
			fmt.Fprintf(os.Stderr, "demo: mode ipvs: %v; e2e/kernel/run has a kernel that does\n", err)
			os.Exit(2)
		}
	default:
		fmt.Fprintf(os.Stderr, "demo: mode %q is not known; iptables, ipvs and nftables are\n", *mode)
		os.Exit(2)
	}
	os.Setenv(harness.ModeVariable, *mode)
	if *binary != "" {
		os.Setenv("NODEPROXY_BIN", *binary)
	}
	os.Exit(harness.Supervise(func() int {
		start := time.Now()
		d := &demo{mode: harness.Mode(*mode), examples: *examples}
		err := d.run()
		if d.world != nil {
			err = errors.Join(err, d.world.Close())
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "demo: %v\n", err)
			return 1
		}
		fmt.Printf("\nEverything held, and everything is removed again. %.1f s.\n", time.Since(start).Seconds())
		return 0
	}))
}

// kernelHasIPVS fails on a kernel without IPVS.
func kernelHasIPVS() error {
	if _, err := os.Stat("/proc/net/ip_vs"); err == nil {
		return nil
	}
	if err := exec.Command("modprobe", "ip_vs").Run(); err != nil {
		return errors.New("this kernel has no IPVS")
	}
	return nil
}

type demo struct {
	mode     harness.Mode
	examples string
	world    *harness.World
	daemon   *harness.Daemon
	served   []inspect.ServicePort
	db       string // the name of the server outside the cluster
}

type step struct {
	title string
	do    func() error
}

func (d *demo) run() error {
	for _, step := range []step{
		{"A node with pods, two more nodes, and a client outside, in network namespaces", d.setUp},
		{"nodeproxy run --mode=" + string(d.mode) + ", on node1, over examples/", d.start},
		{"What it serves, and what becomes of one Service", d.services},
		{"What the kernel has of shop/web", d.rules},
		{"Requests", d.requests},
		{"A manifest is edited: pod web-3 becomes ready", d.edit},
		{"An endpoint goes away under load: pod web-1 is no longer ready", d.remove},
		{"nodeproxy is killed and started again under load", d.restart},
	} {
		fmt.Printf("\n== %s\n", step.title)
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	return nil
}

func (d *demo) setUp() error {
	w, err := harness.Build(harness.Options{})
	if err != nil {
		return err
	}
	d.world, d.db = w, "database"
	if err := w.ServeTCP(w.Client.Netns, d.db, netip.AddrPortFrom(w.Client.IP4, 5432)); err != nil {
		return err
	}
	for _, n := range w.Nodes {
		fmt.Printf("   %-6s %-14s pods", n.Name, n.IP4)
		for _, p := range n.Pods {
			fmt.Printf(" %s=%s", p.Name, p.IP4)
		}
		fmt.Println()
	}
	fmt.Printf("   client %s\n", w.Client.IP4)
	// Edits do not change the originals.
	if err := os.CopyFS(w.Manifests, os.DirFS(d.examples)); err != nil {
		return fmt.Errorf("%w: run this in the project's top folder", err)
	}
	return nil
}

func (d *demo) socket() string { return filepath.Join(d.world.Dir, "nodeproxy.sock") }

func (d *demo) startDaemon() (err error) {
	d.daemon, err = d.world.StartDaemon(d.world.Node1(), "--cluster-cidr="+harness.ClusterCIDR4.String()+","+harness.ClusterCIDR6.String(),
		"--socket="+d.socket())
	if err != nil {
		return err
	}
	return d.daemon.WaitFor(harness.StartupTimeout, harness.InSync)
}

func (d *demo) start() error {
	start := time.Now()
	if err := d.startDaemon(); err != nil {
		return err
	}
	fmt.Printf("   in sync %d ms after its start\n", time.Since(start).Milliseconds())
	reported := map[string]bool{}
	for _, line := range d.daemon.Log() {
		if object, detail, ok := finding(line); ok {
			fmt.Printf("   %-20s %s\n", object, detail)
			reported[object] = true
		}
	}
	for _, object := range []string{"Service shop/mail", "Service shop/peers", "Ingress shop/shop"} {
		if !reported[object] {
			return fmt.Errorf("%s was not reported as not proxied", object)
		}
	}
	return nil
}

// finding takes what the daemon says of an object out of a log line.
func finding(line string) (object, detail string, ok bool) {
	quoted := func(name string) string {
		_, rest, found := strings.Cut(line, name+`="`)
		value, _, _ := strings.Cut(rest, `"`)
		ok = ok && found
		return value
	}
	ok = true
	object = quoted("object")
	_, detail, _ = strings.Cut(quoted("msg"), object+": ") // The message begins with the place in a file of a temporary directory.
	return object, detail, ok && detail != ""
}

// nodeproxy runs a command that asks the daemon, and returns what it prints.
func (d *demo) nodeproxy(args ...string) (string, error) {
	path, err := harness.Binary()
	if err != nil {
		return "", err
	}
	return d.world.Node1().Output(path, append(args, "--socket="+d.socket())...)
}

func (d *demo) services() error {
	for _, args := range [][]string{{"get", "services", "--all-namespaces"}, {"explain", "shop/web"}} {
		out, err := d.nodeproxy(args...)
		if err != nil {
			return err
		}
		show("nodeproxy "+strings.Join(args, " "), out)
	}
	list, err := d.nodeproxy("get", "services", "--all-namespaces", "--output=json")
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(list), &d.served)
}

// show prints what a command has printed.
func show(command, out string) {
	fmt.Printf("   # %s\n", command)
	for line := range strings.Lines(out) {
		fmt.Println(strings.TrimRight("   "+line, " \n"))
	}
}

// rules shows what the kernel has of shop/web, by the kernel's own tools.
func (d *demo) rules() error {
	for _, command := range map[harness.Mode][]string{
		harness.IPTables: {"iptables-nft-save -t nat | grep shop/web"},
		harness.NFTables: {"nft -s list map ip nodeproxy services | grep -o '[0-9].*shop/web.*'",
			"nft -s list map ip nodeproxy endpoints | grep -o '[0-9].* 10.244.[12].10 . 8080'"},
		harness.IPVS: {"ipset list KUBE-NODE-PORT | grep tcp:30080", "ipvsadm -Ln | grep -B2 10.244.2.10:8080",
			"ip route show table local type local dev kube-ipvs0"},
	}[d.mode] {
		out, err := d.world.Node1().Output("sh", "-c", command)
		if err == nil && out == "" {
			err = fmt.Errorf("%s prints nothing", command)
		}
		if err != nil {
			return err
		}
		show(command, out)
	}
	return nil
}

// frontend finds where a Service is reached.
func (d *demo) frontend(service string, kind plan.FrontendKind, family plan.Family) (plan.Frontend, error) {
	for _, sp := range d.served {
		if sp.Namespace+"/"+sp.Name != service || sp.Family != family.String() {
			continue
		}
		f := plan.Frontend{Kind: kind, Protocol: sp.Protocol, Port: sp.Number}
		addresses := map[plan.FrontendKind][]string{plan.ClusterIP: {sp.ClusterIP}, plan.LoadBalancerIP: sp.LoadBalancerIPs, plan.ExternalIP: sp.ExternalIPs}[kind]
		if kind == plan.NodePort {
			addresses, f.Port = []string{d.world.Node1().IP(int(family)).String()}, sp.NodePort
		}
		if len(addresses) > 0 && f.Port > 0 {
			var err error
			f.Addr, err = netip.ParseAddr(addresses[0])
			return f, err
		}
	}
	return plan.Frontend{}, fmt.Errorf("%s has no %s in %s", service, kind, family)
}

// replace edits a manifest as an editor does: by a new file in the place of the old one.
func (d *demo) replace(file, old, new string) error {
	path := filepath.Join(d.world.Manifests, file)
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	edited := strings.Replace(string(content), old, new, 1)
	if edited == string(content) {
		return fmt.Errorf("%s has no %q", file, old)
	}
	temporary := filepath.Join(d.world.Dir, "edited")
	if err := os.WriteFile(temporary, []byte(edited), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

func (d *demo) edit() error {
	f, err := d.frontend("shop/web", plan.ClusterIP, plan.IPv4)
	if err != nil {
		return err
	}
	start := time.Now()
	if err := d.replace("pod-web-3.yaml", `"False"`, `"True"`); err != nil {
		return err
	}
	for requests := 1; ; requests++ {
		a := d.world.Pod("n1c").Ask("tcp", netip.AddrPortFrom(f.Addr, f.Port), harness.Patient)
		if a.Outcome != harness.Answered {
			return fmt.Errorf("a request meanwhile: %s", a)
		}
		if a.Server == "n3a" {
			fmt.Printf("   its first answer came %d ms after the file was saved (request %d since)\n",
				time.Since(start).Milliseconds(), requests)
			break
		}
		if time.Since(start) > harness.Limit {
			return fmt.Errorf("n3a has not answered within %v", harness.Limit)
		}
	}
	_, err = d.ask(d.world.Pod("n1c").Netns, "tcp", "shop/web", f, []string{"n1a", "n2a", "n3a"})
	return err
}

// enough are so many requests that each of three endpoints gets one of them, but for a chance of 10^-34.
const enough = 200

// more waits until enough further requests have ended.
func more(l *harness.Load) error {
	begun, before := time.Now(), l.Requests()
	for l.Requests() < before+enough {
		if time.Since(begun) > harness.Limit {
			return fmt.Errorf("only %d requests have ended within %v", l.Requests()-before, harness.Limit)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return nil
}

// load runs requests to shop/web before, while and after something happens, and fails if one of them does.
func (d *demo) load(what func(*harness.Load) error) (*harness.Load, error) {
	f, err := d.frontend("shop/web", plan.NodePort, plan.IPv4)
	if err != nil {
		return nil, err
	}
	l := d.world.Client.StartLoad("tcp", netip.AddrPortFrom(f.Addr, f.Port), 4, time.Millisecond)
	if err = more(l); err == nil {
		err = what(l)
	}
	if err == nil {
		err = more(l)
	}
	l.Stop()
	if failures := l.Failures(); err == nil && len(failures) > 0 {
		err = fmt.Errorf("%d of %d requests failed, the first: %s", len(failures), l.Requests(), failures[0])
	}
	return l, err
}

func (d *demo) remove() error {
	var saved time.Time
	l, err := d.load(func(l *harness.Load) error {
		saved = time.Now()
		if err := d.replace("pods.yaml", `"True"`, `"False"`); err != nil { // web-1 is the first
			return err
		}
		for before := -1; l.Answers("n1a") != before; {
			if time.Since(saved) > harness.Limit {
				return fmt.Errorf("web-1 still gets new requests %v after the file was saved", harness.Limit)
			}
			before = l.Answers("n1a")
			if err := more(l); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if l.Answers("n1a") == 0 {
		return errors.New("web-1 never got traffic, so that nothing was taken from it")
	}
	last := max(0, l.LastFrom("n1a").Sub(saved).Milliseconds())
	fmt.Printf("   %d requests from outside, 0 failed; the last new one to web-1 began %d ms after the file was saved\n",
		l.Requests(), last)
	return nil
}

func (d *demo) restart() error {
	l, err := d.load(func(*harness.Load) error {
		if err := d.daemon.Kill(); err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond)
		return d.startDaemon()
	})
	if err != nil {
		return err
	}
	fmt.Printf("   kill -9, 0.3 s without it, a new start: %d requests from outside, 0 failed\n", l.Requests())
	return nil
}
