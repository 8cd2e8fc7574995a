package nstest

import (
	"os/exec"
	"strings"
	"testing"
)

// Exec runs a program in the namespace of the calling thread, and returns what it prints. The test fails if the program does.
func Exec(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}
