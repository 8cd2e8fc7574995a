package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables/expr"

	"nodeproxy/config"
	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/nft/nfttest"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/nftables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// nftRules are tables of nftables. A nodeproxy may be in mode iptables, too: each mode removes what the other one has left.
type nftRules struct {
	*nfttest.Kernel
	xtables xtablesRules
	world   *world
	program *nft.Conn // of others
}

func newNFTRules(w *world) nodeRules {
	// A nodeproxy whose trial fails at its start ends, and is started again by whatever has started it.
	n := &nftRules{Kernel: &nfttest.Kernel{Draw: w.draw, Spared: names.NFTables + "-trial"}, xtables: newTables(w), world: w}
	n.xtables.Locker = n.Kernel // One lock is for all.
	n.Changed = func(c nfttest.Change) {
		if !c.By.Instant {
			w.changed(c.Family, nftProcess{c.By}, c.Input)
			return
		}
		if w.foreign[c.Family] = n.others(c.Family); c.Tables[names.NFTables] {
			w.disturb(c.Family)
		}
	}
	others := n.Start()
	others.Instant = true
	n.program = connect(others)
	return n
}

func connect(p *nfttest.Process) *nft.Conn {
	s, err := p.Open()
	if err != nil {
		panic(err)
	}
	return nft.NewConn(s)
}

// nftProcess is a process that writes tables of nftables itself.
type nftProcess struct{ *nfttest.Process }

func (p nftProcess) Kill(bool) { p.Process.Kill() }

// bothProcess is a process that may write tables of nftables and of iptables.
type bothProcess struct {
	nftProcess
	xtables *xtablestest.Process
}

func (p bothProcess) Kill(all bool) {
	p.nftProcess.Kill(all)
	p.xtables.Kill(all)
}

func (p bothProcess) Written() int { return p.nftProcess.Written() + p.xtables.Written() }

func (n *nftRules) start() (ruleWriter, func(*config.Config) machine) {
	p := bothProcess{nftProcess{n.Start()}, n.xtables.Start()}
	return p, func(cfg *config.Config) machine {
		sockets, tables := &nftables.Sockets{Open: p.Open, Subscribe: p.Subscribe}, tablesFor(p.xtables)
		if cfg.Mode == iptablesMode.name {
			return machine{kernel: tables, left: map[string]any{nftablesMode.name: sockets}}
		}
		return machine{kernel: sockets, left: map[string]any{iptablesMode.name: tables}}
	}
}

// inIPTables reports whether nodeproxy is in mode iptables.
func (n *nftRules) inIPTables() bool { return n.world.cfg.Mode == iptablesMode.name }

func (n *nftRules) suffer(r *rand.Rand) string {
	if n.inIPTables() != (r.IntN(4) == 0) { // else what the other mode has left
		return "tables of iptables: " + n.xtables.suffer(r)
	}
	what, long := nfttest.Trouble(r.IntN(int(nfttest.Troubles))), time.Duration(r.Int64N(int64(8*time.Second)))
	n.Suffer(what, long)
	return fmt.Sprint(what, " for ", long)
}

func (n *nftRules) calm() {
	n.Suffer(0, 0)
	n.xtables.calm()
}

func (n *nftRules) leftover(f plan.Family) bool {
	if n.inIPTables() {
		list, err := n.Chains(f, names.NFTables)
		return err != nil || len(list) > 0
	}
	return n.hasChains(f)
}

// hasChains reports whether there is a chain of mode iptables.
func (n *nftRules) hasChains(f plan.Family) bool {
	for t, content := range n.xtables.Kernels[f].Tables {
		for name := range content {
			if names.IsOurs(t, name) {
				return true
			}
		}
	}
	return false
}

func (n *nftRules) others(f plan.Family) string {
	return n.Others(f, names.NFTables) + n.xtables.others(f)
}

func (n *nftRules) differs(f plan.Family, p *plan.Plan, settled bool) (why string) {
	if n.inIPTables() {
		why = n.xtables.differs(f, p, settled)
	} else {
		why = n.tableDiffers(f, p, settled)
	}
	if why == "" && settled && n.leftover(f) {
		why = "something of another mode is left"
	}
	return why
}

