package common

import "testing"

// TestServiceIn: the Service is found in every comment of a rule that names one, kube-proxy's too.
func TestServiceIn(t *testing.T) {
	t.Parallel()
	for rule, want := range map[string]string{
		`-m comment --comment "default/web:http cluster IP" -j KUBE-SVC-X`:                               "default/web",
		`-m comment --comment "default/web" -j DNAT`:                                                     "default/web",
		`-m comment --comment "masquerade traffic for a/b external destinations" -j KUBE-MARK-MASQ`:      "a/b",
		`-m comment --comment "a/b:c -> 10.0.0.1:80" -m statistic --mode random -j KUBE-SEP-X`:           "a/b",
		`-d 10.0.0.1/32 -p tcp -m comment --comment "kubernetes service portals" -m tcp -j KUBE-SVC-X`:   "",
		`-d 10.0.0.0/8 -j KUBE-SVC-10.96.0.0/12`:                                                         "",
		`-m comment --comment a-b -j X`:                                                                  "",
		`-m comment --comment "other traffic to a/b:c will be dropped by KUBE-PROXY-FIREWALL" -j ACCEPT`: "a/b",
	} {
		if got := serviceIn(rule); got != want {
			t.Errorf("%s: %q, want %q", rule, got, want)
		}
	}
}
