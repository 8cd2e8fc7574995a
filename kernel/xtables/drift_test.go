package xtables

import (
	"slices"
	"testing"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// TestDrift: what differs is named rule by rule where rules can be compared, else as a chain, and nothing that others may have is.
func TestDrift(t *testing.T) {
	const table = " of table nat (IPv6)"
	desired := Desired{
		Chains: []Chain{
			{names.NAT, "KUBE-SAME", []string{"-j A", "-j B"}}, {names.NAT, "KUBE-GONE", []string{"-j A"}},
			{names.NAT, "KUBE-RULES", []string{"-j A", "-j A", "-j B"}}, {names.NAT, "KUBE-ORDER", []string{"-j A", "-j B"}},
			{names.NAT, "KUBE-NATIVE", []string{"-j A"}},
		},
		Jumps: []Jump{{names.NAT, "INPUT", "-j KUBE-SAME"}, {names.NAT, "OUTPUT", "-j KUBE-SAME"}},
		Stale: func(_ names.Table, chain string) bool { return chain == "KUBE-SVC-STALE" || chain == "KUBE-SVC-USED" },
	}
	actual := Content{
		"KUBE-SAME": {"-j A", "-j B"}, "KUBE-RULES": {"-j C", "-j A", "-j B"}, "KUBE-ORDER": {"-j B", "-j A"},
		"KUBE-NATIVE": {"-j A", UnreadMark + "7"}, "KUBE-SVC-STALE": {"-j A"}, "KUBE-SVC-USED": nil,
		"INPUT": {"-j KUBE-SAME", "-j OTHER"}, "OTHER": {"-j KUBE-SVC-USED"}, "OUTPUT": nil,
	}
	got := Drift(plan.IPv6, Diff(names.NAT, desired, actual))
	want := drift.Found{
		{Kind: drift.Chain, State: drift.Missing, Object: "KUBE-GONE" + table},
		{Kind: drift.Rule, State: drift.Missing, Object: "KUBE-RULES" + table, Want: "-j A"},
		{Kind: drift.Rule, State: drift.Unexpected, Object: "KUBE-RULES" + table, Have: "-j C"},
		{Kind: drift.Chain, State: drift.Changed, Object: "KUBE-ORDER" + table, Aspect: "the order of its rules"},
		{Kind: drift.Chain, State: drift.Changed, Object: "KUBE-NATIVE" + table, Aspect: "it holds rules that only nft can read"},
		{Kind: drift.Rule, State: drift.Missing, Object: "OUTPUT" + table, Want: "-j KUBE-SAME"},
		{Kind: drift.Chain, State: drift.Unexpected, Object: "KUBE-SVC-STALE" + table},
	}
	if !slices.Equal(got, want) {
		t.Errorf("found\n%s\nwant\n%s", got.Words(len(got)), want.Words(len(want)))
	}
}
