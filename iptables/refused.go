package iptables

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// confirm returns an error if another program has removed or changed chains of ours since this sync has read or written them, and
// any ServicePort was found to be refused since the last call: rules that lead to a chain that somebody has removed are refused too,
// whoever asks for them, and no ServicePort is to blame for that. The next sync begins with what the kernel holds then.
func (f *fullSync) confirm() error {
	if !f.unconfirmed {
		return nil
	}
	if err := f.undisturbed(); err != nil {
		f.refused = nil
		return err
	}
	f.unconfirmed = false
	return nil
}

// undisturbed returns an error that names a chain of ours that the kernel no longer holds as this sync has read or written it.
func (f *fullSync) undisturbed() error {
	for _, t := range tables {
		now, err := f.Kernel.Save(f.ctx, t)
		if err != nil {
			return err
		}
		for name, written := range f.actual[t] {
			// Kernels differ in how they print a rule, but not in how many there are.
			rules, exists := now[name]
			if names.IsOurs(t, name) && (!exists || len(rules) != len(written)) {
				return fmt.Errorf("chain %s of table %s was removed or changed by another program while rules were written", name, t)
			}
		}
	}
	return nil
}

// The wait until a refused ServicePort is tried again doubles from firstRefusal on, up to lastRefusal. After it, a comparison of
// everything tries it, or its next change. A change of more than its endpoints does not wait.
const firstRefusal, lastRefusal = 5 * time.Second, 10 * time.Minute

// refusal is a ServicePort that the kernel has refused.
type refusal struct {
	plan.Refusal
	sp      *plan.ServicePort // as it was refused
	entries bool              // it was its entries in dispatchers, not its chains
	wait    time.Duration
	again   time.Time // when it may be tried again; zero until the sync that found it has ended
}

// updateRefused notes what a sync of everything found to be refused, and reports it where it is not what it was before.
func (e *engine) updateRefused(found []*refusal) {
	before := e.refused
	e.refused = make(map[plan.Key]*refusal, len(found))
	same := len(found) == len(before)
	list := make([]plan.Refusal, 0, len(found))
	for _, r := range found {
		was := before[r.Key]
		same = same && was != nil && was.Kept == r.Kept
		if r.again.IsZero() {
			r.again = time.Now().Add(r.wait)
		}
		e.refused[r.Key] = r
		list = append(list, r.Refusal)
	}
	if !same && e.onRefused != nil {
		e.onRefused(e.family, list)
	}
}

// withhold takes the ServicePorts out of a change that were refused a short while ago, and differ from that in their endpoints alone:
// to find out that they still are would cost a comparison of everything. A later sync has them. What differs otherwise is tried at
// once: it may be the owner's mend.
func (e *engine) withhold(p *plan.Plan, changed plan.Keys) plan.Keys {
	if len(e.refused) == 0 || len(changed) == 0 {
		return changed
	}
	out := maps.Clone(changed)
	maps.DeleteFunc(out, func(k plan.Key, _ struct{}) bool {
		r, sp := e.refused[k], p.Services[k]
		return r != nil && sp != nil && time.Now().Before(r.again) && sameButEndpoints(r.sp, sp)
	})
	return out
}

func sameButEndpoints(a, b *plan.ServicePort) bool {
	like := *b
	like.Endpoints = a.Endpoints
	return a.Equal(&like)
}

// refusedIsDue reports whether a ServicePort that the kernel has refused may be tried again.
func (e *engine) refusedIsDue() bool {
	for _, r := range e.refused {
		if !time.Now().Before(r.again) {
			return true
		}
	}
	return false
}

// stillRefused returns how a ServicePort was refused that is not to be tried yet; nil if it is to be tried.
func (f *fullSync) stillRefused(sp *plan.ServicePort) *refusal {
	if r := f.engine.refused[sp.Key]; r != nil && time.Now().Before(r.again) && r.sp.Equal(sp) {
		still := *r
		still.sp = sp
		return &still
	}
	return nil
}

// refuse makes do without a ServicePort that the kernel has just refused: its entries in dispatchers, or its chains.
func (f *fullSync) refuse(sp *plan.ServicePort, entries bool, err error) {
	r := &refusal{Refusal: plan.Refusal{Key: sp.Key, Err: err}, sp: sp, entries: entries, wait: firstRefusal}
	if was := f.engine.refused[sp.Key]; was != nil {
		r.wait = min(2*was.wait, lastRefusal)
	}
	f.unconfirmed = true
	f.doWithout(r)
}

