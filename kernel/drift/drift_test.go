package drift

import (
	"fmt"
	"maps"
	"strings"
	"testing"
)

// TestText pins the text of each form of difference that backends make: logs and events carry it.
func TestText(t *testing.T) {
	for _, tc := range []struct {
		d    Difference
		want string
	}{
		{Difference{Kind: Chain, State: Missing, Object: "KUBE-SERVICES of table nat (IPv4)"},
			"chain KUBE-SERVICES of table nat (IPv4): missing"},
		{Difference{Kind: Chain, State: Changed, Object: "KUBE-SERVICES of table nat (IPv4)", Aspect: "the order of its rules"},
			"chain KUBE-SERVICES of table nat (IPv4): the order of its rules: changed"},
		{Difference{Kind: Rule, State: Missing, Object: "KUBE-FORWARD of table filter (IPv6)", Want: `--comment "a b" -j DROP`},
			`rule "--comment \"a b\" -j DROP" in KUBE-FORWARD of table filter (IPv6): missing`},
		{Difference{Kind: Rule, State: Unexpected, Object: "KUBE-FORWARD of table filter (IPv6)", Have: "-j DROP"},
			`rule "-j DROP" in KUBE-FORWARD of table filter (IPv6): unexpected`},
		{Difference{Kind: VirtualServer, State: Changed, Object: "TCP 10.96.0.1:80", Want: "-s rr", Have: "-s sh"},
			"virtual server TCP 10.96.0.1:80: changed"},
		{Difference{Kind: RealServer, State: Changed, Object: "10.0.0.1:80 of virtual server TCP 10.96.0.1:80", Aspect: "weight",
			Want: "1", Have: "7"}, "real server 10.0.0.1:80 of virtual server TCP 10.96.0.1:80: weight 7 in place of 1: changed"},
		{Difference{Kind: Route, State: Changed, Object: "10.96.0.0/12 of interface kube-ipvs0", Aspect: "source", Want: "192.0.2.1",
			Have: "192.0.2.2"}, "route 10.96.0.0/12 of interface kube-ipvs0: source 192.0.2.2 in place of 192.0.2.1: changed"},
		{Difference{Kind: Address, State: Changed, Object: "interface kube-ipvs0 with all addresses", Aspect: "it was removed"},
			"address interface kube-ipvs0 with all addresses: it was removed: changed"},
		{Difference{Kind: Sysctl, State: Changed, Object: "net.ipv4.ip_forward", Want: "1", Have: "0"},
			`sysctl net.ipv4.ip_forward is "0" in place of 1: changed`},
		{Difference{Kind: Sysctl, State: Changed, Object: "net.ipv4.ip_forward", Want: "1"},
			`sysctl net.ipv4.ip_forward is "" in place of 1: changed`},
		{Difference{Kind: SetElement, State: Changed, Object: "10.96.0.1,tcp:80 of set KUBE-CLUSTER-IP",
			Want: "10.96.0.1,tcp:80 skbmark 0x1/0x1", Have: "10.96.0.1,tcp:80"},
			"set element 10.96.0.1,tcp:80 of set KUBE-CLUSTER-IP: changed"},
	} {
		if got := tc.d.String(); got != tc.want {
			t.Errorf("%#v\nprints %s\nwant   %s", tc.d, got, tc.want)
		}
	}
}

// TestFound: every difference is kept; what is printed names the first and says how many were left out.
func TestFound(t *testing.T) {
	if all := (Found{}); len(all.Counts()) != 0 || all.Words(3) != "" {
		t.Errorf("nothing found: %v, %q", all.Counts(), all.Words(3))
	}
	var all Found
	for range 3 { // as three families would
		for i := range 9 {
			all = append(all, Difference{Kind: Rule, State: Missing, Object: "a chain", Want: fmt.Sprint(i)})
		}
		all = append(all, Difference{Kind: SetElement, State: Changed, Object: "of a set"})
	}
	if counts := all.Counts(); !maps.Equal(counts, map[Kind]int{Rule: 27, SetElement: 3}) {
		t.Errorf("counts: %v", counts)
	}
	if got, want := all.Words(2), `rule "0" in a chain: missing; rule "1" in a chain: missing; and 28 more`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := all.Words(20); !strings.Contains(got, "set element of a set: changed") || !strings.HasSuffix(got, "; and 10 more") {
		t.Errorf("got %q", got)
	}
	if got := all.Words(100); strings.Count(got, ";") != 29 || strings.Contains(got, "more") {
		t.Errorf("got %q", got)
	}
}

// TestSummary: summaries that are merged count everything, and keep no more than few differences, however many are merged.
func TestSummary(t *testing.T) {
	found := make(Found, 3)
	for i := range found {
		found[i] = Difference{Kind: Rule, State: Missing, Object: "a chain", Want: fmt.Sprint(i)}
	}
	var all Summary
	if all.Total() != 0 || all.String() != "" {
		t.Errorf("nothing found: %d, %q", all.Total(), all)
	}
	for range 100 {
		all.Merge(found.Summary(5), 5)
	}
	if len(all.First) != 5 || all.Total() != 300 || all.Counts[Rule] != 300 {
		t.Errorf("%d are kept, of %d", len(all.First), all.Total())
	}
	found[0].Want = "other" // A summary is on its own.
	if got := all.String(); strings.Contains(got, "other") || !strings.HasSuffix(got, "; rule \"1\" in a chain: missing; and 295 more") {
		t.Errorf("got %q", got)
	}
}
