package nstest

import (
	"os"
	"testing"
)

// UnitVariable is the environment variable that leaves out every test that needs the kernel. "make unit" sets it, so that it needs
// neither root nor a kernel with anything in it; "make integration" and "make test-all" run the same tests without it, "make test" those
// of them that are in its tier.
//
// It is one variable, read here alone, because nearly every test of this kind asks this package for a network namespace and
// because the rest of its file, and often of its table, needs none: build tags would split those files, and -short, which
// shortens property tests, is wanted by people who are root as well.
const UnitVariable = "NODEPROXY_UNIT"

// NeedKernel skips the calling test if only tests without the kernel are to run. Enter, Run and Process call it; a test that
// needs root or the kernel in another way calls it itself.
func NeedKernel(t testing.TB) {
	t.Helper()
	if UnitOnly() {
		t.Skip("needs root and the kernel: see make integration")
	}
}

// UnitOnly reports whether only tests without the kernel are to run.
func UnitOnly() bool { return os.Getenv(UnitVariable) != "" }
