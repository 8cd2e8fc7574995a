package drifttest

import (
	"testing"

	"nodeproxy/ipvs"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// TestDiff: the kernel as a Backend leaves it does not differ from the plan, and what others change is shown by exactly those lines.
func TestDiff(t *testing.T) {
	t.Parallel()
	unwatched(t, xtables.NFT, services, ipvs.Options{}, func(l *lab) {
		diff := func() []drift.Hunk {
			t.Helper()
			var out []drift.Hunk
			for _, f := range plan.Families {
				cfg := ipvs.Config{Options: ipvs.Options{MasqueradeBit: 14}}
				have, o, err := ipvs.Read(cfg, f, false)
				if err != nil {
					t.Error(err)
					return nil
				}
				cfg.Options = o
				want, err := ipvs.Planned(l.plan, f, cfg)
				if err != nil {
					t.Error(err)
					return nil
				}
				out = append(out, ipvs.Diff(f, have, want)...)
			}
			return out
		}
		if hunks := diff(); len(hunks) > 0 {
			t.Errorf("as it was programmed: %q", hunks)
		}
		for _, tc := range []struct {
			do, object, line string
			service          bool
		}{
			{"ipvsadm -d -t 10.96.0.11:80 -r 10.244.0.2:8080", "-t 10.96.0.11:80", "-a -t 10.96.0.11:80 -r 10.244.0.2:8080 -m -w 1", true},
			{"ipvsadm -A -t 10.97.0.1:80 -s rr", "-t 10.97.0.1:80", "-A -t 10.97.0.1:80 -s rr", false},
			{"ipset del KUBE-CLUSTER-IP 10.96.0.12,tcp:80", "KUBE-CLUSTER-IP", "add KUBE-CLUSTER-IP 10.96.0.12,tcp:80", true},
			{"ip route del local 10.96.0.0/12 dev kube-ipvs0 table local", "kube-ipvs0", "route local 10.96.0.0/12 dev kube-ipvs0 table local", false},
			{"ip link set kube-ipvs0 down && ip link set kube-ipvs0 up && ip addr add 192.0.2.1/32 dev kube-ipvs0", "kube-ipvs0",
				"address 192.0.2.1/32 dev kube-ipvs0", false},
			{"nft delete table ip nodeproxy-ipvs-marks", "nodeproxy-ipvs-marks", "table ip nodeproxy-ipvs-marks", false},
			{"echo 0 > /proc/sys/net/ipv4/vs/expire_nodest_conn", "net.ipv4.vs.expire_nodest_conn", "net.ipv4.vs.expire_nodest_conn = 1", false},
		} {
			l.do(tc.do)
			found := false
			for _, h := range diff() {
				h.Differing(func(line string) {
					if h.Object == tc.object && line == tc.line && len(h.Services) > 0 == tc.service {
						found = true
					}
				})
			}
			if !found {
				t.Errorf("after %q, this differs: %q", tc.do, diff())
			}
			l.sync()
			if left := diff(); len(left) > 0 {
				t.Errorf("after %q and a sync, this differs: %q", tc.do, left)
			}
		}
	})
}
