package harness

import (
	"bytes"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"nodeproxy/e2e/kernel/inkernel"
)

// InGuest reports whether this is the test kernel, whose clock is its own and whose system calls are slow. See e2e/kernel.
func InGuest() bool {
	line, err := os.ReadFile("/proc/cmdline")
	return err == nil && bytes.Contains(line, []byte("nodeproxy.shared="))
}

// RunElsewhere runs the test t alone in the test kernel, and returns its output. It fails the test if that fails. The environment is this
// process's and what is given.
func RunElsewhere(t *testing.T, environment ...string) string {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("there is no test kernel for this processor")
	}
	path, err := BinaryElsewhere(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$", "-test.timeout=10m")
	cmd.Env = append(append(os.Environ(), "NODEPROXY_BIN="+path), environment...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := inkernel.Exec(cmd); err != nil || !strings.Contains(stdout.String(), "--- PASS: "+t.Name()) {
		t.Fatalf("on the test kernel: %v\n%s%s", err, stdout.String(), stderr.String())
	}
	return stdout.String()
}