// tableDiffers is differs for the table of nftables.
func (n *nftRules) tableDiffers(f plan.Family, p *plan.Plan, settled bool) string {
	still := n.Still().Start()
	o := renderedNFTables(n.world.cfg)
	o.TCPLiberal = conntrack.TCPLiberal()
	have, err := nftables.Read(&nftables.Sockets{Open: still.Open}, f, o)
	if err != nil {
		return err.Error()
	}
	for _, h := range nftables.Diff(f, have, nftables.Planned(p, f, o, have)) {
		if h.Kind == drift.Chain && len(h.Want) == 0 && !settled {
			continue // A comparison removes what leads to a chain that no Service needs, and then the chain.
		}
		return fmt.Sprintf("%s %s has %q, want %q", f, h.Object, h.Have, h.Want)
	}
	return ""
}

func (n *nftRules) packets(f plan.Family) (*packetsim.Machine, error) {
	list, err := n.Chains(f, names.NFTables)
	if err != nil {
		return nil, err
	}
	var chains []nft.Chain
	for _, c := range list {
		chains = append(chains, c.Chain)
	}
	elements, err := n.Elements(f, names.NFTables)
	m := nftables.MachineOf(f, chains, elements)
	if err != nil || !n.hasChains(f) {
		return m, err
	}
	both, err := n.xtables.packets(f)
	if err != nil {
		return nil, err
	}
	both.Tables[names.NFTables] = m.Tables[names.NFTables]
	for _, c := range chains {
		if h := c.Hook; h != nil {
			both.Attach(names.NFTables, m.Tables[names.NFTables][c.Name], packetsim.Hook(strings.ToUpper(h.Name)), int(h.Priority), h.Type == "nat")
		}
	}
	return both, nil
}

// toNFT are what others do to tables of nftables.
var toNFT = []happening{
	{"others-flush-chain", 2, onNFTChain(func(b *nft.Batch, c nfttest.Chain, _ *rand.Rand) string {
		b.FlushChain(c.Name)
		return ""
	})},
	{"others-delete-rule", 2, onNFTChain(func(b *nft.Batch, c nfttest.Chain, r *rand.Rand) string {
		if len(c.Handles) == 0 {
			return "is empty"
		}
		i := r.IntN(len(c.Handles))
		b.DeleteRule(c.Name, c.Handles[i])
		return fmt.Sprint("rule ", i)
	})},
	{"others-add-rule", 2, onNFTChain(func(b *nft.Batch, c nfttest.Chain, _ *rand.Rand) string {
		return addRule(b, c.Name, &expr.Verdict{Kind: expr.VerdictReturn})
	})},
	{"others-delete-chain", 1, onNFTChain(func(b *nft.Batch, c nfttest.Chain, _ *rand.Rand) string {
		b.DeleteChain(c.Name) // The kernel may refuse that.
		return ""
	})},
	{"others-add-chain", 1, onNFTTable(func(w *world, b *nft.Batch, f plan.Family, r *rand.Rand) string {
		c := nft.Chain{Name: fmt.Sprint("stolen-", r.IntN(3))}
		if r.IntN(2) == 0 {
			c.Hook = &nft.Hook{Type: "filter", Name: "forward", Priority: 1}
		}
		b.AddChain(c)
		return c.Name + " " + addRule(b, c.Name, &expr.Verdict{Kind: expr.VerdictDrop})
	})},
	{"others-delete-elements", 3, onElements(func(b *nft.Batch, s nft.Set, list []nft.Element, r *rand.Rand) string {
		r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		list = list[:min(1+r.IntN(20), len(list))]
		b.DeleteElements(s, list)
		return fmt.Sprint(len(list))
	})},
	{"others-flush-set", 1, onElements(func(b *nft.Batch, s nft.Set, list []nft.Element, _ *rand.Rand) string {
		b.DeleteElements(s, list)
		return fmt.Sprint(len(list))
	})},
	{"others-change-element", 2, onElements(func(b *nft.Batch, s nft.Set, list []nft.Element, r *rand.Rand) string {
		i, j := r.IntN(len(list)), r.IntN(len(list))
		to := list[j]
		to.Key = list[i].Key
		b.DeleteElements(s, list[i:i+1])
		b.AddElements(s, []nft.Element{to})
		return fmt.Sprintf("%x", to.Key)
	})},
	{"others-add-element", 2, onElements(func(b *nft.Batch, s nft.Set, list []nft.Element, r *rand.Rand) string {
		el := list[r.IntN(len(list))]
		if key := []byte(el.Key); r.IntN(4) == 0 || len(key) == 0 {
			el.Key = ""
		} else if key[0] ^= byte(1 + r.IntN(255)); s.Name != names.NFTServices { // Else it is a Service at which nobody looks.
			el.Key = string(key)
		}
		b.AddElements(s, []nft.Element{el})
		return fmt.Sprintf("%x", el.Key)
	})},
	{"others-delete-table", 1, onNFTTable(func(_ *world, b *nft.Batch, _ plan.Family, _ *rand.Rand) string {
		b.DeleteTable()
		return ""
	})},
	{"switch-mode", 2, (*world).switchMode},
	{"others-write-own", 2, func(w *world, r *rand.Rand) string {
		f := plan.Families[r.IntN(2)]
		b := nft.NewBatch(f, fmt.Sprint("others-", r.IntN(3)))
		b.AddTable()
		b.AddChain(nft.Chain{Name: names.NFTServices})
		return f.String() + addRule(b, names.NFTServices, &expr.Verdict{Kind: expr.VerdictReturn}) + w.commit(b)
	}},
}

