package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/kernel/inkernel"
	"nodeproxy/e2e/machine"
)

// The parts of scenario ipvs: nodeproxy beside kube-proxy, and routes beside addresses.
const (
	partProxies = "proxies"
	partVIPs    = "vips"
)

// runOnIPVS measures mode ipvs on a kernel with IPVS: this machine's, or else the test kernel of e2e/kernel, where it starts this program
// again when all is built, and watches meanwhile what else this machine has to do.
func runOnIPVS(ctx context.Context, o *options) (missed int) {
	if !o.inside {
		return runInside(ctx, o)
	}
	if slices.Contains(o.parts, partProxies) {
		missed = ipvsComparison.run(ctx, o)
	}
	if slices.Contains(o.parts, partVIPs) {
		compareVIPs(ctx, o)
	}
	return missed
}

// allowMappings lets this machine's processes have more mappings until the function that it returns is called, or this process is
// interrupted. Each page of a process of the test kernel may be one, and most machines allow 65,530: 256 MiB, but an API server with 10,000
// Services has more, and then the test kernel ends it.
func allowMappings(file string) (restore func() error) {
	const needed = 1 << 20
	was := strings.TrimSpace(string(must(os.ReadFile(file))))
	if must(strconv.Atoi(was)) >= needed {
		return func() error { return nil }
	}
	restore = harness.AtEnd(func() error { return os.WriteFile(file, []byte(was), 0o644) })
	check(os.WriteFile(file, []byte(strconv.Itoa(needed)), 0o644))
	return restore
}

// guestTimeout is in how many seconds a run must be over: an hour, and longer for two proxies whose changes at a pace take more than a
// minute.
func (o *options) guestTimeout() string {
	paces := 1 // the steps of such changes
	for _, d := range disturbances {
		if o.disturbs(d.name) {
			paces++
		}
	}
	longer := 2 * time.Duration(paces) * max(0, o.rateDuration-time.Minute)
	return strconv.Itoa(int((time.Hour + longer).Seconds()))
}

func runInside(ctx context.Context, o *options) (missed int) {
	dir := must(os.MkdirTemp("", "bench-"))
	remove := harness.AtEnd(func() error { return os.RemoveAll(dir) })
	defer func() { check(remove()) }()
	nodeproxy := must(harness.BinaryElsewhere(dir))
	must(cluster.Binaries())
	self := must(os.Executable())
	if exec.Command(filepath.Join(must(harness.ProjectDir()), "e2e/kernel/probe")).Run() == nil {
		fmt.Println("# on this machine's own kernel")
	} else {
		fmt.Println("# on the test kernel (e2e/kernel), which has one processor and slow system calls:")
		fmt.Println("# compare what is measured here with each other, not with what was measured elsewhere")
	}
	fmt.Printf("# this machine: %s, %d processors, kernel %s\n", machine.Processor(), runtime.NumCPU(), machine.Kernel())
	restore := allowMappings("/proc/sys/vm/max_map_count")
	defer func() { check(restore()) }()
	load := machine.WatchLoad()
	cmd := exec.CommandContext(ctx, self, append(o.args, "-inside")...)
	cmd.Env = append(os.Environ(), "NODEPROXY_BIN="+nodeproxy)
	// What the guest gets where the environment does not say it: memory for a control plane and two proxies, and time.
	for name, value := range map[string]string{"NODEPROXY_KERNEL_MEMORY": "6G", "NODEPROXY_KERNEL_TIMEOUT": o.guestTimeout()} {
		if os.Getenv(name) == "" {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err := inkernel.Exec(cmd)
	fmt.Printf("\nMeanwhile, the machine's %s.\n", load())
	if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 1 {
		return 1
	}
	check(err)
	return 0
}
