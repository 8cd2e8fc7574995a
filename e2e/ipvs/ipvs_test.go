// Package ipvs runs the tests of package e2e in mode ipvs, on a kernel that has IPVS, wherever they are started:
//
//	go test -v -run 'TestSourceRanges|TestIPVS' ./e2e/ipvs
package ipvs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"nodeproxy/e2e/harness"
)

// TestMain has no tests of its own to run: what runs is the test program of package e2e, with the same flags.
func TestMain(*testing.M) {
	err := run()
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() > 0 {
		os.Exit(exit.ExitCode()) // The tests have said why.
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e/ipvs:", err)
		os.Exit(1)
	}
}

// run builds the programs here, where that is faster, and runs the tests on the other kernel.
func run() error {
	// What ends this reaches the tests as well. This ends after them.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt, syscall.SIGTERM)
	// Not a name that package harness clears away: on the other kernel, nobody is seen to use it.
	dir, err := os.MkdirTemp("", "nodeproxy-ipvs-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	tests, nodeproxy := filepath.Join(dir, "e2e.test"), os.Getenv("NODEPROXY_BIN")
	if err := tool("test", "-c", "-o", tests, "nodeproxy/e2e"); err != nil {
		return err
	}
	if nodeproxy == "" {
		nodeproxy = filepath.Join(dir, "nodeproxy")
		if err := tool("build", "-o", nodeproxy, "nodeproxy/cmd/nodeproxy"); err != nil {
			return err
		}
	}
	shares, err := divide(tests, guests())
	if err != nil {
		return err
	}
	errs := make([]error, len(shares))
	var running sync.WaitGroup
	outputs := make([]bytes.Buffer, len(shares))
	for i, pattern := range shares {
		cmd, err := onKernel(tests, nodeproxy, pattern)
		if err != nil {
			return err
		}
		if i == 0 {
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		} else { // Mixed, the output could not be read.
			cmd.Stdout, cmd.Stderr = &outputs[i], &outputs[i]
		}
		running.Go(func() {
			// The kernel is to go with this process, which to the system is the thread that starts it.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			errs[i] = cmd.Run()
		})
	}
	running.Wait()
	for i := range outputs {
		_, _ = os.Stdout.Write(outputs[i].Bytes())
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// guests is how many kernels run the tests: each has one processor, and all of them together take twice as long as those of mode
// iptables, which another process runs beside this one.
func guests() int { return min(runtime.NumCPU(), 2) }

// divide returns patterns of the names of tests, one for each of n kernels, that together select what -test.run selects. A pattern for
// subtests, and few tests, are left whole.
func divide(tests string, n int) ([]string, error) {
	pattern := option("run")
	listing := exec.Command(tests, "-test.list", cmp.Or(pattern, "."))
	listing.Env, listing.Dir = append(os.Environ(), inModeIPVS), ".."
	list, err := listing.Output()
	if err != nil {
		return nil, fmt.Errorf("listing the tests: %w", err)
	}
	names := slices.DeleteFunc(strings.Fields(string(list)), func(name string) bool { return !strings.HasPrefix(name, "Test") })
	if len(names) < 2*n || strings.Contains(pattern, "/") || option("list") != "" {
		return []string{pattern}, nil
	}
	shares := make([][]string, n)
	for i, name := range names {
		shares[i%n] = append(shares[i%n], name)
	}
	var patterns []string
	for _, share := range shares {
		patterns = append(patterns, "^("+strings.Join(share, "|")+")$")
	}
	return patterns, nil
}

// inModeIPVS is what tests of package e2e have in their environment that run in mode ipvs.
const inModeIPVS = harness.ModeVariable + "=" + string(harness.IPVS)

// option is the value of an option of go test, which passes each of them on in one word. The others are those of package e2e.
func option(name string) string {
	for _, arg := range slices.Backward(os.Args[1:]) {
		if value, ok := strings.CutPrefix(arg, "-test."+name+"="); ok {
			return value
		}
	}
	return ""
}

// onKernel is the command that runs those tests that match a pattern on the other kernel.
func onKernel(tests, nodeproxy, pattern string) (*exec.Cmd, error) {
	kernel, err := filepath.Abs("../kernel/run")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(kernel, append([]string{tests}, os.Args[1:]...)...)
	cmd.Args = append(cmd.Args, "-test.run="+pattern)
	cmd.Dir = ".." // where go test runs the tests of package e2e
	cmd.Env = append(os.Environ(), inModeIPVS, "NODEPROXY_BIN="+nodeproxy)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	return cmd, nil
}

// tool runs the go command.
func tool(args ...string) error {
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s: %w", args[0], err)
	}
	return nil
}
