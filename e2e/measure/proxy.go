package measure

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
	"nodeproxy/e2e/machine"
)

// The names of the two proxies.
const (
	NodeProxy = "nodeproxy"
	KubeProxy = "kube-proxy"
)

// Proxy is one of the two programs that are compared.
type Proxy struct {
	Name, Version string
	// Flags come after those that both get, Env after this process's environment.
	Flags, Env []string
	path       string
}

// FindProxies finds nodeproxy and kube-proxy, to be run in a mode, and asks for their versions.
func FindProxies(mode harness.Mode) (np, kp Proxy, err error) {
	own, err := harness.Binary()
	if err != nil {
		return np, kp, err
	}
	binaries, err := cluster.Binaries()
	if err != nil {
		return np, kp, err
	}
	flag := "--proxy-mode=" + string(mode)
	np = Proxy{Name: NodeProxy, path: own, Flags: []string{flag}}
	kp = Proxy{Name: KubeProxy, path: filepath.Join(binaries, KubeProxy), Flags: []string{flag}}
	if np.Version, err = VersionOf(np.path, "version"); err != nil {
		return np, kp, err
	}
	kp.Version, err = VersionOf(kp.path, "--version")
	return np, kp, err
}

// VersionOf is what a program prints, without what it calls itself.
func VersionOf(path, argument string) (string, error) {
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

// Running is a proxy under way.
type Running struct {
	Name, log string
	cmd       *exec.Cmd
	exited    chan struct{}
}

// Start starts the site's proxy. The flags are in kube-proxy's words. The settings of connection tracking belong to the
// machine as a whole, so both are told to leave them alone; all else is as by default.
func (s *Site) Start() (*Running, error) {
	p := s.Proxy
	r := &Running{Name: p.Name, log: s.log, exited: make(chan struct{})}
	log, err := os.OpenFile(r.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r.cmd = exec.Command(p.path, append([]string{
		"--kubeconfig=" + s.kubeconfig, "--hostname-override=" + s.Node.Name, "--cluster-cidr=" + PodRange,
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
	}, p.Flags...)...)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.Env = append(os.Environ(), p.Env...)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.Node.Start(r.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.Name, err)
	}
	go func() {
		_ = r.cmd.Wait() // an end that nobody asked for shows in Rest
		close(r.exited)
	}()
	return r, nil
}

// Freeze stops the proxy until Thaw.
func (r *Running) Freeze() error { return r.cmd.Process.Signal(syscall.SIGSTOP) }

// Thaw lets the proxy go on.
func (r *Running) Thaw() error { return r.cmd.Process.Signal(syscall.SIGCONT) }

// Stop ends the proxy, frozen or not, by force if it does not go in ten seconds, and the programs that it has started.
func (r *Running) Stop() {
	_ = r.cmd.Process.Signal(syscall.SIGCONT)
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-r.exited:
	case <-time.After(10 * time.Second):
		_ = r.cmd.Process.Kill()
		<-r.exited
	}
	// One that is in the kernel, which may take minutes there, ends when it comes out.
	for begun := time.Now(); syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL) == nil && time.Since(begun) < restTimeout; {
		time.Sleep(restPeriod / 10)
	}
}

// Explain adds to an error what the proxy logged at last.
func (r *Running) Explain(err error) error {
	text, readErr := os.ReadFile(r.log)
	if readErr != nil {
		return err
	}
	const most = 3000
	return fmt.Errorf("%s: %w; the end of its log:\n%s", r.Name, err, text[max(0, len(text)-most):])
}

// CPU is the processor time that the proxy and those of its children that have ended have used, in user mode and in the
// kernel.
func (r *Running) CPU() (time.Duration, error) {
	p, err := machine.ProcessOf(r.cmd.Process.Pid)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", r.Name, err)
	}
	return p.Own + p.Children, nil
}

// The proxy is at rest when it has used less than a twentieth of a processor for a second.
const (
	restPeriod  = time.Second
	restShare   = 0.05
	restTimeout = 5 * time.Minute
)

// Rest waits until the proxy and its children have nothing to do.
func (r *Running) Rest() error {
	used := func() (sum time.Duration) {
		for pid, p := range machine.Processes() {
			if pid == r.cmd.Process.Pid || p.Parent == r.cmd.Process.Pid {
				sum += p.Own + p.Children
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

// Settle freezes the proxy as soon as it is at rest, and returns the processor time that it has used so far.
func (r *Running) Settle() (time.Duration, error) {
	if err := r.Rest(); err != nil {
		return 0, err
	}
	cpu, err := r.CPU()
	return cpu, errors.Join(err, r.Freeze())
}

// Memory is the resident memory of the proxy itself, in bytes, now and at its highest.
func (r *Running) Memory() (now, peak int64, err error) {
	if now, peak, err = machine.Memory(r.cmd.Process.Pid); err != nil {
		err = fmt.Errorf("%s: %w", r.Name, err)
	}
	return now, peak, err
}
