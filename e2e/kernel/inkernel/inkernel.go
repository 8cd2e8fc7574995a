// Package inkernel runs a package's tests on a kernel with IPVS, wherever they are started.
package inkernel

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"nodeproxy/internal/nstest"
)

// variable is set for the copy of a test binary that runs on the test kernel. It runs the tests whatever it finds there.
const variable = "NODEPROXY_INKERNEL"

// Main runs a package's tests on a kernel with IPVS: it starts the test binary a second time, with the same arguments, by
// e2e/kernel/run. If only tests without the kernel are to run, it runs them right here, and nstest skips the others. A
// TestMain ends with os.Exit(inkernel.Main(m)).
func Main(m *testing.M) int { return Run(m.Run) }

// Run is Main for a package that does more than to run its tests.
func Run(tests func() int) int {
	if os.Getenv(variable) != "" || nstest.UnitOnly() || fuzzes() {
		return tests()
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), variable+"=1")
	if dirs := writable(); len(dirs) > 0 {
		cmd.Env = append(cmd.Env, "NODEPROXY_KERNEL_WRITABLE="+strings.Join(dirs, ":"))
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := Exec(cmd); err != nil {
		if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() > 0 {
			return exit.ExitCode()
		}
		fmt.Fprintln(os.Stderr, "inkernel:", err)
		return 1
	}
	return 0
}

// Exec runs a command on a kernel with IPVS, by e2e/kernel/run. The kernel goes with this process, also if go test ends it for taking too
// long. To the system, "this process" is the thread that starts the other.
func Exec(cmd *exec.Cmd) error {
	root, err := ModuleRoot()
	if err != nil {
		return err
	}
	cmd.Path = filepath.Join(root, "e2e", "kernel", "run")
	cmd.Args = append([]string{cmd.Path}, cmd.Args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// fuzzes reports whether go test looks for new inputs of a fuzz target. No such target needs the kernel, and what is found has to be
// kept, in directories that the test kernel can't write.
func fuzzes() bool {
	flag.Parse()
	fuzz := flag.Lookup("test.fuzz")
	return fuzz != nil && fuzz.Value.String() != ""
}

// writable are the directories to which the flags of go test have profiles written, which are to outlive the kernel.
func writable() []string {
	flag.Parse()
	value := func(name string) string {
		if f := flag.Lookup(name); f != nil {
			return f.Value.String()
		}
		return ""
	}
	var dirs []string
	if dir := value("test.gocoverdir"); dir != "" {
		dirs = append(dirs, dir)
	}
	for _, name := range []string{"coverprofile", "cpuprofile", "memprofile", "blockprofile", "mutexprofile", "trace"} {
		if file := value("test." + name); filepath.IsAbs(file) {
			dirs = append(dirs, filepath.Dir(file))
		} else if file != "" {
			dirs = append(dirs, filepath.Join(value("test.outputdir"), filepath.Dir(file)))
		}
	}
	return dirs
}

// ModuleRoot is the root of the module of the working directory, which go test makes that of the package.
func ModuleRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("neither %s nor a directory above it has a go.mod", start)
		}
	}
}
