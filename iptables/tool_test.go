package iptables

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"nodeproxy/proxier/plan"
	"nodeproxy/proxier/plan/plantest"
)

// sh runs a shell command in the namespace of this thread.
func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
}

// TestRestoreErrorShowsTheLine: what the programs of either variant refuse is shown with the lines around it.
func TestRestoreErrorShowsTheLine(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			inNamespace(t, func() {
				e := realEngine(t, v, plan.IPv4)
				err := e.tool.restore("*nat\n:KUBE-A - [0:0]\n-A KUBE-A -j RETURN\n-A KUBE-A -j KUBE-MISSING\nCOMMIT\n")
				if err == nil {
					t.Fatal("a jump to a chain that does not exist was accepted")
				}
				// The nft variant looks chains up at the end, and blames COMMIT for what it does not find.
				if !strings.Contains(err.Error(), " 4: -A KUBE-A -j KUBE-MISSING") || !strings.Contains(err.Error(), "\n> ") {
					t.Errorf("the error does not show the line: %v", err)
				}
				if strings.Contains(ours(t, e.tool), "KUBE-A") {
					t.Error("half of it was applied")
				}
			})
		})
	}
}

// TestDetect: which variant is in use already.
func TestDetect(t *testing.T) {
	for _, c := range []struct {
		name, setUp string
		want        Variant
	}{
		{"nothing there", "true", NFT},
		{"the kubelet's hint in nft", "iptables-nft -t mangle -N KUBE-IPTABLES-HINT; iptables-legacy -A INPUT -j ACCEPT", NFT},
		{"the kubelet's hint in legacy", "iptables-legacy -t mangle -N KUBE-IPTABLES-HINT; iptables-nft -A INPUT -j ACCEPT", Legacy},
		{"an old kubelet's canary in legacy, in IPv6", "ip6tables-legacy -t mangle -N KUBE-KUBELET-CANARY", Legacy},
		{"more rules in legacy", "iptables-legacy -A INPUT -j ACCEPT; iptables-legacy -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT", Legacy},
		{"as many rules in both", "iptables-legacy -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT", NFT},
	} {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t, func() {
				sh(t, c.setUp)
				if got := Detect(); got != c.want {
					t.Errorf("got %s, want %s", got, c.want)
				}
			})
		})
	}
}

// TestGuard: the guard of localhost node ports is put next to what the kubelet keeps in KUBE-FIREWALL, once.
func TestGuard(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			inNamespace(t, func() {
				sh(t, "iptables-"+string(v)+" -N KUBE-FIREWALL; iptables-"+string(v)+" -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP")
				p := plantest.Large(1, 1)
				p.Settings.LocalhostNodePorts = true
				for range 2 {
					e := realEngine(t, v, plan.IPv4)
					if err := e.sync(context.Background(), p, nil); err != nil {
						t.Fatal(err)
					}
					held, err := e.tool.save(context.Background(), tableFilter)
					if err != nil {
						t.Fatal(err)
					}
					want := chain{chainFirewall, []string{"-m mark --mark 0x8000/0x8000 -j DROP", localnetGuard()}}
					if !held.has(want) {
						t.Errorf("KUBE-FIREWALL holds %q", held[chainFirewall])
					}
				}
				if readSysctl("net/ipv4/conf/all/route_localnet") != "1" {
					t.Error("route_localnet is not set")
				}
			})
		})
	}
}
