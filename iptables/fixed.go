package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
	"nodeproxy/proxier/drift"
)

// Fixed is a set of rules that does not grow with the number of Services: what a backend needs beside what it programs by
// other means. Its chains are KUBE-* chains of kube-proxy's or this program's.
type Fixed struct {
	// Chains are in the order in which they are printed; none leads to one of another table.
	Chains []FixedChain
	// Jumps lead from built-in chains to them. Each goes in front of what is there, so the last one comes first.
	Jumps []FixedJump
}

// FixedChain is a chain of a table, mangle, filter or nat. Rules are in the form in which iptables-save prints them, without
// "-A CHAIN".
type FixedChain struct {
	Table, Name string
	Rules       []string
}

// FixedJump is a rule in a built-in chain.
type FixedJump struct {
	Table, From, Rule string
}

// fixedTables are the tables in the order in which they are written: what marks and refuses packets before what
// translates them.
var fixedTables = []names.Table{names.Mangle, names.Filter, names.NAT}

// Render returns the rules as input for iptables-restore, as the function Render does.
func (x *Fixed) Render() string {
	var out strings.Builder
	for _, t := range fixedTables {
		out.WriteString("*" + string(t) + "\n")
		chains := x.chains(t)
		for _, c := range chains {
			out.WriteString(":" + c.name + " - [0:0]\n")
		}
		var built []string
		for _, j := range slices.Backward(x.jumps(t)) {
			built = append(built, "-A "+j.From+" "+j.Rule+"\n")
		}
		slices.SortStableFunc(built, func(a, b string) int { return strings.Compare(strings.Fields(a)[1], strings.Fields(b)[1]) })
		out.WriteString(strings.Join(built, ""))
		for _, c := range chains {
			c.appendTo(&out, "")
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}

func (x *Fixed) chains(t names.Table) []chain {
	var out []chain
	for _, c := range x.Chains {
		if c.Table == string(t) {
			out = append(out, chain{c.Name, c.Rules})
		}
	}
	return out
}

func (x *Fixed) jumps(t names.Table) []FixedJump {
	return slices.DeleteFunc(slices.Clone(x.Jumps), func(j FixedJump) bool { return j.Table != string(t) })
}

// FixedTables keeps fixed rules of one family in the kernel.
type FixedTables struct {
	// Found, if not nil, gathers what Apply finds to differ from what it had written before.
	Found *drift.Found
	// RestoreFailed, if not nil, is told of each run of iptables-restore that failed.
	RestoreFailed func(plan.Family)
	// NativeRules, if not nil, is as in Config.
	NativeRules func(NativeRules)

	tool    *tool
	kernel  fixedKernel
	batch   int
	written *Fixed // by the last Apply that did not fail; nil where that is not known
	watch   watch
}

// fixedKernel is what FixedTables needs of the machine.
type fixedKernel interface {
	save(ctx context.Context, t names.Table) (kernelTable, error)
	restore(text string) error
}

// NewFixedTables finds the iptables programs of a family, as New does. It changes nothing.
func NewFixedTables(v Variant, f plan.Family) (*FixedTables, error) {
	if v == Auto || v == "" {
		v = Detect()
	}
	t, err := newTool(v, f)
	if err != nil {
		return nil, err
	}
	if err := t.usable(); err != nil {
		return nil, err
	}
	x := &FixedTables{tool: t, kernel: t}
	t.native = func(n NativeRules) {
		if x.NativeRules != nil {
			x.NativeRules(n)
		}
	}
	x.watch.add(t, fixedTables...)
	if v == NFT {
		x.batch = maxNames
	}
	return x, nil
}

// Describe names the program for a log line.
func (x *FixedTables) Describe() string { return x.tool.describe() }

// RandomFully reports whether the program knows --random-fully.
func (x *FixedTables) RandomFully() bool { return x.tool.randomFully }

// ServiceChains reports whether there are chains of single Services, as mode iptables has them: then it is by its rules that
// traffic flows.
func (x *FixedTables) ServiceChains(ctx context.Context) (bool, error) {
	held, err := x.kernel.save(ctx, names.NAT)
	for name := range held {
		if names.OfService(name) {
			return true, err
		}
	}
	return false, err
}

// Apply reads what the kernel holds, and writes what differs: each table changes as a whole, so that at no time a packet meets
// half of the rules. What this program, or kube-proxy, has left of another mode's rules is removed then, but for a chain that
// somebody else's rule leads to: that is emptied. Rules in built-in chains that lead to chains that are neither stay. It returns how many chains and jumps it wrote or removed.
func (x *FixedTables) Apply(ctx context.Context, fixed *Fixed) (int, error) {
	defer x.watch.writing()()
	var text strings.Builder
	stale := map[names.Table][]string{}
	changes := 0
	written := x.written
	x.written = nil
	for _, t := range fixedTables {
		held, err := x.kernel.save(ctx, t)
		if err != nil {
			return 0, err
		}
		if written != nil && x.Found != nil {
			(&driftFinder{x.tool.family, x.Found}).fixed(written, t, held)
		}
		change, n := fixedBlock(t, held, fixed)
		text.WriteString(change)
		changes += n
		var emptied block
		emptied, stale[t] = staleChains(t, held, fixed)
		if !emptied.empty() {
			emptied.appendTo(&text)
			changes += len(emptied.writes)
		}
	}
	if text.Len() > 0 {
		if err := x.restore(text.String()); err != nil {
			return 0, err
		}
	}
	for _, t := range fixedTables {
		changes += len(stale[t])
		if err := removeChains(x.restore, t, stale[t], x.batch); err != nil {
			return changes, fmt.Errorf("removing chains of another mode from table %s: %w", t, err)
		}
	}
	x.written = fixed
	return changes, nil
}

// staleChains are the chains of a table that nothing wants any more: those to empty, as somebody else's rule leads to them, unless
// they are empty already, and those to remove.
func staleChains(t names.Table, held kernelTable, fixed *Fixed) (emptied block, removed []string) {
	others := maps.Clone(held)
	// What leads from built-in chains to ours goes before.
	maps.DeleteFunc(others, func(name string, _ []string) bool { return names.Builtin(name) })
	removed = obsolete(t, held, fixed.chains(t))
	inUse := usedByOthers(t, others, removed)
	emptied.table = t
	removed = slices.DeleteFunc(removed, func(name string) bool {
		if inUse[name] != "" && len(held[name]) > 0 {
			emptied.write(chain{name: name})
		}
		return inUse[name] != ""
	})
	return emptied, removed
}

func (x *FixedTables) restore(text string) error {
	err := x.kernel.restore(text)
	if err != nil && x.RestoreFailed != nil {
		x.RestoreFailed(x.tool.family)
	}
	return err
}

// OpenWatch opens sockets in the network namespace of the caller's thread, and returns a function that calls suspect, with the
// reason, when another program may have changed what Apply has written, until ctx ends. Where there is an error, only another
// Apply finds out.
func (x *FixedTables) OpenWatch() (func(ctx context.Context, suspect func(why string)), error) {
	return x.watch.open()
}

// Remove takes all rules away that this program or kube-proxy keeps, in any mode, but for those that are shared with the
// kubelet.
func (x *FixedTables) Remove(ctx context.Context) (int, error) { return x.Apply(ctx, &Fixed{}) }

// fixedBlock is the change of one table: chains to fill anew, jumps to chains that nothing wants any more, missing jumps.
func fixedBlock(t names.Table, held kernelTable, fixed *Fixed) (string, int) {
	var declare, rules strings.Builder
	n := 0
	wanted := map[string]bool{}
	for _, c := range fixed.chains(t) {
		wanted[c.name] = true
		if !held.has(c) {
			declare.WriteString(":" + c.name + " - [0:0]\n")
			c.appendTo(&rules, "")
			n++
		}
	}
	jumps := fixed.jumps(t)
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if !names.Builtin(name) {
			continue
		}
		seen := map[string]bool{}
		for _, r := range held[name] {
			mine := slices.ContainsFunc(jumps, func(j FixedJump) bool { return j.From == name && j.Rule == r })
			if names.IsOurs(t, jumpTarget(r)) && (!mine || seen[r]) {
				rules.WriteString("-D " + name + " " + r + "\n")
				n++
			}
			seen[r] = true
		}
	}
	for _, j := range jumps {
		if !held.leads(j.From, j.Rule) {
			rules.WriteString("-I " + j.From + " 1 " + j.Rule + "\n")
			n++
		}
	}
	if n == 0 {
		return "", 0
	}
	return "*" + string(t) + "\n" + declare.String() + rules.String() + "COMMIT\n", n
}

// jumpTarget is where a rule leads; empty if to nowhere.
func jumpTarget(rule string) string {
	for end := len(rule); ; {
		i := strings.LastIndexByte(rule[:end], '-')
		if i < 0 {
			return ""
		}
		if word := rule[i:]; (i == 0 || rule[i-1] == ' ') && (strings.HasPrefix(word, "-j ") || strings.HasPrefix(word, "-g ")) {
			target, _, _ := strings.Cut(word[len("-j "):], " ")
			return target
		}
		end = i
	}
}

// obsolete lists the chains of a table that are ours to remove, and that nothing wants.
func obsolete(t names.Table, held kernelTable, wanted []chain) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if names.IsOurs(t, name) && !slices.ContainsFunc(wanted, func(c chain) bool { return c.name == name }) {
			out = append(out, name)
		}
	}
	return out
}

