// Package ipvs runs the tests of package e2e in mode ipvs, on a kernel that has IPVS, wherever they are started:
//
//	go test -v -run 'TestSourceRanges|TestIPVS' ./e2e/ipvs
package ipvs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
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
	// An interrupt reaches the tests as well. This ends after them.
	signal.Notify(make(chan os.Signal, 1), os.Interrupt)
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
	kernel, err := filepath.Abs("../kernel/run")
	if err != nil {
		return err
	}
	cmd := exec.Command(kernel, append([]string{tests}, os.Args[1:]...)...)
	cmd.Dir = ".." // where go test runs the tests of package e2e
	cmd.Env = append(os.Environ(), harness.ModeVariable+"="+string(harness.IPVS), "NODEPROXY_BIN="+nodeproxy)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// The other kernel is to go with this process, which to the system is the thread that starts it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
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
