package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"nodeproxy/internal/nstest"
)

// Netns is a network namespace without a name.
type Netns struct {
	Name string // for messages only

	handle netns.NsHandle
	nl     *netlink.Handle
	ports  atomic.Uint32 // how many source ports have been used
}

// home is the namespace that the process started in.
var home = sync.OnceValues(netns.Get)

// newNetns makes a namespace with the kernel's default settings, its loopback up and without duplicate address detection.
func newNetns(name string) (*Netns, error) {
	origin, err := home()
	if err != nil {
		return nil, fmt.Errorf("own network namespace: %w", err)
	}
	n := &Netns{Name: name}
	runtime.LockOSThread()
	n.handle, err = netns.New()
	if err == nil {
		err = nstest.Reset()
	}
	if back := netns.Set(origin); back != nil {
		// The thread stays locked, so that the runtime ends it with its goroutine instead of reusing it.
		return nil, fmt.Errorf("return from new namespace %s: %w", name, back)
	}
	runtime.UnlockOSThread()
	if err != nil {
		n.Close()
		return nil, fmt.Errorf("new network namespace %s: %w", name, err)
	}
	if n.nl, err = netlink.NewHandleAt(n.handle); err != nil {
		n.Close()
		return nil, fmt.Errorf("netlink in namespace %s: %w", name, err)
	}
	if err := n.prepare(); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (n *Netns) prepare() error {
	for _, scope := range []string{"all", "default"} {
		for _, key := range []string{"accept_dad", "dad_transmits", "accept_ra", "accept_redirects"} {
			if err := n.Sysctl("net/ipv6/conf/"+scope+"/"+key, "0"); err != nil {
				return err
			}
		}
		// A node that sends a packet back out to where it came from, as it does with one for an address that nobody has, must
		// not teach the sender to go elsewhere next time.
		for _, key := range []string{"send_redirects", "accept_redirects"} {
			if err := n.Sysctl("net/ipv4/conf/"+scope+"/"+key, "0"); err != nil {
				return err
			}
		}
	}
	return n.with("lo", "up", n.nl.LinkSetUp)
}

// Close lets go of the namespace; the kernel removes it once no process runs in it.
func (n *Netns) Close() {
	if n.nl != nil {
		n.nl.Close()
		n.nl = nil
	}
	if n.handle.IsOpen() {
		_ = n.handle.Close()
	}
}

// Netlink is a netlink handle inside the namespace.
func (n *Netns) Netlink() *netlink.Handle { return n.nl }

// Do runs fn on an OS thread inside the namespace. Sockets that fn makes, and processes that it starts, stay there; fn
// must not start goroutines that make sockets.
func (n *Netns) Do(fn func() error) (err error) {
	origin, err := home()
	if err != nil {
		return fmt.Errorf("own network namespace: %w", err)
	}
	runtime.LockOSThread()
	if err := netns.Set(n.handle); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter namespace %s: %w", n.Name, err)
	}
	defer func() { // also if fn panics
		if back := netns.Set(origin); back != nil {
			err = fmt.Errorf("leave namespace %s: %w", n.Name, back) // The thread stays locked, and ends with its goroutine.
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// In returns what f makes inside the namespace.
func In[T any](n *Netns, f func() (T, error)) (out T, err error) {
	err = n.Do(func() (err error) {
		out, err = f()
		return err
	})
	return out, err
}

// Sysctl writes a kernel setting, named by its path under /proc/sys.
func (n *Netns) Sysctl(path, value string) error {
	return n.Do(func() error {
		if err := os.WriteFile(filepath.Join("/proc/sys", path), []byte(value), 0o644); err != nil {
			return fmt.Errorf("sysctl in %s: %w", n.Name, err)
		}
		return nil
	})
}

// sysctls writes settings; not those that this kernel does not have, or only for the machine as a whole.
func (n *Netns) sysctls(values map[string]string) error {
	for path, value := range values {
		if err := n.Sysctl(path, value); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// ReadSysctl reads a kernel setting, named by its path under /proc/sys.
func (n *Netns) ReadSysctl(path string) (string, error) {
	value, err := In(n, func() ([]byte, error) { return os.ReadFile(filepath.Join("/proc/sys", path)) })
	return strings.TrimSpace(string(value)), err
}

// Output runs a command inside the namespace and returns what it printed on stdout.
func (n *Netns) Output(name string, args ...string) (string, error) {
	return n.OutputWithInput("", name, args...)
}

// OutputWithInput is Output for a command that reads stdin.
func (n *Netns) OutputWithInput(stdin, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = withoutProxy(cmd)
	if err := n.Do(cmd.Start); err != nil {
		return "", fmt.Errorf("%s in %s: %w", name, n.Name, err)
	}
	if err := cmd.Wait(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s in %s: %w: %s", name, strings.Join(args, " "), n.Name, err, stderr.String())
	}
	return stdout.String(), nil
}

// withoutProxy is the environment of a command without this machine's HTTP proxies, which can't be reached from a namespace.
func withoutProxy(cmd *exec.Cmd) []string {
	return slices.DeleteFunc(cmd.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return strings.HasSuffix(strings.ToLower(name), "_proxy")
	})
}

// keeper is the thread that starts long-lived processes. A process with a parent-death signal gets it when the thread
// that started it ends, so that has to be a thread that lives as long as this process.
var keeper = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for fn := range work {
			fn()
		}
	}()
	return work
})

// Start starts a process inside the namespace that gets SIGKILL if this process dies before it.
func (n *Netns) Start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.Env = withoutProxy(cmd)
	done := make(chan error, 1)
	keeper() <- func() { done <- n.Do(cmd.Start) }
	return <-done
}
