package iptables

import (
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Render returns the rules of a plan for one family as input for iptables-restore: what a sync brings the kernel to, in
// stable order. Rules that lead from built-in chains to ours are appended here; a sync puts them in front of what is
// there.
func Render(p *plan.Plan, f plan.Family, o Options) string {
	var out strings.Builder
	tables := desired(p, f, o)
	for _, t := range []names.Table{names.Filter, names.NAT} {
		out.WriteString("*" + string(t) + "\n")
		for _, c := range tables[t] {
			if !names.Builtin(c.name) {
				out.WriteString(":" + c.name + " - [0:0]\n")
			}
		}
		for _, c := range tables[t] {
			c.appendTo(&out, "")
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

// RenderAll returns the rules of both families as one text. Chains of the two have the same names, so each rule begins
// with -4 or -6: iptables-restore passes over the rules of IPv6, ip6tables-restore over those of IPv4.
func RenderAll(p *plan.Plan, o Options) string {
	var out strings.Builder
	v4, v6 := desired(p, plan.IPv4, o), desired(p, plan.IPv6, o)
	for _, t := range []names.Table{names.Filter, names.NAT} {
		out.WriteString("*" + string(t) + "\n")
		seen := map[string]bool{}
		for _, c := range slices.Concat(v4[t], v6[t]) {
			if !names.Builtin(c.name) && !seen[c.name] {
				seen[c.name] = true
				out.WriteString(":" + c.name + " - [0:0]\n")
			}
		}
		for _, c := range v4[t] {
			c.appendTo(&out, "-4 ")
		}
		for _, c := range v6[t] {
			c.appendTo(&out, "-6 ")
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

// desired lists the chains of each table: built-in ones, with our rules in them, then those that are always there, then
// the ServicePorts' own.
func desired(p *plan.Plan, f plan.Family, o Options) map[names.Table][]chain {
	r := newRules(p, f, o)
	var own []chain
	for _, sp := range p.Sorted(f) {
		own = append(own, r.enter(sp)...)
	}
	out := map[names.Table][]chain{}
	for _, j := range jumps(r.localnet()) {
		i := slices.IndexFunc(out[j.table], func(c chain) bool { return c.name == j.from })
		if i < 0 {
			i = len(out[j.table])
			out[j.table] = append(out[j.table], chain{name: j.from})
		}
		c := &out[j.table][i]
		c.rules = slices.Insert(c.rules, 0, j.text())
	}
	if r.localnet() {
		out[names.Filter] = append(out[names.Filter], chain{names.KubeletFirewall, []string{localnetGuard()}})
	}
	r.fixed(func(c tableChain) { out[c.table] = append(out[c.table], c.chain) })
	out[names.NAT] = append(out[names.NAT], own...)
	return out
}
