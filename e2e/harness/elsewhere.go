package harness

import (
	"bytes"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// InGuest reports whether this is the test kernel, whose clock is its own and whose system calls are slow. See e2e/kernel.
func InGuest() bool {
	line, err := os.ReadFile("/proc/cmdline")
	return err == nil && bytes.Contains(line, []byte("nodeproxy.shared="))
}

// RunElsewhere runs the test t alone, with run, the path of e2e/kernel/run, and returns its output. It fails the test if that fails.
// The environment is this process's and what is given.
func RunElsewhere(t *testing.T, run string, environment ...string) string {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("there is no test kernel for this processor")
	}
	path, err := BinaryElsewhere(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(run, os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$", "-test.timeout=10m")
	cmd.Env = append(append(os.Environ(), "NODEPROXY_BIN="+path), environment...)
	// The test kernel is to go with this process, which to the system is the thread that starts it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("on the test kernel: %v\n%s%s", err, out, stderr.String())
	}
	return string(out)
}
