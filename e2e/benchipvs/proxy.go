package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

const (
	nodeproxyName = "nodeproxy"
	kubeProxyName = "kube-proxy"
)

// proxy is one of the two programs that are compared.
type proxy struct {
	name, path, version string
}

// bothProxies finds nodeproxy and kube-proxy.
func bothProxies() (both [2]proxy, err error) {
	own, err := harness.Binary()
	if err != nil {
		return both, err
	}
	binaries, err := cluster.Binaries()
	if err != nil {
		return both, err
	}
	both = [2]proxy{{name: nodeproxyName, path: own}, {name: kubeProxyName, path: filepath.Join(binaries, kubeProxyName)}}
	for i, argument := range []string{"version", "--version"} {
		out, err := exec.Command(both[i].path, argument).Output()
		if err != nil {
			return both, fmt.Errorf("%s %s: %w", both[i].path, argument, err)
		}
		fields := strings.Fields(string(out))
		if len(fields) == 0 {
			return both, fmt.Errorf("%s %s prints nothing", both[i].path, argument)
		}
		both[i].version = fields[min(1, len(fields)-1)]
	}
	return both, nil
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
	args := []string{
		"--kubeconfig=" + s.kubeconfig, "--hostname-override=" + s.node.Name, "--proxy-mode=ipvs", "--cluster-cidr=" + podRange,
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
	}
	r := &running{name: s.proxy.name, log: filepath.Join(dir, s.node.Name+".log"), exited: make(chan struct{})}
	log, err := os.OpenFile(r.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r.cmd = exec.Command(s.proxy.path, args...)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	if err := s.node.Start(r.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", r.name, err)
	}
	go func() {
		_ = r.cmd.Wait() // an end that nobody asked for shows in rest
		close(r.exited)
	}()
	return r, nil
}

// freeze stops the proxy until thaw, stop ends it, frozen or not.
func (r *running) freeze() error { return r.cmd.Process.Signal(syscall.SIGSTOP) }

func (r *running) thaw() error { return r.cmd.Process.Signal(syscall.SIGCONT) }

func (r *running) stop() {
	_ = r.cmd.Process.Kill() // it may be gone already
	<-r.exited
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

// ticksPerSecond is the unit of times in /proc (USER_HZ), 100 on every architecture that Go runs on.
const ticksPerSecond = 100

// cpu is the processor time that the proxy and those of its children that have ended have used, in user mode and in the kernel.
func (r *running) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	if err != nil {
		return 0, fmt.Errorf("processor time of %s: %w", r.name, err)
	}
	return parseTimes(string(b))
}

// parseTimes reads utime, stime, cutime and cstime of a line of /proc/PID/stat. The name before them is in parentheses, and
// may have some in it.
func parseTimes(line string) (time.Duration, error) {
	const first, count = 11, 4 // counted from the field after the name
	fields := strings.Fields(line[strings.LastIndex(line, ")")+1:])
	if len(fields) < first+count {
		return 0, fmt.Errorf("%q has no processor times", line)
	}
	var sum int64
	for _, text := range fields[first : first+count] {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%q: %w", line, err)
		}
		sum += n
	}
	return time.Duration(sum) * time.Second / ticksPerSecond, nil
}

// The proxy is at rest when it has used less than a twentieth of a processor for a second.
const (
	restPeriod  = time.Second
	restShare   = 0.05
	restTimeout = 5 * time.Minute
)

// rest waits until the proxy has nothing to do.
func (r *running) rest() error {
	before, err := r.cpu()
	for begun := time.Now(); err == nil && time.Since(begun) < restTimeout; {
		select {
		case <-r.exited:
			return errors.New("it ended by itself")
		case <-time.After(restPeriod):
		}
		var now time.Duration
		if now, err = r.cpu(); (now - before).Seconds() < restShare*restPeriod.Seconds() {
			return err
		}
		before = now
	}
	return errors.Join(err, fmt.Errorf("still busy after %s", restTimeout))
}

// memory is the resident memory of the proxy itself, in bytes, now and at its highest.
func (r *running) memory() (now, peak int64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		return 0, 0, fmt.Errorf("memory of %s: %w", r.name, err)
	}
	if now, err = kilobytes(string(b), "VmRSS"); err == nil {
		peak, err = kilobytes(string(b), "VmHWM")
	}
	return now, peak, err
}

// kilobytes is a value in a file of /proc with lines such as "Slab:  1024 kB", in bytes.
func kilobytes(text, key string) (int64, error) {
	for line := range strings.Lines(text) {
		if name, value, _ := strings.Cut(line, ":"); name == key {
			var n int64
			if _, err := fmt.Sscanf(value, "%d kB", &n); err != nil {
				return 0, fmt.Errorf("%q: %w", line, err)
			}
			return n * 1024, nil
		}
	}
	return 0, fmt.Errorf("no %s", key)
}
