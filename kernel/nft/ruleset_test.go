package nft

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// TestDevices: chains at hooks of devices are told, beside those at hooks of IP.
func TestDevices(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	nstest.Exec(t, "nft", `add table netdev guard; add chain netdev guard in { type filter hook ingress device lo priority 0; }; add chain netdev guard more; `+
		`add table inet both; add chain inet both in { type filter hook ingress device lo priority 0; }; add chain inet both input { type filter hook input priority 0; }`)
	r, err := ReadRuleset()
	require.NoError(t, err)
	defer r.Close()
	slices.SortFunc(r.Devices, func(a, b ChainID) int { return len(a.Family) - len(b.Family) })
	if want := []ChainID{{"inet", "both", "in"}, {"netdev", "guard", "in"}}; !slices.Equal(r.Devices, want) {
		t.Errorf("got %v, want %v", r.Devices, want)
	}
	var got []string
	for _, b := range r.Bases() {
		got = append(got, fmt.Sprint(b.Family, " ", b.Hook, " ", b.Devices))
	}
	slices.Sort(got)
	if want := []string{"inet ingress [lo]", "inet input []", "netdev ingress [lo]"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
