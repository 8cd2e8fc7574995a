package inkernel

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

func TestKernelHasIPVS(t *testing.T) {
	if os.Getenv(variable) == "" {
		t.Error("this is not the copy that was started on the test kernel")
	}
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		t.Error(err)
	}
}

// failVariable makes TestFailure fail.
const failVariable = "NODEPROXY_INKERNEL_FAIL"

func TestFailure(t *testing.T) {
	if os.Getenv(failVariable) != "" {
		t.Error("on purpose")
	}
}

// TestStatus holds that a failure comes through. This binary, without the variable, looks for a kernel again; it finds the one
// that it runs on.
func TestStatus(t *testing.T) {
	nowhere, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer nowhere.Close()
	args, stdout := os.Args, os.Stdout
	defer func() { os.Args, os.Stdout = args, stdout }()
	os.Stdout = nowhere
	os.Args = []string{args[0], "-test.run=^TestFailure$"}
	t.Setenv(variable, "")
	for fail, want := range map[string]int{"": 0, "yes": 1} {
		t.Setenv(failVariable, fail)
		if got := Run(func() int { return 99 }); got != want {
			t.Errorf("status %d, want %d", got, want)
		}
	}
}

func TestModuleRoot(t *testing.T) {
	root, err := ModuleRoot()
	require.NoError(t, err)
	for _, file := range []string{"go.mod", "e2e/kernel/run"} {
		if _, err := os.Stat(filepath.Join(root, file)); err != nil {
			t.Error(err)
		}
	}
	t.Chdir("/")
	if root, err := ModuleRoot(); err == nil {
		t.Errorf("/ is in a module, at %s", root)
	}
	if dirs := writable(); slices.Contains(dirs, "/") {
		t.Errorf("writable without need: %v", dirs)
	}
}
