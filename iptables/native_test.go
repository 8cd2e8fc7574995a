package iptables

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// nativeRules are rules that iptables has no words for.
var nativeRules = []string{
	"{} nat POSTROUTING masquerade", "{} nat PREROUTING ct state new counter", "{} nat PREROUTING fib daddr type local accept",
	"{} filter INPUT ct state established accept", "{} filter FORWARD log", "{} filter OUTPUT meta l4proto tcp tcp dport 7 reject",
	"{} mangle PREROUTING ct mark set 1",
}

// addNative adds rules for nft, in tables that iptables has made, at the front or the end of chains.
func addNative(t *testing.T, add string, f plan.Family, rules ...string) {
	t.Helper()
	for _, r := range rules {
		sh(t, fmt.Sprintf("nft %s rule %s", add, strings.ReplaceAll(r, "{}", nft.FamilyName(f))))
	}
}

// builtinChains makes the built-in chains that rules of others go to.
func builtinChains(t *testing.T, f plan.Family) {
	t.Helper()
	for table, chains := range map[names.Table]string{
		names.NAT: "PREROUTING POSTROUTING", names.Filter: "INPUT FORWARD OUTPUT", names.Mangle: "INPUT PREROUTING",
	} {
		for _, c := range strings.Fields(chains) {
			sh(t, fmt.Sprintf("%s-nft -t %s -I %s -p tcp -j ACCEPT", xtables.BaseName(f), table, c))
		}
	}
}

// TestNativeRules: beside rules that only nft can read, in any table, nothing is taken for missing, and nothing is written again;
// changes are; and a start finds all as it was left.
func TestNativeRules(t *testing.T) {
	for _, add := range []string{"add", "insert"} {
		for _, v := range nativeRules {
			t.Run(add+" "+v, func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func() { besideNativeRules(t, add, v) })
			})
		}
	}
}

func besideNativeRules(t *testing.T, add, rule string) {
	e := realEngine(t, xtables.NFT, plan.IPv4)
	k := &notedRestores{Kernel: e.Kernel}
	e.Kernel = k
	var told []xtables.NativeRules
	k.Kernel.(*xtables.Program).OnNativeRules = func(n xtables.NativeRules) { told = append(told, n) }
	p := plantest.Large(30, 3)
	sync := func(e *engine) {
		t.Helper()
		program(t, e, p, plan.Everything())
	}
	sync(e)
	want := ours(t, e.Kernel)
	readable := func() string { // without what stands for the native rules
		return strings.Join(slices.DeleteFunc(strings.SplitAfter(ours(t, e.Kernel), "\n"), xtables.Unread), "")
	}
	sh(t, "iptables-nft -t mangle -A PREROUTING -s 192.0.2.1 -j ACCEPT")
	addNative(t, add, plan.IPv4, rule)
	table, chain := strings.Fields(rule)[1], strings.Fields(rule)[2]

	k.texts = nil
	sync(e)
	if len(k.texts) > 0 || !e.Compared || len(e.Found) > 0 {
		t.Errorf("beside a native rule, %q is written, and %v is found to differ", k.texts, e.Found)
	}
	same(t, "what is read is not what is there", readable(), want)
	if table != "mangle" && (len(told) != 1 || told[0].Table != table || !slices.Equal(told[0].Chains, []string{chain})) {
		t.Errorf("told of %v", told)
	}
	fresh := realEngine(t, xtables.NFT, plan.IPv4)
	counted := &notedRestores{Kernel: fresh.Kernel}
	fresh.Kernel = counted
	if sync(fresh); len(counted.texts) > 0 {
		t.Errorf("a start writes %q", counted.texts)
	}
	// A Service that changes, one that goes, a jump that somebody removes.
	p.Set(plantest.LargeService(3, 5000, 2))
	p.Delete(p.Sorted(plan.IPv4)[9].Key)
	if err := k.Kernel.Restore(xtables.Text("*nat\n-D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\nCOMMIT\n")); err != nil {
		t.Error(err)
	}
	sync(e)
	if !e.Compared || len(e.Found) != 1 {
		t.Errorf("of one jump that is missing, %v is told", e.Found)
	}
	same(t, "after a change", readable(), wantText(p, plan.IPv4))
	removeNative(t, table, chain)
	same(t, "as iptables-save reads it", ours(t, e.Kernel), wantText(p, plan.IPv4))
	if table != "mangle" && (len(told) != 2 || len(told[1].Chains) > 0) {
		t.Errorf("told of %v", told)
	}
}

