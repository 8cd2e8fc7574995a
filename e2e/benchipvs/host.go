package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
)

// What the guest gets where the environment does not say it: memory for a control plane and two proxies, and time.
const (
	guestMemory  = "NODEPROXY_KERNEL_MEMORY=6G"
	guestSeconds = "NODEPROXY_KERNEL_TIMEOUT=3600"
)

// runInside builds what is measured, where that is faster, runs this program again on a kernel with IPVS, and returns its
// exit code.
func runInside(ctx context.Context, o options, args []string) (code int, err error) {
	dir, err := os.MkdirTemp("", "benchipvs-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	nodeproxy, err := harness.BinaryElsewhere(dir)
	if err != nil {
		return 0, err
	}
	if _, err := cluster.Binaries(); err != nil {
		return 0, err
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return 0, fmt.Errorf("find the module: %w", err)
	}
	kernel := filepath.Join(strings.TrimSpace(string(root)), "e2e", "kernel")
	if exec.Command(filepath.Join(kernel, "probe")).Run() == nil {
		fmt.Println("# on this machine's own kernel")
	} else {
		fmt.Println("# on the test kernel (e2e/kernel), which has one processor and slow system calls:")
		fmt.Println("# compare what is measured here with each other, not with what was measured elsewhere")
	}
	fmt.Printf("# this machine: %s, %d processors, kernel %s\n", processorName(), runtime.NumCPU(),
		machine.FirstLine("/proc/sys/kernel/osrelease"))
	load := machine.WatchLoad()
	cmd := exec.CommandContext(ctx, filepath.Join(kernel, "run"), append([]string{self, "-inside"}, args...)...)
	cmd.Env = append(withDefaults(os.Environ(), guestMemory, guestSeconds), "NODEPROXY_BIN="+nodeproxy)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// The kernel is to go with this process; to the system, that is the thread that starts it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	fmt.Printf("\nThe whole run took %.0f s; meanwhile, the machine's %s.\n", time.Since(o.Begun).Seconds(), load.Stop())
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() > 0 {
		return exit.ExitCode(), nil // It has said why.
	}
	return 0, err
}

// withDefaults adds settings to an environment that does not have them.
func withDefaults(env []string, settings ...string) []string {
	for _, s := range settings {
		name, _, _ := strings.Cut(s, "=")
		if os.Getenv(name) == "" {
			env = append(env, s)
		}
	}
	return env
}

// processorName is the model of the first processor, as the kernel knows it.
func processorName() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown processor"
	}
	for line := range strings.Lines(string(b)) {
		if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unnamed processor"
}
