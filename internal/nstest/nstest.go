// Package nstest runs tests in network namespaces of their own, with the kernel's default settings whatever those of the machine are.
// They need root.
package nstest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Enter moves the calling test or benchmark to a new network namespace, whose loopback is up. The namespace has no name and goes
// with the test. Programs that the test starts, and sockets that it makes, are in it; those of goroutines that it starts are not.
func Enter(t testing.TB) {
	t.Helper()
	NeedKernel(t)
	if err := enter(); err != nil {
		t.Fatal(err)
	}
}

// Run runs f like a test that enters a namespace, on a thread of its own. f must not end the test.
func Run(t testing.TB, f func()) {
	t.Helper()
	NeedKernel(t)
	done := make(chan error, 1)
	go func() {
		defer close(done)
		if err := enter(); err != nil {
			done <- err
			return
		}
		f()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// outside is the namespace in which the tests began, which may be the machine's. Processes that tests start in namespaces know it too.
var outside = func() string {
	const variable = "NODEPROXY_TEST_OUTSIDE"
	if os.Getenv(variable) == "" {
		now, _ := os.Readlink(ownNamespace)
		_ = os.Setenv(variable, now)
	}
	return os.Getenv(variable)
}()

const ownNamespace = "/proc/thread-self/ns/net"

// Inside fails the test if the calling thread has not entered a namespace. That of a subtest or a sub-benchmark has not, though its parent has:
// each has a thread of its own.
func Inside(t interface {
	Helper()
	Fatalf(format string, args ...any)
}) {
	t.Helper()
	if now, err := os.Readlink(ownNamespace); err != nil || now == outside {
		t.Fatalf("this thread is in the namespace in which the tests began, and not in one of its own: %v", err)
	}
}

// Process runs the calling test once more, in a process of its own with a network namespace of its own, whose loopback is up:
// for tests with goroutines that are to be in it too. It returns false to the caller in the first process, whose test is over
// then, and true in the second. The test is parallel to others by that.
func Process(t *testing.T) bool {
	t.Helper()
	const inside = "NODEPROXY_TEST_IN_NAMESPACE"
	if os.Getenv(inside) != "" {
		if err := prepare(); err != nil {
			t.Fatal(err)
		}
		return true
	}
	t.Parallel()
	NeedKernel(t)
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=4m", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=yes")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	cmd.WaitDelay = time.Minute // for what it may have started
	EndWith(t, cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in a network namespace (this needs root): %v\n%s", err, out)
	}
	return false
}

// EndWith has the kernel kill the process that cmd starts if the test program dies before it. The kernel does so when the thread that
// started the process ends, which the thread of a test that enters a namespace does: the calling test keeps its thread until it ends.
func EndWith(t testing.TB, cmd *exec.Cmd) {
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
}

// Elsewhere starts a process that waits in a network namespace of its own until the test ends, and returns its number.
func Elsewhere(t testing.TB) (pid int) {
	t.Helper()
	cmd := exec.Command("sleep", "infinity")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	EndWith(t, cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd.Process.Pid
}

// Output is what the program that cmd starts prints. A read of it fails two minutes from now: a program that does not print what a test
// waits for must not keep all tests waiting.
func Output(t testing.TB, cmd *exec.Cmd) io.Reader {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = out.(*os.File).SetReadDeadline(time.Now().Add(2 * time.Minute))
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Script writes a program of the shell. The kernel does not start a file that anyone has open for writing, and a process that another
// test is just starting would have it open too: none starts meanwhile.
func Script(t testing.TB, path, text string) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// Close closes a listener, whose address is free then: a process that another test is just starting would have it, too, until its program runs. None
// starts meanwhile.
func Close(l io.Closer) error {
	_, _ = os.FindProcess(os.Getpid()) // The first use of processes starts one without the lock, to try what the kernel can do.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return l.Close()
}

// LeftVariable is the environment variable with the network namespace that Isolate has left, as /proc/self/ns/net names it.
const LeftVariable = "NODEPROXY_TEST_LEFT"

// Isolate moves the test program to a network namespace of its own, whose loopback is up, with all its goroutines and the programs that it
// starts: call it first in TestMain, where tests run the program itself, so that it can't change the machine's rules by mistake. A user
// without the right to make a namespace can't change rules either, and stays.
func Isolate() {
	if os.Getenv(LeftVariable) != "" {
		return
	}
	left, err := os.Readlink("/proc/thread-self/ns/net")
	if err == nil {
		err = enter()
	}
	if errors.Is(err, syscall.EPERM) && os.Geteuid() != 0 {
		return
	}
	if err == nil { // The new program has this thread only, and so its namespace.
		err = syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), LeftVariable+"="+left))
	}
	fmt.Fprintln(os.Stderr, "no network namespace for tests:", err)
	os.Exit(1)
}

func enter() error {
	// Never unlocked: the thread ends with the goroutine, and the namespace with the thread.
	runtime.LockOSThread()
	ns, err := netns.New()
	if err != nil {
		return fmt.Errorf("making a network namespace (these tests need root): %w", err)
	}
	ns.Close()
	return prepare()
}

// prepare resets the settings of a new namespace and raises its loopback.
func prepare() error {
	if err := Reset(); err != nil {
		return err
	}
	return raiseLoopback()
}

func raiseLoopback() error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("loopback of a network namespace: %w", err)
	}
	return nil
}
