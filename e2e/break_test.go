package e2e

import (
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// What tests do to what the daemon keeps in the kernel, in the mode under test.

// strayRule is a rule of another program in a chain of ours, without effect on any packet, as held has it.
func strayRule() string {
	if mode == harness.NFTables {
		return `comment "stray"`
	}
	return "-A KUBE-MARK-MASQ -j RETURN"
}

// addStrayRule adds strayRule to what node1 has, in both families.
func addStrayRule(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	if mode == harness.NFTables {
		for _, family := range []string{"ip", "ip6"} {
			output(t, w, "nft add rule "+family+" nodeproxy postrouting counter "+strayRule())
		}
		return
	}
	rule(t, w, variant, "-t nat "+strayRule())
}

// ruleDrift is the kind, in metrics, of what emptyDispatch does.
var ruleDrift = map[harness.Mode]string{harness.IPTables: "rule", harness.IPVS: "rule", harness.NFTables: "chain"}[mode]

// emptyDispatch empties the chain that leads to Services, in both families.
func emptyDispatch(t *testing.T, w *harness.World, variant harness.Variant) {
	t.Helper()
	if mode == harness.NFTables {
		for _, family := range []string{"ip", "ip6"} {
			output(t, w, "nft flush chain "+family+" nodeproxy to-services")
		}
		return
	}
	rule(t, w, variant, "-t nat -F KUBE-SERVICES")
}

// refuseTables makes the kernel refuse what is written to the tables of mode nftables, or accept it again: as long as the tables belong
// to another process (flags owner), nobody else may change them. They are made anew for that, and go with the process.
func refuseTables(t *testing.T, w *harness.World) (refuse func(bool)) {
	t.Helper()
	var owner *exec.Cmd
	var in io.WriteCloser
	release := func() {
		if owner != nil {
			_ = in.Close() // It ends.
			_ = owner.Wait()
			owner = nil
		}
	}
	t.Cleanup(release)
	return func(yes bool) {
		t.Helper()
		release()
		if !yes {
			return
		}
		owner = exec.Command("nft", "--interactive")
		var err error
		if in, err = owner.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		require.NoError(t, w.Node1().Start(owner))
		var line strings.Builder
		for _, family := range []string{"ip", "ip6"} {
			const table = "%[1]s table %[2]s nodeproxy; "
			fmt.Fprintf(&line, table, "add", family)
			fmt.Fprintf(&line, table, "delete", family)
			fmt.Fprintf(&line, "add table %s nodeproxy { flags owner; }; ", family)
		}
		if _, err := fmt.Fprintln(in, line.String()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the tables belong to another process", func() error {
			out, err := w.Node1().Output("nft", "list", "table", "ip6", "nodeproxy")
			if err == nil && !strings.Contains(out, "flags owner") {
				err = fmt.Errorf("there is %s", out)
			}
			return err
		})
	}
}
