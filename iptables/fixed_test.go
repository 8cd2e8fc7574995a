package iptables

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// testFixed is a set of fixed rules as mode ipvs might have it.
func testFixed() xtables.Desired {
	return xtables.Desired{
		Stale: names.IsOurs, StaleJump: names.IsOurs,
		Chains: []xtables.Chain{
			{Table: names.Mangle, Name: "KUBE-IPVS-MARK", Rules: []string{"-p tcp -m tcp --dport 80 -j MARK --set-xmark 0x1/0x1"}},
			{Table: names.Filter, Name: "KUBE-NODE-PORT", Rules: []string{"-p tcp -m tcp --dport 81 -j ACCEPT"}},
			{Table: names.NAT, Name: "KUBE-MARK-MASQ", Rules: []string{"-j MARK --set-xmark 0x4000/0x4000"}},
			{Table: names.NAT, Name: "KUBE-SERVICES", Rules: []string{"-s 127.0.0.0/8 -j RETURN", "-d 10.96.0.1/32 -j KUBE-MARK-MASQ"}},
		},
		Jumps: []xtables.Jump{
			{Table: names.Mangle, From: "INPUT", Rule: "-j KUBE-IPVS-MARK"},
			{Table: names.Filter, From: "INPUT", Rule: "-m comment --comment \"kubernetes health check rules\" -j KUBE-NODE-PORT"},
			{Table: names.NAT, From: "PREROUTING", Rule: "-m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES"},
		},
	}
}

// foreign are rules of others, which nobody may touch.
const foreign = `*mangle
:OTHERS - [0:0]
-A INPUT -j OTHERS
COMMIT
*filter
:OTHERS - [0:0]
:KUBE-FIREWALL - [0:0]
-A INPUT -s 192.0.2.1/32 -j OTHERS
-A INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -s 192.0.2.9/32 -j DROP
COMMIT
*nat
:OTHERS - [0:0]
-A PREROUTING -j OTHERS
COMMIT
`

// allTables is everything in the kernel's tables.
func allTables(t *testing.T, k xtables.Kernel) string {
	t.Helper()
	var out strings.Builder
	for _, tbl := range names.Tables {
		held, err := k.Save(context.Background(), tbl)
		require.NoError(t, err)
		writeTable(&out, tbl, held)
	}
	return out.String()
}

// TestModesReplaceEachOther: a mode's start removes the rules of the other one, and no rules of anyone else.
func TestModesReplaceEachOther(t *testing.T) { inAll(t, modesReplaceEachOther) }

func modesReplaceEachOther(t *testing.T, v xtables.Variant, f plan.Family) {
	fixedOf := func() xtables.Desired {
		x := testFixed()
		if f == plan.IPv6 {
			for i, c := range x.Chains {
				for j, r := range c.Rules {
					r = strings.ReplaceAll(r, "127.0.0.0/8", "2001:db8::/32")
					x.Chains[i].Rules[j] = strings.ReplaceAll(r, "10.96.0.1/32", "fd00::1/128")
				}
			}
		}
		return x
	}
	tables, err := xtables.NewTables(v, f, nil)
	if err != nil {
		t.Error(err)
		return
	}
	engine := realEngine(t, v, f)
	text := foreign
	if f == plan.IPv6 {
		text = strings.NewReplacer("192.0.2.1/32", "2001:db8::1/128", "192.0.2.9/32", "2001:db8::9/128").Replace(text)
	}
	if err := tables.Kernel.Restore(xtables.Text(text)); err != nil {
		t.Error(err)
		return
	}
	before := allTables(t, tables.Kernel)
	apply := func(x xtables.Desired) (int, string) {
		n, err := tables.Sync(context.Background(), x)
		assert.NoError(t, err)
		return n, allTables(t, tables.Kernel)
	}
	_, fixedOnly := apply(fixedOf())
	if n, again := apply(fixedOf()); n != 0 || again != fixedOnly {
		t.Errorf("a second time changed %d things:\n%s", n, diffLines(fixedOnly, again))
	}
	program(t, engine, plantest.Large(20, 2), plan.Everything())
	services := allTables(t, tables.Kernel)
	for _, name := range []string{"KUBE-IPVS-MARK", "KUBE-NODE-PORT\n", "-s 127.0.0.0/8 -j RETURN"} {
		if strings.Contains(services, name) {
			t.Errorf("mode iptables has left %q:\n%s", name, services)
		}
	}
	if _, got := apply(fixedOf()); got != fixedOnly {
		t.Errorf("after mode iptables there is more than without:\n%s", diffLines(fixedOnly, got))
	}
	if _, got := apply(xtables.Nothing); got != before {
		t.Errorf("nothing but what others have must be left:\n%s", diffLines(before, got))
	}
}

// TestFixedRender is what Apply makes of an empty machine.
func TestFixedRender(t *testing.T) {
	t.Parallel()
	k := xtablestest.New()
	x := &xtables.Tables{Writer: &xtables.Writer{Kernel: k}}
	if _, err := x.Sync(context.Background(), testFixed()); err != nil {
		t.Fatal(err)
	}
	applied := allTables(t, k)
	rendered := xtablestest.New()
	require.NoError(t, rendered.Restore(xtables.Text(testFixed().Render())))
	if got := allTables(t, rendered); got != applied {
		t.Errorf("differs:\n%s", diffLines(applied, got))
	}
	if !slices.Contains(k.Tables[names.Mangle]["INPUT"], "-j KUBE-IPVS-MARK") {
		t.Error("there is no jump in table mangle")
	}
}

// TestFixedChainInUse: a chain of another mode that somebody else's rule leads to fails nothing; it is emptied, and goes later than
// that rule.
func TestFixedChainInUse(t *testing.T) {
	t.Parallel()
	inVariants(t, func(t *testing.T, v xtables.Variant) {
		x, err := xtables.NewTables(v, plan.IPv4, nil)
		require.NoError(t, err)
		const name = "KUBE-SVC-AAAAAAAAAAAAAAAA"
		write := func(text string) {
			t.Helper()
			require.NoError(t, x.Kernel.Restore(xtables.Text(text)))
		}
		write("*nat\n:" + name + " - [0:0]\n:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]\n:OTHERS - [0:0]\n-A " + name +
			" -j KUBE-SEP-AAAAAAAAAAAAAAAA\n-A OTHERS -p tcp -j " + name + "\n-A PREROUTING -j " + name + "\nCOMMIT\n")
		for i := range 2 {
			n, err := x.Sync(t.Context(), testFixed())
			if err != nil || i > 0 && n > 0 {
				t.Fatalf("round %d: %d changes, %v", i, n, err)
			}
			held, err := x.Kernel.Save(t.Context(), names.NAT)
			rules, is := held[name]
			if _, sep := held["KUBE-SEP-AAAAAAAAAAAAAAAA"]; err != nil || !is || len(rules) > 0 || sep || len(held["OTHERS"]) != 1 {
				t.Errorf("the chain in use is there: %v, with %q; what it led to: %v; the others' rules: %q; %v",
					is, rules, sep, held["OTHERS"], err)
			}
		}
		write("*nat\n:OTHERS - [0:0]\n-X OTHERS\nCOMMIT\n")
		if _, err := x.Sync(t.Context(), testFixed()); err != nil {
			t.Fatal(err)
		}
		held, err := x.Kernel.Save(t.Context(), names.NAT)
		if _, is := held[name]; err != nil || is {
			t.Errorf("in the end it is there: %v, %v", is, err)
		}
	})
}
