package xtables

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed"
	"nodeproxy/kernel/names"
)

// contents draws chains with rules of which there are few different ones, so that two draws have much in common.
func contents() *rapid.Generator[Content] {
	rule := rapid.SampledFrom([]string{"-j RETURN", "-s ::5/128 -j KUBE-B", `-m comment --comment "a -A b" -j DROP`, "-j KUBE-C"})
	chain := rapid.SampledFrom([]string{"KUBE-A", "KUBE-B", "KUBE-C", "OUTPUT"})
	return rapid.Custom(func(t *rapid.T) Content { return rapid.MapOf(chain, rapid.SliceOfN(rule, 0, 4)).Draw(t, "chains") })
}

// printed is what iptables-save prints of a table.
func printed(t names.Table, c Content) string {
	var out strings.Builder
	fmt.Fprintf(&out, "# Generated\n*%s\n", t)
	for _, name := range slices.Sorted(maps.Keys(c)) {
		fmt.Fprintf(&out, ":%s - [0:0]\n", name)
	}
	for _, name := range slices.Sorted(maps.Keys(c)) {
		Chain{Name: name, Rules: c[name]}.AppendTo(&out, "")
	}
	out.WriteString("COMMIT\n")
	return out.String()
}

// plain is content with nil in place of what is empty.
func plain(c Content) Content {
	out := Content{}
	for name, rules := range c {
		out[name] = slices.Clone(rules[:len(rules):len(rules)])
		if len(rules) == 0 {
			out[name] = nil
		}
	}
	return out
}

// TestSaveShares: what is read does not depend on what is known; a chain that is known has the rules of what is known, not copies;
// and what is done to the one is not done to the other.
func TestSaveShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		known, table := contents().Draw(t, "known"), contents().Draw(t, "table")
		before := plain(known)
		r := reader{content: Content{}, known: []Content{known}}
		whole, err := r.read(strings.NewReader(printed(names.NAT, table)), names.NAT)
		got := r.content
		require.NoError(t, err)
		require.True(t, whole)
		require.Equal(t, plain(table), plain(got))
		for name, rules := range got {
			if len(rules) > 0 && slices.Equal(rules, known[name]) {
				require.Same(t, unsafe.SliceData(known[name]), unsafe.SliceData(rules), "chain %s", name)
			}
			for i, r := range rules {
				if i < len(known[name]) && r == known[name][i] {
					require.Same(t, unsafe.StringData(known[name][i]), unsafe.StringData(r), "rule %d of chain %s", i, name)
				}
			}
			got.Add("-A " + name + " -j LOG")
		}
		require.Equal(t, before, plain(known), "what was known has changed")
	})
}

// TestInputOrder: a step changes one table after the other, each whole, in the order in which its changes name them; chains are made or
// emptied before rules, and removed after these.
func TestInputOrder(t *testing.T) {
	got := input([][]Change{{
		{Op: Remove, Table: names.NAT, Chain: "KUBE-OLD"},
		{Op: Write, Table: names.Filter, Chain: "KUBE-F", Rules: []string{"-j DROP"}},
		{Op: Write, Table: names.NAT, Chain: "KUBE-N", Rules: []string{"-j RETURN", "-j ACCEPT"}},
		{Op: Insert, Table: names.NAT, Chain: "OUTPUT", Rules: []string{"-j KUBE-N"}},
		{Op: Append, Table: names.NAT, Chain: "KUBE-NEW", Rules: []string{"-j KUBE-N"}},
		{Op: Append, Table: names.NAT, Chain: "KUBE-THERE", Rules: []string{"-j KUBE-N"}, Exists: true},
		{Op: Delete, Table: names.NAT, Chain: "INPUT", Rules: []string{"-j KUBE-OLD"}},
	}, {{Op: Empty, Table: names.NAT, Chain: "KUBE-N"}}})
	require.Equal(t, `*nat
:KUBE-OLD - [0:0]
:KUBE-N - [0:0]
:KUBE-NEW - [0:0]
-A KUBE-N -j RETURN
-A KUBE-N -j ACCEPT
-I OUTPUT 1 -j KUBE-N
-A KUBE-NEW -j KUBE-N
-A KUBE-THERE -j KUBE-N
-D INPUT -j KUBE-OLD
-X KUBE-OLD
COMMIT
*filter
:KUBE-F - [0:0]
-A KUBE-F -j DROP
COMMIT
*nat
:KUBE-N - [0:0]
COMMIT
`, got.String())
}
