package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// proxy is one of the two programs that are compared.
type proxy struct {
	name    string
	account string // the ServiceAccount that it runs as
	path    string
	flags   []string // beside those that both get
	version string
	// plain is the variant of iptables that it gets by the plain names in its PATH; by default what the machine has there.
	plain harness.Variant
}

// ours is nodeproxy.
func ours(v harness.Variant) (proxy, error) {
	path, err := harness.Binary()
	if err != nil {
		return proxy{}, err
	}
	p := proxy{name: "nodeproxy", account: "nodeproxy", path: path, flags: []string{"--iptables-backend=" + string(v)}}
	p.version, err = output(path, "version")
	return p, err
}

// theirs is kube-proxy.
func theirs(v harness.Variant) (proxy, error) {
	binaries, err := cluster.Binaries()
	if err != nil {
		return proxy{}, err
	}
	p := proxy{name: "kube-proxy", account: "kube-proxy", path: filepath.Join(binaries, "kube-proxy"), plain: v}
	p.version, err = output(p.path, "--version")
	return p, err
}

// linkTools makes a directory in which the plain names, such as iptables, stand for a variant's tools.
func linkTools(v harness.Variant, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, part := range []string{"", "-save", "-restore"} {
			if err := linkTool(v.Tool(family)+part, filepath.Join(dir, family+part)); err != nil {
				return fmt.Errorf("the %s variant of iptables: %w", v, err)
			}
		}
	}
	return nil
}

// linkTool makes a link to a tool. The tools are one program, which goes by the name that it is called by.
func linkTool(tool, link string) error {
	target, err := exec.LookPath(tool)
	if err != nil {
		return err
	}
	if target, err = filepath.EvalSymlinks(target); err != nil {
		return err
	}
	return os.Symlink(target, link)
}

// output is what a program prints, without what it calls itself.
func output(path string, args ...string) (string, error) {
	out, err := exec.Command(path, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", path, strings.Join(args, " "), err)
	}
	fields := strings.Fields(string(out))
	if len(fields) == 0 {
		return "", fmt.Errorf("%s %s prints nothing", path, strings.Join(args, " "))
	}
	return strings.Join(fields[min(1, len(fields)-1):], " "), nil
}

// running is a proxy under way.
type running struct {
	name, log string
	cmd       *exec.Cmd
	exited    chan struct{}
}

// start starts the site's proxy. The flags are the same for both, in kube-proxy's words. The settings of connection
// tracking belong to the machine as a whole, so both are told to leave them alone; all else is as by default.
func (s *site) start(dir string) (*running, error) {
	p := s.proxy
	args := append([]string{
		"--kubeconfig=" + s.kubeconfig, "--hostname-override=" + s.node.Name, "--proxy-mode=iptables",
		"--cluster-cidr=" + podRange, "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0",
		"--conntrack-tcp-timeout-close-wait=0",
	}, p.flags...)
	r := &running{name: p.name, log: filepath.Join(dir, p.name+".log"), exited: make(chan struct{})}
	log, err := os.OpenFile(r.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r.cmd = exec.Command(p.path, args...)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	if p.plain != "" {
		tools := filepath.Join(dir, "tools")
		if err := linkTools(p.plain, tools); err != nil {
			return nil, err
		}
		r.cmd.Env = append(os.Environ(), "PATH="+tools+":"+os.Getenv("PATH"))
	}
	if err := s.node.Start(r.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	go func() {
		_ = r.cmd.Wait() // an end that nobody asked for shows in failed()
		close(r.exited)
	}()
	return r, nil
}

// stop ends the proxy, frozen or not, by force if it does not go in ten seconds.
func (r *running) stop() {
	_ = r.cmd.Process.Signal(syscall.SIGCONT)
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-r.exited:
	case <-time.After(10 * time.Second):
		_ = r.cmd.Process.Kill()
		<-r.exited
	}
}

// explain adds to an error what the proxy logged at last.
func (r *running) explain(err error) error {
	text, readErr := os.ReadFile(r.log)
	if readErr != nil {
		return err
	}
	const most = 3000
	return fmt.Errorf("%s: %w; the end of its log:\n%s", r.name, err, text[max(0, len(text)-most):])
}

// cpu is the processor time that the proxy and those of its children that have ended have used, in user mode and in the
// kernel.
func (r *running) cpu() (time.Duration, error) {
	t, ok := processTimes()[r.cmd.Process.Pid]
	if !ok {
		return 0, fmt.Errorf("%s has ended", r.name)
	}
	return ticks(t.own + t.children), nil
}

// The proxy is at rest when it has used less than a twentieth of a processor for a second.
const (
	restPeriod  = time.Second
	restShare   = 0.05
	restTimeout = 5 * time.Minute
)

// rest waits until the proxy and its children have nothing to do.
func (r *running) rest() error {
	used := func() (sum time.Duration) {
		for pid, p := range processTimes() {
			if pid == r.cmd.Process.Pid || p.parent == r.cmd.Process.Pid {
				sum += ticks(p.own + p.children)
			}
		}
		return sum
	}
	before := used()
	for begun := time.Now(); time.Since(begun) < restTimeout; {
		select {
		case <-r.exited:
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

// memory is the resident memory of the proxy itself, in bytes, now and at its highest.
func (r *running) memory() (now, peak int64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		return 0, 0, fmt.Errorf("memory of %s: %w", r.name, err)
	}
	return parseMemory(string(b))
}

func parseMemory(status string) (now, peak int64, err error) {
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		var into *int64
		switch key {
		case "VmRSS":
			into = &now
		case "VmHWM":
			into = &peak
		default:
			continue
		}
		if _, err := fmt.Sscanf(value, "%d kB", into); err != nil {
			return 0, 0, fmt.Errorf("%s %q: %w", key, value, err)
		}
		*into *= 1024
	}
	if now == 0 || peak == 0 {
		return 0, 0, fmt.Errorf("no VmRSS and VmHWM in %q", status)
	}
	return now, peak, nil
}