// nftHeld are the rules of a chain of IPv4, as the kernel lists them.
func nftHeld(t *testing.T, tbl, chain string) []string {
	t.Helper()
	rules, err := xtables.NFTRules(plan.IPv4, names.Table(tbl), chain)
	assert.NoError(t, err)
	return rules
}

// removeNative removes the rules of a chain that iptables can't read.
func removeNative(t *testing.T, tbl, chain string) {
	t.Helper()
	for _, r := range nftHeld(t, tbl, chain) {
		if handle, ok := strings.CutPrefix(r, xtables.UnreadMark); ok {
			sh(t, fmt.Sprintf("nft delete rule ip %s %s handle %s", tbl, chain, strings.Fields(handle)[0]))
		}
	}
}

// TestNativeRuleInOurChain: what others put there goes, whatever it is.
func TestNativeRuleInOurChain(t *testing.T) {
	nstest.Run(t, func() {
		e := realEngine(t, xtables.NFT, plan.IPv4)
		p := plantest.Large(30, 3)
		own := serviceChain(names.PrefixCluster, p.Sorted(plan.IPv4)[3].Key)
		for range 2 {
			program(t, e, p, plan.Everything())
		}
		want := wantText(p, plan.IPv4)
		for _, chain := range []string{names.Services, own, names.Postrouting} {
			addNative(t, "insert", plan.IPv4, "{} nat "+chain+" ct state new counter")
			program(t, e, p, plan.Everything())
			if !e.Compared || len(e.Found) != 1 || !strings.Contains(e.Found.Words(1), "chain "+chain+" of table nat (IPv4): it holds rules") {
				t.Errorf("%s: found %v", chain, e.Found)
			}
			same(t, chain, ours(t, e.Kernel), want)
		}
	})
}

// TestNativeRulesUnread: a chain with native rules that comparisons need not read again has them all the same, until they are gone.
func TestNativeRulesUnread(t *testing.T) {
	nstest.Run(t, func() {
		e := realEngine(t, xtables.NFT, plan.IPv4)
		var told []xtables.NativeRules
		e.Kernel.(*xtables.Program).OnNativeRules = func(n xtables.NativeRules) { told = append(told, n) }
		p := plantest.Large(30, 3)
		program(t, e, p, plan.Everything())
		compare := func(after string, want int) {
			t.Helper()
			if found, again, err := e.CompareBeside(t.Context()); len(found) > 0 || again || err != nil || len(told) != want {
				t.Errorf("after %s: found %v, %t, %v; told of %v", after, found, again, err, told)
			}
		}
		compare("a start", 0)
		addNative(t, "add", plan.IPv4, "{} nat POSTROUTING masquerade")
		compare("a native rule", 1)
		compare("that", 1)
		sp := plantest.LargeService(3, 5000, 2)
		p.Set(sp)
		program(t, e, p, plan.Only(plan.Keys{sp.Key: {}}))
		compare("a change", 1)
		removeNative(t, "nat", "POSTROUTING")
		compare("its removal", 2)
	})
}

// TestManyNativeChains: a table in which a chain has a name that iptables takes for too long, or more chains have native rules than
// are worth a run of a program each, is read all the same, with what leads from there to chains of ours.
func TestManyNativeChains(t *testing.T) {
	var many []string
	for i := range xtables.MostNative + 10 {
		many = append(many, fmt.Sprintf("nft add chain ip nat other-%d", i), fmt.Sprintf("nft add rule ip nat other-%d ct state new counter", i))
	}
	const long = "a-chain-with-a-name-that-iptables-takes-for-too-long"
	for name, commands := range map[string][]string{
		"long name": {"nft add chain ip nat " + long, "nft add rule ip nat " + long + " masquerade"},
		"many":      many,
	} {
		t.Run(name, func(t *testing.T) {
			nstest.Run(t, func() {
				e := realEngine(t, xtables.NFT, plan.IPv4)
				p := plantest.Large(30, 3)
				program(t, e, p, plan.Everything())
				sh(t, strings.Join(commands, "\n"))
				sh(t, "nft insert rule ip nat POSTROUTING ct state new counter")
				p.Set(plantest.LargeService(3, 5000, 2))
				k := &notedRestores{Kernel: e.Kernel}
				e.Kernel = k
				for _, want := range []bool{true, false} {
					k.texts = nil
					program(t, e, p, plan.Everything())
					if len(k.texts) > 0 != want {
						t.Errorf("%q is written", k.texts)
					}
				}
				others := func(line string) bool {
					return xtables.Unread(line) || strings.HasPrefix(line, ":other-") || strings.HasPrefix(line, ":"+long)
				}
				got := strings.Join(slices.DeleteFunc(strings.SplitAfter(ours(t, e.Kernel), "\n"), others), "")
				if want := wantText(p, plan.IPv4); got != want {
					t.Errorf("what is there is not what is to be:\n%s", diffLines(want, got))
				}
			})
		})
	}
}

