package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"nodeproxy/config"
	"nodeproxy/iptables"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// xtablesRules are rules of iptables.
type xtablesRules struct {
	*xtablestest.Tables
	world *world
}

func newXtablesRules(w *world) nodeRules {
	x := newTables(w)
	return &x
}

func newTables(w *world) xtablesRules {
	x := xtablesRules{xtablestest.NewTables(w.draw), w}
	x.Changed = func(f plan.Family, by *xtablestest.Process, input string) {
		if by != nil {
			w.changed(f, by, input)
		}
	}
	return x
}

func (x *xtablesRules) start() (ruleWriter, func(*config.Config) machine) {
	p := x.Start()
	return p, func(*config.Config) machine { return machine{kernel: tablesFor(p)} }
}

// tablesFor are what mode iptables works with in a process.
func tablesFor(p *xtablestest.Process) *iptables.Tables {
	t := &iptables.Tables{Kernels: map[plan.Family]xtables.Kernel{}, Watch: p, MaxNames: 20}
	for _, f := range plan.Families {
		t.Kernels[f] = p.Program(f)
	}
	return t
}

func (x *xtablesRules) suffer(r *rand.Rand) string {
	what, long := xtablestest.Trouble(r.IntN(int(xtablestest.Troubles))), time.Duration(r.Int64N(int64(8*time.Second)))
	x.Suffer(what, long)
	return fmt.Sprint(what, " for ", long)
}

func (x *xtablesRules) calm() { x.Suffer(0, 0) }

func (*xtablesRules) leftover(plan.Family) bool { return false }

func (x *xtablesRules) packets(f plan.Family) (*packetsim.Machine, error) {
	return restore.Lazy(f, []string{"filter", "nat"}, func(table, name string) ([]string, bool) {
		list, exists := x.Kernels[f].Tables[names.Table(table)][name]
		return list, exists
	})
}

func (x *xtablesRules) differs(f plan.Family, p *plan.Plan, _ bool) (why string) {
	return tablesDiffer(f, rulesOfIPTables(x.world.cfg, p, f, true, nil), x.Kernels[f].Tables, names.NAT, names.Filter)
}

// tablesDiffer says how tables of iptables differ from what is desired; "" if they don't.
func tablesDiffer(f plan.Family, desired xtables.Desired, tables map[names.Table]xtables.Content, of ...names.Table) (why string) {
	want := map[names.Table]xtables.Content{}
	for _, t := range of {
		want[t] = xtables.Content{}
	}
	for _, c := range desired.Chains {
		want[c.Table][c.Name] = c.Rules
	}
	for _, t := range of {
		for _, name := range slices.Sorted(maps.Keys(tables[t])) {
			rules, wanted := want[t][name]
			held := tables[t][name]
			switch {
			case !names.IsOurs(t, name) || wanted && slices.Equal(rules, held):
			case !wanted && len(held) == 0 && wantedByOthers(t, name, tables[t]):
			default:
				why = fmt.Sprintf("%s chain %s of table %s has %q, want %q (wanted: %t)", f, name, t, held, rules, wanted)
			}
		}
		for name := range want[t] {
			if _, there := tables[t][name]; !there {
				why = fmt.Sprintf("%s chain %s of table %s is missing", f, name, t)
			}
		}
	}
	for _, j := range desired.Jumps {
		if !slices.Contains(tables[j.Table][j.From], j.Rule) {
			why = fmt.Sprintf("%s %s of table %s lacks %s", f, j.From, j.Table, j.Rule)
		}
	}
	return why
}

// wantedByOthers reports whether a chain of others leads to one of ours, which then stays.
func wantedByOthers(t names.Table, name string, table xtables.Content) bool {
	for from, rules := range table {
		if !names.IsOurs(t, from) && slices.ContainsFunc(rules, func(r string) bool { return xtables.Target(r) == name }) {
			return true
		}
	}
	return false
}

func (x *xtablesRules) others(f plan.Family) string { return othersInTables(x.Kernels[f].Tables) }

// othersInTables returns what others have in tables of iptables.
func othersInTables(tables map[names.Table]xtables.Content) string {
	var out strings.Builder
	for _, t := range slices.Sorted(maps.Keys(tables)) {
		for _, name := range slices.Sorted(maps.Keys(tables[t])) {
			if names.IsOurs(t, name) {
				continue
			}
			fmt.Fprintln(&out, t, name)
			for _, r := range tables[t][name] {
				if !names.Builtin(name) || !names.IsOurs(t, xtables.Target(r)) {
					fmt.Fprintln(&out, r)
				}
			}
		}
	}
	return out.String()
}

