package main

import (
	"path/filepath"
	"strings"
	"testing"

	"nodeproxy/internal/nstest"
)

// TestInitOnly: kernel settings are made as configured, what guards against their misuse before, and nothing else.
func TestInitOnly(t *testing.T) {
	t.Parallel()
	const localnet, udp = "net/ipv4/conf/all/route_localnet", "net/netfilter/nf_conntrack_udp_timeout"
	for _, tc := range []struct {
		name, flags, localnet, udp, says string
		guarded                          bool
	}{
		{"defaults", "", "1", "", "", true},
		{"conntrack", "--conntrack-udp-timeout=77s", "1", "77", "", true},
		{"no localhost", "--iptables-localhost-nodeports=false", "0", "", "", false},
		{"not reachable", "--nodeport-addresses=10.0.0.0/8", "0", "", "", false},
		{"no /proc", "--sysctl-dir=/nonexistent --conntrack-udp-timeout=77s", "0", "", "node ports will not answer on localhost", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			usual := setting(t, udp)
			for range 2 {
				args := append([]string{"run", "--init-only", "--conntrack-max-per-core=0", "--iptables-backend=nft"}, strings.Fields(tc.flags)...)
				if out := command(t, "", "nodeproxy", args...); !strings.Contains(out, tc.says) {
					t.Errorf("it does not say %q:\n%s", tc.says, out)
				}
			}
			if got := setting(t, localnet); got != tc.localnet {
				t.Errorf("%s is %s, want %s", localnet, got, tc.localnet)
			}
			if tc.udp == "" {
				tc.udp = usual
			}
			if got := setting(t, udp); got != tc.udp {
				t.Errorf("%s is %s, want %s", udp, got, tc.udp)
			}
			want := "-P INPUT ACCEPT\n-P FORWARD ACCEPT\n-P OUTPUT ACCEPT\n"
			if tc.guarded {
				want += "-N KUBE-FIREWALL\n-A INPUT -j KUBE-FIREWALL\n-A OUTPUT -j KUBE-FIREWALL\n-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 " +
					`-m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP` + "\n"
			}
			if got := command(t, "", "iptables-nft", "-S"); got != want {
				t.Errorf("rules\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func setting(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(readFile(t, filepath.Join("/proc/sys", name)))
}
