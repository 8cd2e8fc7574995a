package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/e2e/machine"
)

// Variant is one of the two implementations of the iptables tools.
type Variant string

// The iptables variants.
const (
	NFT    Variant = "nft"
	Legacy Variant = "legacy"
)

// Variants lists both.
var Variants = []Variant{NFT, Legacy}

// Tool returns the name of a variant's tool: iptables becomes iptables-nft, and so on.
func (v Variant) Tool(name string) string { return name + "-" + string(v) }

// Link makes links in a directory by which the plain names, such as iptables, stand for a variant's tools: kube-proxy calls them by these.
func (v Variant) Link(dir string) error {
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, part := range []string{"", "-save", "-restore"} {
			tool, err := exec.LookPath(v.Tool(family) + part)
			if err == nil {
				err = os.Symlink(tool, filepath.Join(dir, family+part))
			}
			if err != nil {
				return fmt.Errorf("the %s variant of iptables: %w", v, err)
			}
		}
	}
	return nil
}

// Daemon is a running nodeproxy.
type Daemon struct {
	Node *Node
	Args []string

	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has ended; then err is set
	err    error

	mu      sync.Mutex
	lines   []string
	changed chan struct{}   // closed and replaced with each line
	log     syscall.RawConn // the pipe that the lines come from; nil at its end
}

func (d *Daemon) String() string {
	return "nodeproxy " + strings.Join(d.Args, " ") + " on " + d.Node.Name
}

// Limit is how long tests wait for what is due: a time that only a hang reaches, however busy the machine is. No verdict depends on it.
const Limit = 5 * time.Minute

// StartupTimeout is how long Run waits for a daemon to have programmed the kernel for the first time.
const StartupTimeout = Limit

// Run starts nodeproxy on node1 over the World's manifests with --iptables-backend=variant and these flags besides, and
// waits until it is in sync. Mode ipvs has the addresses of Services as VIPsWith says, unless the flags say it.
func (w *World) Run(t testing.TB, variant Variant, flags ...string) *Daemon {
	t.Helper()
	args := append([]string{"--iptables-backend=" + string(variant), "--ipvs-vips=" + string(VIPsWith(variant))}, flags...)
	var d *Daemon
	err := w.hostile(variant)
	if err == nil {
		d, err = w.StartDaemon(w.Node1(), args...)
	}
	if err == nil {
		err = d.WaitFor(StartupTimeout, InSync)
	}
	if err != nil {
		t.Fatalf("harness: %v", err)
	}
	return d
}

// InSync is what the daemon logs when it has programmed everything it knows of.
const InSync = `msg="in sync: `

// StartDaemon starts nodeproxy on a node, over the World's manifests, in the mode under test, with these flags besides,
// which go before, and does not wait for anything.
func (w *World) StartDaemon(n *Node, flags ...string) (*Daemon, error) {
	path, err := Binary()
	if err != nil {
		return nil, err
	}
	args := append([]string{
		"run", "--mode=" + string(ModeUnderTest()), "--manifests=" + w.Manifests, "--node-name=" + n.Name, "--log-level=debug",
		"--service-cidr=" + ServiceCIDR4.String() + "," + ServiceCIDR6.String(),
		"--socket=", // All nodes share one file system.
	}, flags...)
	d := &Daemon{Node: n, Args: args, exited: make(chan struct{}), changed: make(chan struct{})}
	launch := w.Launch
	if launch == nil {
		launch = exec.Command
	}
	d.cmd = launch(path, args...)
	r, pipe, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	d.cmd.Env = append(d.cmd.Environ(), w.DaemonEnv...)
	d.cmd.Stderr, d.cmd.Stdout = pipe, pipe
	err = n.Start(d.cmd)
	pipe.Close()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start %s: %w", d, err)
	}
	if d.log, err = r.SyscallConn(); err != nil {
		return nil, err // A file has one.
	}
	live.Lock()
	w.daemons = append(w.daemons, d)
	live.Unlock()
	go d.collect(r)
	return d, nil
}

