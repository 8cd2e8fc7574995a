package names

import (
	"testing"

	"nodeproxy/plan"
)

// TestSets: names fit, differ, and are ours; those of other programs are not.
func TestSets(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range sets {
		for _, f := range plan.Families {
			name := s.Of(f)
			if len(name) > maxSetName || seen[name] || !IsOurSet(name) {
				t.Errorf("set %s of %s is %q: %d characters, used already: %t, ours: %t", s, f, name, len(name), seen[name], IsOurSet(name))
			}
			seen[name] = true
		}
	}
	for _, name := range []string{"", "KUBE-", "KUBE-CLUSTER-IP2", "CLUSTER-IP", "felix-4-CLUSTER-IP", "KUBE-7-CLUSTER-IP"} {
		if IsOurSet(name) {
			t.Errorf("%q is ours", name)
		}
	}
}

// TestChains: a chain of a mode is ours, and so is every chain with a prefix of ours; the kubelet's and the kernel's are not.
func TestChains(t *testing.T) {
	for table, chains := range fixedChains {
		for name := range chains {
			if !IsOurs(table, name) || len(name) > MaxChainName {
				t.Errorf("chain %s of table %s is ours: %t, with %d characters", name, table, IsOurs(table, name), len(name))
			}
		}
		for _, name := range []string{KubeletFirewall, KubeletHint, KubeletCanary, "PREROUTING", "KUBE-SVC"} {
			if IsOurs(table, name) {
				t.Errorf("chain %s of table %s is ours", name, table)
			}
		}
		if name := PrefixExternal + "10.96.0.0/16"; !IsOurs(table, name) || !InMode(ModeIPTables, table, name) || InMode(ModeIPVS, table, name) {
			t.Errorf("chain %s of table %s is not one of mode iptables alone", name, table)
		}
	}
	if InMode(ModeIPVS, NAT, NodePorts) || !InMode(ModeIPVS, Filter, Forward) || !InMode(ModeIPTables, Filter, Forward) {
		t.Error("the chains of the modes are mixed up")
	}
}