// removeChains removes chains that no other chain leads to. They may lead to each other, so all are emptied before any goes.
// batch limits how many names a run of iptables-restore may see; 0 for any number.
func removeChains(restore func(string) error, t names.Table, names []string, batch int) error {
	if len(names) == 0 {
		return nil
	}
	if batch == 0 {
		batch = len(names)
	}
	batches := slices.Collect(slices.Chunk(names, batch))
	for _, names := range batches {
		b := block{table: t}
		for _, name := range names {
			b.write(chain{name: name})
		}
		if err := restore(text([]block{b})); err != nil {
			return err
		}
	}
	var errs []error
	for _, names := range batches {
		errs = append(errs, restore(text([]block{{table: t, removes: names}})))
	}
	return errors.Join(errs...)
}

// BaseChains are the chains that every mode has: KUBE-FORWARD, KUBE-MARK-MASQ and KUBE-POSTROUTING.
func BaseChains(o Options, f plan.Family) []FixedChain {
	var out []FixedChain
	for _, c := range baseChains(o, f, form{}) {
		out = append(out, FixedChain{string(c.table), c.name, c.rules})
	}
	return out
}

// FromPods is the match of traffic from pods in a rule, or of all other traffic, with a space behind it; it is empty where all
// traffic is from pods. It is false where the two can't be told apart, or nothing matches.
func FromPods(d plan.DetectLocal, f plan.Family, not bool) (string, bool) {
	if !d.Implemented(f) {
		return "", false
	}
	b := builder{settings: &plan.Settings{DetectLocal: d}}
	r := newRule()
	switch {
	case byCIDR(d) && d.CIDR(f).Bits() == 0:
		return "", !not
	case byCIDR(d) && not:
		r.notSrc(d.CIDR(f))
	case byCIDR(d):
		r.src(d.CIDR(f))
	case not:
		r.word("!").word(b.podInterface()...)
	default:
		r.word(b.podInterface()...)
	}
	return r.b.String() + " ", true
}

// ToNodePorts are rules that send traffic for those of the node's addresses where node ports answer to a chain. It is the
// kernel that says which addresses are the node's, so rules need no change when they do.
func ToNodePorts(s *plan.Settings, node *plan.Node, f plan.Family, comment, target string) []string {
	return toNodePorts(s, node, f, comment, target)
}