// collect reads the log to its end, then takes the exit status. What has left the pipe is among the lines: whoever holds d.mu sees a line in one
// of the two.
func (d *Daemon) collect(r *os.File) {
	buf, rest := make([]byte, 64<<10), ""
	read := func(fd uintptr) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		n, err := unix.Read(int(fd), buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return false
		case errors.Is(err, unix.EINTR):
			return true
		case n <= 0:
			d.log = nil
		}
		lines := strings.SplitAfter(rest+string(buf[:max(n, 0)]), "\n")
		if last := len(lines) - 1; d.log != nil || lines[last] == "" {
			lines, rest = lines[:last], lines[last]
		}
		for _, line := range lines {
			d.lines = append(d.lines, strings.TrimRight(line, "\n"))
		}
		if len(lines) > 0 {
			close(d.changed)
			d.changed = make(chan struct{})
		}
		return true
	}
	for open := true; open; {
		err := d.log.Read(read)
		d.mu.Lock()
		open = err == nil && d.log != nil
		d.mu.Unlock()
	}
	_ = r.Close()
	d.err = d.cmd.Wait()
	close(d.exited)
}

// unread reports whether the daemon has written what is not among the lines. d.mu is held.
func (d *Daemon) unread() bool {
	n := 0
	if d.log != nil {
		_ = d.log.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n > 0
}

// PID is the daemon's process id.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Log returns the lines logged so far.
func (d *Daemon) Log() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.lines...)
}

func (d *Daemon) tail(n int) string {
	lines := d.Log()
	if len(lines) > n {
		lines = append([]string{fmt.Sprintf("(%d lines before)", len(lines)-n)}, lines[len(lines)-n:]...)
	}
	return strings.Join(lines, "\n")
}

// WaitFor waits until a line of the log has all the given parts in it.
func (d *Daemon) WaitFor(timeout time.Duration, parts ...string) error {
	return d.WaitForAfter(0, timeout, parts...)
}

// WaitForAfter is WaitFor over the lines from the given one on; len(d.Log()) taken earlier makes it wait for something
// new.
func (d *Daemon) WaitForAfter(line int, timeout time.Duration, parts ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	ended := false
	for next := line; ; {
		d.mu.Lock()
		lines, changed := d.lines, d.changed
		d.mu.Unlock()
		for ; next < len(lines); next++ {
			if containsAll(lines[next], parts) {
				return nil
			}
		}
		if ended {
			return fmt.Errorf("%s ended (%v) and never logged %q:\n%s", d, d.err, parts, d.tail(40))
		}
		select {
		case <-changed:
		case <-d.exited:
			ended = true // look once more: the last lines may have come just before
		case <-ctx.Done():
			return fmt.Errorf("%s did not log %q within %v:\n%s", d, parts, timeout, d.tail(40))
		}
	}
}

func containsAll(line string, parts []string) bool {
	for _, p := range parts {
		if !strings.Contains(line, p) {
			return false
		}
	}
	return true
}

// Stop sends SIGTERM and waits for the end, which has to be a clean one.
func (d *Daemon) Stop() error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop %s: %w", d, err)
	}
	select {
	case <-d.exited:
	case <-time.After(Limit):
		return fmt.Errorf("%s still runs %v after SIGTERM:\n%s", d, Limit, d.tail(40))
	}
	if d.err != nil {
		return fmt.Errorf("%s after SIGTERM: %w", d, d.err)
	}
	return nil
}

// Kill sends SIGKILL and waits for the end.
func (d *Daemon) Kill() error {
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", d, err)
	}
	<-d.exited
	return nil
}

// Exited reports whether the process has ended, and how.
func (d *Daemon) Exited() (bool, error) {
	select {
	case <-d.exited:
		return true, d.err
	default:
		return false, nil
	}
}

// end makes sure that the process is gone.
func (d *Daemon) end() error {
	if done, _ := d.Exited(); done {
		return nil
	}
	return d.Kill()
}

// CPUTime is the processor time that the daemon itself (not its children) has used.
func (d *Daemon) CPUTime() (time.Duration, error) {
	p, err := machine.ProcessOf(d.PID())
	return p.Own, err
}