// addRule adds a rule of others to a chain.
func addRule(b *nft.Batch, chain string, e expr.Any) string {
	c := nft.Chain{Name: chain, Rules: []nft.Rule{{Text: "theirs", Exprs: []expr.Any{e}}}}
	if err := b.AddRules(c); err != nil {
		panic(err)
	}
	return ""
}

// commit carries out a transaction of others.
func (w *world) commit(b *nft.Batch) string {
	if err := w.rules.(*nftRules).program.Commit(b); err != nil {
		return " refused: " + err.Error()
	}
	return ""
}

// onNFTTable returns what others do to the table of a family.
func onNFTTable(do func(w *world, b *nft.Batch, f plan.Family, r *rand.Rand) string) func(*world, *rand.Rand) string {
	return func(w *world, r *rand.Rand) string {
		if w.rules.(*nftRules).inIPTables() {
			return "has none"
		}
		f := plan.Families[r.IntN(2)]
		b := nft.NewBatch(f, names.NFTables)
		words := do(w, b, f, r)
		return fmt.Sprintf("%s %s%s", f, words, w.commit(b))
	}
}

// onNFTChain returns what others do to a chain.
func onNFTChain(do func(b *nft.Batch, c nfttest.Chain, r *rand.Rand) string) func(*world, *rand.Rand) string {
	return onNFTTable(func(w *world, b *nft.Batch, f plan.Family, r *rand.Rand) string {
		w.rules.Lock()
		list, err := w.rules.(*nftRules).Chains(f, names.NFTables)
		w.rules.Unlock()
		if len(list) == 0 || err != nil {
			return fmt.Sprint("has no chains ", err)
		}
		slices.SortFunc(list, func(a, b nfttest.Chain) int { return strings.Compare(a.Name, b.Name) })
		c := list[r.IntN(len(list))]
		return c.Name + " " + do(b, c, r)
	})
}

// onElements returns what others do to the elements of a set, of which there are some.
func onElements(do func(b *nft.Batch, s nft.Set, list []nft.Element, r *rand.Rand) string) func(*world, *rand.Rand) string {
	return onNFTTable(func(w *world, b *nft.Batch, f plan.Family, r *rand.Rand) string {
		w.rules.Lock()
		sets, err := w.rules.(*nftRules).Elements(f, names.NFTables)
		w.rules.Unlock()
		maps.DeleteFunc(sets, func(_ string, list []nft.Element) bool { return len(list) == 0 })
		if len(sets) == 0 || err != nil {
			return fmt.Sprint("has no elements ", err)
		}
		name := slices.Sorted(maps.Keys(sets))[r.IntN(len(sets))]
		return name + " " + do(b, nft.Set{Name: name}, sets[name], r)
	})
}
