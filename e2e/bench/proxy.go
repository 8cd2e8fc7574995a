package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
)

// The programs, and nodeproxy in another mode than that which is compared, as the flags and the tables call them.
const (
	nodeProxy  = "nodeproxy"
	kubeProxy  = "kube-proxy"
	inIPTables = "iptables"
)

// proxy is a program to be compared. One without a path is none, for comparison.
type proxy struct {
	name, program, path, version string
	flags, env                   []string // These come after those that all get, and after this process's environment.
}

// findProxies finds nodeproxy and kube-proxy, to be run in a mode, and asks for their versions.
func findProxies(mode string) (np, kp proxy, err error) {
	own, err := harness.Binary()
	if err != nil {
		return np, kp, err
	}
	binaries, err := cluster.Binaries()
	if err != nil {
		return np, kp, err
	}
	np = proxy{name: nodeProxy, program: nodeProxy, path: own, flags: []string{"--proxy-mode=" + mode}}
	kp = proxy{name: kubeProxy, program: kubeProxy, path: filepath.Join(binaries, kubeProxy), flags: np.flags}
	if np.version, err = versionOf(np.path, "version"); err != nil {
		return np, kp, err
	}
	kp.version, err = versionOf(kp.path, "--version")
	return np, kp, err
}

// versionOf is what a program prints, without what it calls itself.
func versionOf(path, argument string) (string, error) {
	out, err := exec.Command(path, argument).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", path, argument, err)
	}
	fields := strings.Fields(string(out))
	if len(fields) == 0 {
		return "", fmt.Errorf("%s %s prints nothing", path, argument)
	}
	return strings.Join(fields[min(1, len(fields)-1):], " "), nil
}

// node is a node with the proxy that is measured on it, and what was measured.
type node struct {
	*stage
	proxy
	kubeconfig, log string    // files
	cmd             *exec.Cmd // nil where no proxy runs
	exited          chan struct{}

	figures
	series map[string][]time.Duration // times of which a figure is a percentile
	cpu    map[string]time.Duration   // processor time for all of a series together
}

// start starts the node's proxy. The flags are in kube-proxy's words. The settings of connection tracking belong to the machine as a
// whole, so both are told to leave them alone; all else is as by default.
func (n *node) start() error {
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd, exited := exec.Command(n.path, append([]string{
		"--kubeconfig=" + n.kubeconfig, "--hostname-override=" + n.Name, "--cluster-cidr=" + podRange,
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
	}, n.flags...)...), make(chan struct{})
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, append(os.Environ(), n.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := n.Start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", n.name, err)
	}
	go func() {
		_ = cmd.Wait() // an end that nobody asked for shows in rest
		close(exited)
	}()
	n.cmd, n.exited = cmd, exited
	return nil
}

// freeze stops the proxy until thaw.
func (n *node) freeze() error { return n.cmd.Process.Signal(syscall.SIGSTOP) }

func (n *node) thaw() error { return n.cmd.Process.Signal(syscall.SIGCONT) }

// stop ends the proxy, if there is one, frozen or not, by force if it does not go in ten seconds, and the programs that it has started.
func (n *node) stop() {
	if n.cmd == nil {
		return
	}
	_ = n.thaw()
	_ = n.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-n.exited:
	case <-time.After(10 * time.Second):
		_ = n.cmd.Process.Kill()
		<-n.exited
	}
	// One that is in the kernel, which may take minutes there, ends when it comes out.
	for begun := time.Now(); syscall.Kill(-n.cmd.Process.Pid, syscall.SIGKILL) == nil && time.Since(begun) < restTimeout; {
		time.Sleep(restPeriod / 10)
	}
	n.cmd = nil
}

// explain adds to an error what the proxy logged at last.
func (n *node) explain(err error) error {
	text, readErr := os.ReadFile(n.log)
	if err == nil || readErr != nil {
		return err
	}
	const most = 3000
	return fmt.Errorf("%s: %w; the end of its log:\n%s", n.name, err, text[max(0, len(text)-most):])
}

// The proxy is at rest when it has used less than a twentieth of a processor for a second.
const (
	restPeriod  = time.Second
	restShare   = 0.05
	restTimeout = 5 * time.Minute
)

// rest waits until the proxy and its children have nothing to do.
func (n *node) rest() error {
	used := func() (sum time.Duration) {
		for pid, p := range machine.Processes() {
			if pid == n.cmd.Process.Pid || p.Parent == n.cmd.Process.Pid {
				sum += p.Own + p.Children
			}
		}
		return sum
	}
	before := used()
	for begun := time.Now(); time.Since(begun) < restTimeout; {
		select {
		case <-n.exited:
			return errors.New("it ended by itself")
		case <-time.After(restPeriod):
		}
		now := used()
		if (now - before).Seconds() < restShare*restPeriod.Seconds() {
			return nil
		}
		before = now
	}
	return fmt.Errorf("still busy after %s", restTimeout)
}

// used is the processor time that the proxy and those of its children that have ended have used, in user mode and in the kernel.
func (n *node) used() (time.Duration, error) {
	p, err := machine.ProcessOf(n.cmd.Process.Pid)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", n.name, err)
	}
	return p.Own + p.Children, nil
}

// counted runs fn until the proxy has nothing left to do, and counts the processor time that the proxy takes for that and for whatever it
// does besides as that of a series.
func (n *node) counted(series string, fn func() error) error {
	before, err := n.used()
	if err != nil {
		return err
	}
	if err := errors.Join(fn(), n.rest()); err != nil {
		return err
	}
	after, err := n.used()
	n.cpu[series] += after - before
	return err
}

// summarize makes figures of the series.
func (n *node) summarize() {
	for name, values := range n.series {
		n.figures[name+" p50"], n.figures[name+" p99"] = percentile(values, 0.5).Seconds(), percentile(values, 0.99).Seconds()
		n.figures[name+" count"] = float64(len(values))
		if cpu, ok := n.cpu[name]; ok {
			n.figures[name+" cpu"] = cpu.Seconds() / float64(len(values))
		}
	}
}

// syncTime asks the proxy how long its syncs have taken, and how much of that to write the kernel, in seconds; kube-proxy does not say that.
func (n *node) syncTime() (all float64, written figures, err error) {
	code, text, err := n.Get(harness.MetricsAddr, "/metrics")
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("status %d", code)
	}
	var s *harness.Scrape
	if err == nil {
		s, err = harness.ParseScrape(text)
	}
	const syncs, stages = "kubeproxy_sync_proxy_rules_duration_seconds_sum", "nodeproxy_sync_stage_duration_seconds_sum"
	if err == nil && !s.Has(syncs, "ip_family=IPv4") {
		err = errors.New("no " + syncs)
	}
	if err != nil {
		return 0, nil, fmt.Errorf("metrics of %s: %w", n.name, err)
	}
	if s.Has(stages) {
		written = figures{"written": s.Sum(stages, "stage=backend")}
	}
	return s.Sum(syncs, "ip_family=IPv4"), written, nil
}
