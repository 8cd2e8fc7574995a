// Command demo shows nodeproxy at work: on a node with pods and an outside client, all of them network namespaces, over
// the manifests in examples/. It ends with exit code 1 if anything that it shows does not hold.
package main

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source/controlplane"
	"nodeproxy/source/manifest"
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

var (
	serviceCIDRs = []netip.Prefix{harness.ServiceCIDR4, harness.ServiceCIDR6}
	clusterCIDRs = []netip.Prefix{harness.ClusterCIDR4, harness.ClusterCIDR6}
)

type demo struct {
	mode     harness.Mode
	examples string
	world    *harness.World
	daemon   *harness.Daemon
	plan     *plan.Plan
	db       string // the name of the server outside the cluster
}

type step struct {
	title string
	do    func() error
}

func (d *demo) run() error {
	held := step{"The rules of shop/web, from iptables-save on node1", d.chains}
	switch d.mode {
	case harness.IPVS:
		held = step{"What node1's kernel has of shop/web", d.servers}
	case harness.NFTables:
		held = step{"The elements of shop/web, from nft list map on node1", d.elements}
	}
	for _, step := range []step{
		{"A node with pods, two more nodes, and a client outside, in network namespaces", d.setUp},
		{"nodeproxy run --mode=" + string(d.mode) + ", on node1, over examples/", d.start},
		{"What it serves", d.services},
		held,
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

func join(prefixes []netip.Prefix) string { return prefixes[0].String() + "," + prefixes[1].String() }

func (d *demo) startDaemon() (err error) {
	d.daemon, err = d.world.StartDaemon(d.world.Node1(),
		"--service-cidr="+join(serviceCIDRs), "--cluster-cidr="+join(clusterCIDRs))
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

// services prints the plan that the daemon follows, made here in the same way from the same manifests.
func (d *demo) services() error {
	batch, err := manifest.Load(manifest.Config{Path: d.world.Manifests, Ranges: controlplane.Ranges{ServiceCIDRs: serviceCIDRs}})
	if err != nil {
		return err
	}
	state := proxier.NewState("node1", plan.Settings{}, plan.Families[:], nil)
	state.Apply(batch)
	d.plan, _ = state.Update()
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "   SERVICE\tCLUSTER IP\tPORT\tALSO AT\tENDPOINTS")
	for _, f := range plan.Families {
		for _, sp := range d.plan.Sorted(f) {
			var also, to []string
			for _, fe := range sp.Frontends[1:] {
				switch fe.Kind {
				case plan.NodePort:
					also = append(also, fmt.Sprintf("node port %d", fe.Port))
				case plan.LoadBalancerIP, plan.ExternalIP:
					also = append(also, fe.Addr.String())
				}
			}
			for _, ep := range sp.All() {
				to = append(to, ep.Addr.String())
			}
			if to == nil {
				to = []string{"none: refused"}
			}
			first := sp.Frontends[0]
			fmt.Fprintf(out, "   %s\t%s\t%d/%s\t%s\t%s\n", sp.Key.PortName(), first.Addr, first.Port, first.Protocol,
				strings.Join(also, ", "), strings.Join(to, " "))
		}
	}
	return out.Flush()
}

// frontend finds where a Service is reached.
func (d *demo) frontend(service string, kind plan.FrontendKind, family plan.Family) (plan.Frontend, error) {
	for _, sp := range d.plan.Sorted(family) {
		for _, f := range sp.Frontends {
			if sp.Key.Service.String() == service && f.Kind == kind {
				if f.Kind == plan.NodePort {
					f.Addr = d.world.Node1().IP(int(family))
				}
				return f, nil
			}
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
