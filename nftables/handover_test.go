package nftables

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// firstTransaction is the part of kube-proxy's first transaction that is about chains that translate (setupNFTables of kube-proxy 1.36.3),
// with a translation of its own.
const firstTransaction = `
add table ip kube-proxy { comment "rules for kube-proxy" ; }
add chain ip kube-proxy nat-prerouting
delete chain ip kube-proxy nat-prerouting
add chain ip kube-proxy nat-output
delete chain ip kube-proxy nat-output
add chain ip kube-proxy nat-postrouting
delete chain ip kube-proxy nat-postrouting
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }
flush chain ip kube-proxy nat-prerouting
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
flush chain ip kube-proxy nat-output
add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority 100 ; }
flush chain ip kube-proxy nat-postrouting
add chain ip kube-proxy services
flush chain ip kube-proxy services
add rule ip kube-proxy nat-output jump services
add set ip kube-proxy cluster-ips { type ipv4_addr ; comment "Active ClusterIPs" ; }
add rule ip kube-proxy services ip daddr 10.96.0.10 udp dport 80 dnat to 10.244.0.3:8080
`

// TestHandOver: what is handed over is in force until kube-proxy's first transaction, and no longer. A hand-over may follow another, and
// a kube-proxy.
func TestHandOver(t *testing.T) {
	nstest.Enter(t)
	world := startPods(t, 3)
	nstest.Exec(t, "ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
	goes := func() int { return world.goes(t, net.IPv4(192, 0, 2, 1)) }
	for pod := range 2 {
		p := plantest.Large(2000, 2) // large enough to take several transactions
		p.Set(world.service(pod))
		e, _ := testEngine(t, plan.IPv4)
		synced(t, e, p, plan.Everything())
		require.Equal(t, pod, goes())
		for range 2 {
			require.NoError(t, HandOver(p, plan.Families[:], Options{MasqueradeBit: 14}))
			tables, err := nft.Tables(plan.IPv4)
			require.NoError(t, err)
			require.Equal(t, []string{names.KubeProxy}, tables)
			require.Equal(t, pod, goes())
		}
		nstest.Exec(t, "sh", "-c", "nft -f - <<'END'"+firstTransaction+"END")
		require.Equal(t, 2, goes())
	}
}

// TestHandOverFails: a hand-over that the kernel refuses is an error, and leaves the tables of this program.
func TestHandOverFails(t *testing.T) {
	nstest.Enter(t)
	other, err := nft.Dial()
	require.NoError(t, err)
	owned := nft.NewBatch(plan.IPv4, names.KubeProxy)
	owned.AddOwnedTable()
	require.NoError(t, other.Commit(owned)) // Nobody else may change it.
	handOver := func() (tables []string, failed error) {
		nstest.Exec(t, "nft", "add", "table", "ip", names.NFTables)
		failed = HandOver(plantest.Large(20, 2), []plan.Family{plan.IPv4}, Options{MasqueradeBit: 14})
		tables, err := nft.Tables(plan.IPv4)
		require.NoError(t, err)
		return tables, failed
	}
	tables, failed := handOver()
	require.ErrorIs(t, failed, unix.EPERM)
	require.Contains(t, tables, names.NFTables)
	require.NoError(t, other.Close()) // Its table goes with it.
	tables, failed = handOver()
	require.NoError(t, failed)
	require.Equal(t, []string{names.KubeProxy}, tables)
}

// TestHandOverOfAll: the kernel takes whatever may be handed over.
func TestHandOverOfAll(t *testing.T) {
	nstest.Enter(t)
	rapid.Check(t, func(rt *rapid.T) {
		nstest.Inside(t)
		require.NoError(rt, HandOver(drawCluster(rt).Plan, plan.Families[:], drawOptions(rt)))
	})
}

// BenchmarkHandOver is how much later the program ends with a hand-over.
func BenchmarkHandOver(b *testing.B) {
	for _, size := range sizes {
		p := plantest.Large(size.services, size.endpoints)
		b.Run(fmt.Sprintf("%dx%d", size.services, size.endpoints), func(b *testing.B) {
			nstest.Enter(b)
			for b.Loop() {
				require.NoError(b, HandOver(p, []plan.Family{plan.IPv4}, Options{MasqueradeBit: 14}))
			}
		})
	}
}
