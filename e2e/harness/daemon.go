package harness

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

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

	mu    sync.Mutex
	log   *os.File // read as far as lines and rest go
	lines []string
	rest  string // the beginning of a line
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
	d := &Daemon{Node: n, Args: args, exited: make(chan struct{})}
	launch := w.Launch
	if launch == nil {
		launch = exec.Command
	}
	d.cmd = launch(path, args...)
	d.cmd.Env = append(d.cmd.Environ(), w.DaemonEnv...)
	log, err := os.CreateTemp(w.Dir, n.Name+"-*.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	if d.log, err = os.Open(log.Name()); err != nil {
		return nil, err
	}
	d.cmd.Stderr, d.cmd.Stdout = log, log
	if err := n.Start(d.cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", d, err)
	}
	live.Lock()
	w.daemons = append(w.daemons, d)
	live.Unlock()
	go func() {
		d.err = d.cmd.Wait()
		close(d.exited)
	}()
	return d, nil
}

// PID is the daemon's process id.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Log returns the lines logged so far.
func (d *Daemon) Log() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	text, _ := io.ReadAll(d.log)
	lines := strings.Split(d.rest+string(text), "\n")
	last := len(lines) - 1
	d.lines, d.rest = append(d.lines, lines[:last]...), lines[last]
	return slices.Clip(d.lines)
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
	ended := false
	for begun, next := time.Now(), line; ; {
		for lines := d.Log(); next < len(lines); next++ {
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(lines[next], part) }) {
				return nil
			}
		}
		if ended {
			return fmt.Errorf("%s ended (%v) and never logged %q:\n%s", d, d.err, parts, d.tail(40))
		}
		if time.Since(begun) > timeout {
			return fmt.Errorf("%s did not log %q within %v:\n%s", d, parts, timeout, d.tail(40))
		}
		ended = d.pause() // Then it looks once more: the last lines may have come just before.
	}
}

// pause waits until the daemon may have logged something, and reports whether it has ended.
func (d *Daemon) pause() (ended bool) {
	select {
	case <-d.exited:
		return true
	case <-time.After(2 * time.Millisecond):
		return false
	}
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
	defer d.log.Close()
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