// doWithout makes do without what the kernel does not take of a ServicePort. Where that is not the entries in dispatchers, and all
// chains to which those lead are there already, they go on leading to them, and what they were serves on: endpoints of before are
// better than none.
func (f *fullSync) doWithout(r *refusal) {
	f.rewrites = slices.DeleteFunc(f.rewrites, func(other own) bool { return other.sp == r.sp })
	frag := f.rules.fragment(r.sp)
	missing := func(c xtables.Chain) bool { _, exists := f.actual[names.NAT][c.Name]; return !exists }
	leaves := r.entries || slices.ContainsFunc(frag.entries, func(e entry) bool {
		return slices.ContainsFunc(frag.chains, func(c xtables.Chain) bool { return missing(c) && c.Name == e.target() })
	})
	for _, c := range frag.chains {
		delete(f.wanted, tableChainName{c.Table, c.Name})
	}
	if leaves {
		f.rules.leave(r.sp)
	} else {
		kept := fragment{entries: frag.entries}
		for _, e := range frag.entries {
			if to := e.target(); f.actual[names.NAT][to] != nil {
				f.keep(to, &kept)
			}
		}
		f.rules.spared[r.Key] = kept
	}
	r.Kept = !leaves
	f.refused = append(f.refused, r)
}

// keep wants a chain of table nat as the kernel has it, with all that it leads to.
func (f *fullSync) keep(name string, kept *fragment) {
	if f.wanted[tableChainName{names.NAT, name}] {
		return
	}
	f.wanted[tableChainName{names.NAT, name}] = true
	if names.OfService(name) { // All others are fixed.
		kept.chains = append(kept.chains, xtables.Chain{Table: names.NAT, Name: name, Rules: f.actual[names.NAT][name]})
	}
	for _, r := range f.actual[names.NAT][name] {
		if to := xtables.Target(r); f.actual[names.NAT][to] != nil {
			f.keep(to, kept)
		}
	}
}

// chainTrial is where it is tried whether the kernel takes the entries of dispatchers. Packets get to it, since some things an
// nft kernel looks at only in rules that they can get to; but its first rule sends them back.
const chainTrial = names.PrefixCluster + "TRIAL"

// refuseEntries looks for the ServicePorts of which the kernel does not take the entries in dispatchers, and leaves them out. It
// reports whether there are any.
func (f *fullSync) refuseEntries() (bool, error) {
	all := slices.SortedFunc(f.rules.services.All(), func(a, b *plan.ServicePort) int { return a.Key.Compare(b.Key) })
	before := len(f.refused)
	search := xtables.Search[*plan.ServicePort]{Works: f.Works, Try: f.trial, Refused: func(sp *plan.ServicePort, err error) {
		f.refuse(sp, true, err)
	}}
	if err := search.Run(all); err != nil {
		return false, err
	}
	found := len(f.refused) > before
	return found, f.confirm()
}

// trial writes the entries of ServicePorts where they do nothing, and removes them.
func (f *fullSync) trial(services []*plan.ServicePort) error {
	rules := map[names.Table][]string{}
	for _, sp := range services {
		for _, e := range f.rules.fragment(sp).entries {
			t := places[e.dispatcher].table
			rules[t] = append(rules[t], e.rules...)
		}
	}
	var errs []error
	for _, t := range []names.Table{names.NAT, names.Filter} {
		if len(rules[t]) > 0 {
			errs = append(errs, f.trialIn(t, rules[t]))
		}
	}
	return errors.Join(errs...)
}

func (f *fullSync) trialIn(t names.Table, rules []string) error {
	step := []xtables.Change{xtables.WriteChain(xtables.Chain{Table: t, Name: chainTrial,
		Rules: append([]string{xtables.NewRule().Jump("RETURN")}, rules...)})}
	end := []xtables.Change{{Op: xtables.Remove, Table: t, Chain: chainTrial}}
	if _, exists := f.actual[t][names.Services]; exists {
		lead := xtables.Change{Op: xtables.Append, Table: t, Chain: names.Services, Exists: true,
			Rules: []string{xtables.NewRule().Jump(chainTrial)}}
		step = append(step, lead)
		lead.Op = xtables.Delete
		end = append(end, lead)
	}
	if err := f.Write(f.ctx, nil, step); err != nil {
		return err
	}
	return f.Write(f.ctx, nil, end)
}
