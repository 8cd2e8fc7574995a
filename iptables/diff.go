package iptables

import (
	"slices"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Desired returns what a sync of everything makes of the tables of a family, but for the guard of KUBE-FIREWALL: see WithGuard.
func Desired(p *plan.Plan, f plan.Family, o Options) xtables.Desired {
	r := rulesOf(p, f, o)
	d := r.desired()
	d.Jumps, d.StaleJump = jumps(r.localnet()), ofOtherMode
	d.Stale = func(t names.Table, name string) bool { return names.OfService(name) || ofOtherMode(t, name) }
	return d
}

// WithGuard has what d desires include the guard of node ports on localhost, if the settings of p need one. KUBE-FIREWALL is the kubelet's
// too: the rules that it has in actual stay.
func WithGuard(d xtables.Desired, p *plan.Plan, f plan.Family, actual map[names.Table]xtables.Content) xtables.Desired {
	if !p.Settings.LocalhostReachable(f) {
		return d
	}
	rules := actual[names.Filter][names.KubeletFirewall]
	if !slices.Contains(rules, localnetGuard()) {
		rules = append(slices.Clone(rules), localnetGuard())
	}
	d.Chains = append(slices.Clone(d.Chains), xtables.Chain{Table: names.Filter, Name: names.KubeletFirewall, Rules: rules})
	return d
}
