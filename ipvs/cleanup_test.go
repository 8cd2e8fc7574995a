package ipvs

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
)

type readyServers struct {
	ipvstest.Servers
	ipvstest.Ready
	until time.Time // when all connections end
}

func (s readyServers) Each(f plan.Family, each func(*ipvs.ActualServer)) error {
	if !time.Now().Before(s.until) {
		clear(s.Servers.Connections)
	}
	return s.Servers.Each(f, each)
}

// TestCleaner: what mode ipvs has left takes no new connections while it waits for those that are open. Then the addresses of Services stop being
// the node's own before their virtual servers go, as packets to them would get to programs of the node; and as long as anything is left, there
// are sets to tell.
func TestCleaner(t *testing.T) {
	const grace = time.Minute
	steps := []string{"update real server", "remove device", "delete server", "destroy"}
	for name, c := range map[string]struct {
		connections time.Duration // how long there are some
		want        time.Duration
		fail        string
		steps       []string
	}{
		"none open":       {0, 0, "", steps},
		"some open":       {20 * time.Second, 20 * time.Second, "", steps},
		"open for longer": {time.Hour, grace, "", steps},
		"a server stays":  {0, 0, "delete server", steps[:3]},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := ipvstest.New(plan.IPv4)
				to := netip.MustParseAddrPort("10.244.1.1:8080")
				id := ipvs.ServerID{Family: plan.IPv4, Protocol: plan.TCP, Addr: netip.MustParseAddr("10.96.0.1"), Port: 80}
				k.Virtual[id] = &ipvs.ActualServer{Server: ipvs.Server{ID: id, Scheduler: "rr"},
					RealServers: map[netip.AddrPort]ipvs.ActualRealServer{to: {RealServer: ipvs.RealServer{Addr: to, Weight: 1}}}}
				k.Set["KUBE-CLUSTER-IP"] = map[ipset.Entry]ipset.Entry{}
				k.Connections[to], k.Fail = 1, c.fail
				begin := time.Now()
				err := (&Cleaner{GracePeriod: grace, MasqueradeBit: 14, Log: slog.New(slog.DiscardHandler), Node: &Node{
					Servers: readyServers{Servers: ipvstest.Servers{Kernel: k}, until: begin.Add(c.connections)}, Sets: ipvstest.Sets{Kernel: k},
					Remove: func() error { return k.Call("remove device") },
				}}).Run(context.Background())
				require.Equal(t, c.fail != "", err != nil, "%v", err)
				if took := time.Since(begin); took < c.want || took > c.want+2*drainInterval {
					t.Errorf("it took %v, want %v", took, c.want)
				}
				var taken []string
				for _, call := range k.Calls {
					i := slices.IndexFunc(steps, func(s string) bool { return strings.HasPrefix(call, s) })
					if i >= 0 && !slices.Contains(taken, steps[i]) {
						taken = append(taken, steps[i])
					}
				}
				require.Equal(t, c.steps, taken, "%q", k.Calls)
				require.Equal(t, c.fail == "", k.Empty(func(ipvs.ServerID) bool { return false }))
			})
		})
	}
}
