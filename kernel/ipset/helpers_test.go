package ipset

import (
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"nodeproxy/e2e/kernel/inkernel"
)

func TestMain(m *testing.M) { os.Exit(inkernel.Main(m)) }

// run runs a program in the test's namespace.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