// TestTableOfOthers: tables that somebody's nftables.conf has made, with chains of names of its own, before anything of iptables.
func TestTableOfOthers(t *testing.T) {
	nstest.Run(t, func() {
		config := filepath.Join(t.TempDir(), "nftables.conf")
		const text = `table ip nat {
	chain prerouting { type nat hook prerouting priority dstnat; ct state new counter; }
	chain postrouting { type nat hook postrouting priority srcnat; oifname "eth9" masquerade; }
}
table ip filter {
	chain input { type filter hook input priority filter; policy accept; ct state established,related accept; }
}
`
		require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
		sh(t, "nft -f "+config)
		p := plantest.Large(30, 3)
		for range 3 {
			e := realEngine(t, xtables.NFT, plan.IPv4)
			k := &notedRestores{Kernel: e.Kernel}
			e.Kernel = k
			for i := range 2 {
				k.texts = nil
				program(t, e, p, plan.Everything())
				if i > 0 && (len(k.texts) > 0 || len(e.Found) > 0) {
					t.Errorf("a comparison finds %v and writes %q", e.Found, k.texts)
				}
			}
			if got, want := ours(t, e.Kernel), wantText(p, plan.IPv4); got != want {
				t.Error(diffLines(want, got))
			}
			for chain, rules := range map[string]int{"nat prerouting": 1, "nat postrouting": 1, "filter input": 1} {
				table, name, _ := strings.Cut(chain, " ")
				if held := nftHeld(t, table, name); len(held) != rules {
					t.Errorf("the chain %s of others holds %q", chain, held)
				}
			}
		}
		lines, err := xtables.Cleanup(context.Background(), false, xtables.NFT)
		if err != nil || len(lines) == 0 {
			t.Errorf("cleanup: %q, %v", lines, err)
		}
		if lines, err := xtables.Cleanup(context.Background(), true, xtables.NFT); err != nil || len(lines) > 0 {
			t.Errorf("after cleanup there is %q, %v", lines, err)
		}
	})
}

// TestFixedBesideNativeRules is the same for what mode ipvs has, which has rules in table mangle too, and for its removal.
func TestFixedBesideNativeRules(t *testing.T) {
	for _, f := range plan.Families {
		for _, add := range []string{"add", "insert"} {
			t.Run(f.String()+"/"+add, func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func() {
					builtinChains(t, f)
					x, err := xtables.NewTables(xtables.NFT, f, nil)
					if err != nil {
						t.Error(err)
						return
					}
					fixed := testFixed()
					if f == plan.IPv6 {
						fixed.Chains[3].Rules = []string{"-j RETURN"}
					}
					apply := func(fixed xtables.Desired) int {
						n, err := x.Sync(context.Background(), fixed)
						assert.NoError(t, err)
						return n
					}
					if apply(fixed) == 0 {
						t.Error("nothing was written")
					}
					addNative(t, add, f, "{} nat PREROUTING ct state new counter", "{} filter INPUT ct state new counter",
						"{} mangle INPUT ct state new counter")
					for range 2 {
						if n := apply(fixed); n > 0 {
							t.Errorf("beside native rules, a comparison changes %d things", n)
						}
					}
					if n := apply(xtables.Nothing); n != 7 {
						t.Errorf("%d chains and jumps are removed", n)
					}
					if n := apply(fixed); n != 7 {
						t.Errorf("%d chains and jumps are written", n)
					}
					if lines, err := xtables.Cleanup(context.Background(), false, xtables.NFT); len(lines) != 7 || err != nil {
						t.Errorf("cleanup removes %q, %v", lines, err)
					}
					if lines, err := xtables.Cleanup(context.Background(), true, xtables.NFT); len(lines) != 0 || err != nil {
						t.Errorf("cleanup leaves %q, %v", lines, err)
					}
				})
			})
		}
	}
}
