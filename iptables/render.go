package iptables

import (
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Render returns the rules of a plan for one family as input for iptables-restore: what a sync brings the kernel to, in
// stable order. Rules that lead from built-in chains to ours are appended here; a sync puts them in front of what is
// there.
func Render(p *plan.Plan, f plan.Family, o Options) string {
	return render([]string{""}, desired(p, f, o))
}

// RenderAll returns the rules of both families as one text. Chains of the two have the same names, so each rule begins
// with -4 or -6: iptables-restore passes over the rules of IPv6, ip6tables-restore over those of IPv4.
func RenderAll(p *plan.Plan, o Options) string {
	return render([]string{"-4 ", "-6 "}, desired(p, plan.IPv4, o), desired(p, plan.IPv6, o))
}

// render prints the chains of families, whose rules have these prefixes.
func render(prefixes []string, families ...map[names.Table][]xtables.Chain) string {
	var out strings.Builder
	for _, t := range tables {
		out.WriteString("*" + string(t) + "\n")
		seen := map[string]bool{}
		for _, chains := range families {
			for _, c := range chains[t] {
				if !names.Builtin(c.Name) && !seen[c.Name] {
					seen[c.Name] = true
					out.WriteString(":" + c.Name + " - [0:0]\n")
				}
			}
		}
		for i, chains := range families {
			for _, c := range chains[t] {
				c.AppendTo(&out, prefixes[i])
			}
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

// desired lists the chains of each table: built-in ones, with our rules in them, then those that are always there, then
// the ServicePorts' own.
func desired(p *plan.Plan, f plan.Family, o Options) map[names.Table][]xtables.Chain {
	r := rulesOf(p, f, o)
	var own []xtables.Chain
	for _, sp := range p.Sorted(f) {
		own = append(own, r.builder(sp).chains()...)
	}
	out := r.builtin()
	for _, c := range slices.Concat(slices.Collect(r.fixed(nil)), own) {
		out[c.Table] = append(out[c.Table], c)
	}
	return out
}

// builtin lists the built-in chains of each table, with our rules in them, and kubelet's chain if it gets a rule of ours.
func (r *rules) builtin() map[names.Table][]xtables.Chain {
	out := map[names.Table][]xtables.Chain{}
	for _, j := range jumps(r.localnet()) {
		i := slices.IndexFunc(out[j.Table], func(c xtables.Chain) bool { return c.Name == j.From })
		if i < 0 {
			i = len(out[j.Table])
			out[j.Table] = append(out[j.Table], xtables.Chain{Table: j.Table, Name: j.From})
		}
		c := &out[j.Table][i]
		c.Rules = slices.Insert(c.Rules, 0, j.Rule)
	}
	if r.localnet() {
		out[names.Filter] = append(out[names.Filter], xtables.Chain{Table: names.Filter, Name: names.KubeletFirewall, Rules: []string{localnetGuard()}})
	}
	return out
}
