package main

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDemoDeps: "make demo" installs what the demo needs in its mode, and nothing that only tests need.
func TestDemoDeps(t *testing.T) {
	t.Parallel()
	for mode, want := range map[string]string{
		"iptables": "ca-certificates iproute2 iptables",
		"nftables": "ca-certificates iproute2 nftables",
		"ipvs":     "ca-certificates iproute2 ipset iptables ipvsadm kmod",
	} {
		plan, err := exec.Command("make", "--dry-run", "--directory=../..", "demo", "MODE="+mode).CombinedOutput()
		if err != nil {
			t.Fatalf("make --dry-run: %v\n%s", err, plan)
		}
		var calls []string
		for line := range strings.Lines(string(plan)) {
			if strings.Contains(line, "install-deps") {
				calls = append(calls, strings.TrimSpace(line))
			}
		}
		if call := "hack/install-deps demo " + mode; !slices.Equal(calls, []string{call}) {
			t.Errorf("make demo MODE=%s runs %q, want %q alone", mode, calls, call)
		}
		cmd := exec.Command("../../hack/install-deps", "demo", mode)
		cmd.Env = append(os.Environ(), "LIST=1")
		out, err := cmd.Output()
		require.NoError(t, err)
		got := strings.Fields(string(out))
		slices.Sort(got)
		if strings.Join(got, " ") != want {
			t.Errorf("the demo in mode %s needs %q, want %s", mode, got, want)
		}
	}
}
