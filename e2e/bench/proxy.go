package main

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
)

// The programs, and nodeproxy in another mode than that which is compared, as the flags and the tables call them.
const (
	nodeProxy  = "nodeproxy"
	kubeProxy  = "kube-proxy"
	another    = "the other one"
	inIPTables = "iptables"
)

// proxy is a program to be compared. One without a path is none, for comparison.
type proxy struct {
	name, program, path, version string
	flags                        []string // These come after those that all get.
}

// findProxies finds nodeproxy and what it is compared with, to be run in the mode, and asks for their versions.
func (o *options) findProxies() (np, other proxy) {
	np = proxy{name: nodeProxy, program: nodeProxy, path: must(harness.Binary()), flags: []string{"--proxy-mode=" + o.mode}}
	if len(o.backends) > 0 {
		np.flags = append(np.flags, "--iptables-backend="+o.backends[0])
	}
	np.version, other = versionOf(np.path, "version"), np
	if o.against != "" {
		other.name, other.path, other.version = another, o.against, versionOf(o.against, "version")
		return np, other
	}
	other.flags = other.flags[:1:1] // It has the mode alone: kube-proxy has no flag for the variant.
	other.name, other.program, other.path = kubeProxy, kubeProxy, filepath.Join(must(cluster.Binaries()), kubeProxy)
	other.version = versionOf(other.path, "--version")
	return np, other
}

// versionOf is what a program prints, without what it calls itself.
func versionOf(path, argument string) string {
	out, err := exec.Command(path, argument).Output()
	check(err, path+" "+argument)
	fields := strings.Fields(string(out))
	if len(fields) == 0 {
		check(errors.New("it prints nothing"), path+" "+argument)
	}
	return strings.Join(fields[min(1, len(fields)-1):], " ")
}

// node is a node with the proxy that is measured on it, and what was measured.
type node struct {
	*stage
	proxy
	process *cluster.Process
	// socket is where a nodeproxy answers. lock is the file of the xtables lock, which otherwise is one for all of the machine.
	socket, lock string

	figures
	series map[string][]time.Duration // times of which a figure is a percentile
	cpu    map[string]time.Duration   // processor time for all of a series together
}

// lockVariable names the file of the xtables lock for all programs of iptables.
const lockVariable = "XTABLES_LOCKFILE="

// newNode makes a node whose proxy does not run yet. The flags are in kube-proxy's words. The settings of connection tracking belong to the
// machine as a whole, so both proxies are told to leave them alone; all else is as by default.
func newNode(s *stage, p proxy, kubeconfig, log string) *node {
	args := append([]string{
		"--kubeconfig=" + kubeconfig, "--hostname-override=" + s.Name, "--cluster-cidr=" + podRange,
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
	}, p.flags...)
	n := &node{stage: s, proxy: p, socket: log + ".sock", lock: log + ".lock", figures: figures{}, series: map[string][]time.Duration{},
		cpu: map[string]time.Duration{}}
	if p.program == nodeProxy {
		args = append(args, "--socket="+n.socket)
	}
	n.process = &cluster.Process{
		Name: p.name, Path: p.path, Args: args, Env: []string{lockVariable + n.lock}, Netns: s.Netns, LogFile: log,
	}
	return n
}

// runs reports whether the proxy runs.
func (n *node) runs() bool { return n.process.PID != 0 }

// The proxy is at rest when it has used less than a twentieth of a processor for a second.
const (
	restPeriod  = time.Second
	restShare   = 0.05
	restTimeout = 5 * time.Minute
)

// rest waits until the proxy and its children have nothing to do.
func (n *node) rest() {
	used := func() (sum time.Duration) {
		for pid, p := range machine.Processes() {
			if pid == n.process.PID || p.Parent == n.process.PID {
				sum += p.Own + p.Children
			}
		}
		return sum
	}
	before := used()
	for begun := time.Now(); time.Since(begun) < restTimeout; {
		select {
		case <-n.process.Exited:
			check(errors.New("it ended by itself"))
		case <-time.After(restPeriod):
		}
		now := used()
		if (now - before).Seconds() < restShare*restPeriod.Seconds() {
			return
		}
		before = now
	}
	check(fmt.Errorf("still busy after %s", restTimeout))
}

// used is the processor time that the proxy and those of its children that have ended have used, in user mode and in the kernel.
func (n *node) used() time.Duration {
	p, err := machine.ProcessOf(n.process.PID)
	check(err, n.name)
	return p.Own + p.Children
}

// counted runs fn until the proxy has nothing left to do, and counts the processor time that the proxy takes for that and for whatever it
// does besides as that of a series.
func (n *node) counted(series string, fn func()) {
	before := n.used()
	fn()
	n.rest()
	n.cpu[series] += n.used() - before
}

// summarize makes figures of the series.
func (n *node) summarize() {
	for name, values := range n.series {
		n.figures[name+" p50"], n.figures[name+" p99"] = percentile(values, 0.5).Seconds(), percentile(values, 0.99).Seconds()
		n.figures[name+" max"], n.figures[name+" count"] = slices.Max(values).Seconds(), float64(len(values))
		n.figures[name+" spread"] = n.figures[name+" max"] / n.figures[name+" p99"]
		if cpu, ok := n.cpu[name]; ok {
			n.figures[name+" cpu"] = cpu.Seconds() / float64(len(values))
		}
	}
}

// syncTime asks the proxy how long its syncs have taken, and how much of that to write the kernel, in seconds; kube-proxy does not say that.
func (n *node) syncTime() (all float64, written figures) {
	s := must(n.Metrics())
	const syncs, stages = "kubeproxy_sync_proxy_rules_duration_seconds_sum", "nodeproxy_sync_stage_duration_seconds_sum"
	if !s.Has(syncs, "ip_family=IPv4") {
		check(fmt.Errorf("%s has no metric %s", n.name, syncs))
	}
	if s.Has(stages) {
		written = figures{"written": s.Sum(stages, "stage=backend")}
	}
	return s.Sum(syncs, "ip_family=IPv4"), written
}

// comparisons is how often a nodeproxy has compared everything with the kernel; kube-proxy does not say that.
func (n *node) comparisons() (count float64, tells bool) {
	s := must(n.Metrics())
	const compared = "nodeproxy_drift_check_duration_seconds"
	return s.Sum(compared), s.Has(compared)
}