// stolen is the prefix of chains that others have made of ours.
const stolen = "STOLEN-"

// toXtables are what others do to rules of iptables.
var toXtables = []happening{
	{"others-flush-chain", 2, onChain(func(t xtables.Content, chain string, _ *rand.Rand) { t[chain] = nil })},
	{"others-delete-rule", 2, onChain(func(t xtables.Content, chain string, r *rand.Rand) {
		if n := len(t[chain]); n > 0 {
			i := r.IntN(n)
			t[chain] = slices.Delete(slices.Clone(t[chain]), i, i+1)
		}
	})},
	{"others-insert-rule", 2, onChain(func(t xtables.Content, chain string, _ *rand.Rand) {
		t[chain] = slices.Concat([]string{"-m mark --mark 0x77/0x77 -j RETURN"}, t[chain])
	})},
	{"others-rename-chain", 1, onChain(func(t xtables.Content, chain string, r *rand.Rand) {
		to := fmt.Sprint(stolen, r.IntN(1e6))
		t[to] = t[chain]
		delete(t, chain)
		for name, rules := range t {
			for i, rule := range rules {
				if xtables.Target(rule) == chain {
					rules = slices.Clone(rules)
					rules[i] = strings.TrimSuffix(rule, chain) + to // Before it, the name may be that of a list of clients.
				}
			}
			t[name] = rules
		}
	})},
	{"others-delete-jumps", 1, inTable(func(t xtables.Content, _ *rand.Rand) string {
		for name, rules := range t {
			if names.Builtin(name) {
				t[name] = slices.DeleteFunc(slices.Clone(rules), func(r string) bool { return strings.Contains(r, "KUBE-") })
			}
		}
		return ""
	})},
	{"others-flush-table", 1, inTable(func(t xtables.Content, _ *rand.Rand) string {
		for name := range t {
			if t[name] = nil; !names.Builtin(name) {
				delete(t, name)
			}
		}
		return ""
	})},
	{"others-write-own", 2, inTable(func(t xtables.Content, r *rand.Rand) string {
		name, rule := fmt.Sprint("OTHER-", r.IntN(3)), fmt.Sprintf("-m mark --mark 0x%x/0xff -j RETURN", 1+r.IntN(255))
		t[name] = append(slices.Clone(t[name]), rule)
		if jump := "-j " + name; !slices.Contains(t["OUTPUT"], jump) {
			t["OUTPUT"] = slices.Insert(slices.Clone(t["OUTPUT"]), r.IntN(len(t["OUTPUT"])+1), jump)
		}
		return name
	})},
	{"others-go-on", 2, func(w *world, r *rand.Rand) string {
		flush := onChain(func(t xtables.Content, chain string, _ *rand.Rand) { t[chain] = nil })
		var words []string
		for range 2 + r.IntN(8) {
			words = append(words, flush(w, r))
			time.Sleep(time.Duration(r.Int64N(int64(100 * time.Millisecond)))) // in simulated time
		}
		return strings.Join(words, ", ")
	}},
}

// inTable returns what others do in a table.
func inTable(do func(xtables.Content, *rand.Rand) string) func(*world, *rand.Rand) string {
	return func(w *world, r *rand.Rand) (what string) {
		f, t := plan.Families[r.IntN(2)], []names.Table{names.NAT, names.Filter}[r.IntN(2)]
		w.rules.(interface {
			Change(plan.Family, func(map[names.Table]xtables.Content))
		}).Change(f, func(tables map[names.Table]xtables.Content) {
			what = do(tables[t], r)
			w.foreign[f] = w.rules.others(f)
			w.disturb(f)
		})
		return fmt.Sprint(f, " table ", t, " ", what)
	}
}

// onChain returns what others do to a chain of ours.
func onChain(do func(t xtables.Content, chain string, r *rand.Rand)) func(*world, *rand.Rand) string {
	return inTable(func(t xtables.Content, r *rand.Rand) string {
		ours := slices.DeleteFunc(slices.Sorted(maps.Keys(t)), func(name string) bool {
			return !strings.HasPrefix(name, "KUBE-") || strings.HasPrefix(name, "KUBE-FIREWALL")
		})
		if len(ours) == 0 {
			return "is empty"
		}
		chain := ours[r.IntN(len(ours))]
		do(t, chain, r)
		return chain
	})
}
