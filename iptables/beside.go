package iptables

import (
	"context"
	"maps"
	"slices"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
)

// partOfTable is how many chains and rules are read at a time: the nft variant takes about 20 ms for them, and begins anew if anything in
// nf_tables changes meanwhile. Of what is in the tables besides, whose rules can't be counted before, it is partOfRest chains. mostBeside
// is how many chains and jumps are put right beside syncs.
const (
	partOfTable = 1000
	partOfRest  = 50
	mostBeside  = 250
)

// snapshot is a copy of r that does not change with it.
func (r *rules) snapshot() *rules {
	s := *r
	s.services, s.spared = r.services.Clone(), maps.Clone(r.spared)
	return &s
}

// snapshot begins a comparison; nil if it is not known what the kernel should hold, or if a sync of everything has something to try.
func (e *engine) snapshot() (s *rules, full int) {
	e.syncing.Lock()
	defer e.syncing.Unlock()
	if !e.comparable() {
		return nil, 0
	}
	e.touched = map[tableChainName]bool{}
	return e.current.snapshot(), e.full
}

// comparable reports whether it is known what the kernel should hold, and no sync of everything has something to try.
func (e *engine) comparable() bool { return e.current != nil && e.kept == nil && !e.refusedIsDue() }

// Unchanged is AllUnchanged by the number that the kernel gives each state of nf_tables.
func (b *Backend) Unchanged() bool { return b.AllUnchanged((*engine).unchanged) }

// unchanged is Unchanged for one family. The sysctl that node ports at localhost need is no part of what is numbered.
func (e *engine) unchanged() bool {
	if e.asItShould == 0 || !e.comparable() || e.Kernel.Generation() != e.asItShould {
		return false
	}
	if e.current.localnet() {
		e.openLocalnet()
	}
	return true
}

// comparison is the work of one CompareBeside. While the tables are read, syncs go on. What they have written since the comparison
// began is as it should be, unless others have changed it since: that is noticed, and leads to another one.
type comparison struct {
	*engine
	ctx   context.Context
	rules *rules // what the tables should hold, but for what syncs have written
	full  int
	// readings, rest and part are by table: rest are the chains of the table that have not been compared yet, and part those to compare
	// next.
	readings map[names.Table]*xtables.Reading
	rest     map[names.Table]map[string]bool
	part     map[names.Table][]xtables.Chain
	size     map[names.Table]int // of part
	differs  []xtables.Change
}

// CompareBeside implements backend.Engine.
func (e *engine) CompareBeside(ctx context.Context) (found drift.Found, again bool, err error) {
	generation := e.Kernel.Generation()
	s, full := e.snapshot()
	if s == nil {
		return nil, true, nil
	}
	e.asItShould = 0
	defer func() {
		e.syncing.Lock()
		defer e.syncing.Unlock()
		e.touched = nil
	}()
	c := &comparison{engine: e, ctx: ctx, rules: s, full: full, readings: map[names.Table]*xtables.Reading{},
		rest: map[names.Table]map[string]bool{}, part: map[names.Table][]xtables.Chain{}, size: map[names.Table]int{}}
	if few, err := c.compare(); err != nil || !few {
		return nil, true, err
	}
	if len(c.differs) == 0 {
		e.asItShould = generation // If syncs have written meanwhile, it is another one now.
	}
	return c.repair()
}

// compare looks for what differs, and reports whether that can be put right beside syncs. If not, it ends at once.
func (c *comparison) compare() (few bool, err error) {
	for _, t := range tables {
		if c.readings[t], err = c.Kernel.Read(c.ctx, t); err != nil {
			return false, err
		}
		c.rest[t] = make(map[string]bool, len(c.readings[t].Names))
		for _, name := range c.readings[t].Names {
			c.rest[t][name] = true
		}
	}
	few = true
	for chain := range c.rules.chains() {
		t := chain.Table
		c.part[t] = append(c.part[t], chain)
		if c.size[t] += 1 + len(chain.Rules); c.size[t] >= partOfTable {
			if few, err = c.comparePart(t); err != nil || !few {
				return few, err
			}
		}
	}
	for _, t := range tables {
		if few, err = c.comparePart(t); err != nil || !few {
			return few, err
		}
		if few, err = c.compareRest(t); err != nil || !few {
			return few, err
		}
		c.readings[t].End()
	}
	return true, nil
}

// comparePart compares the next chains of a table.
func (c *comparison) comparePart(t names.Table) (few bool, err error) {
	part := c.part[t]
	c.part[t], c.size[t] = nil, 0
	list, known := make([]string, 0, len(part)), make(xtables.Content, len(part))
	for _, chain := range part {
		list, known[chain.Name] = append(list, chain.Name), chain.Rules
		delete(c.rest[t], chain.Name)
	}
	actual, err := c.readings[t].Chains(c.ctx, list, known)
	if err != nil {
		return false, err
	}
	return c.note(xtables.Diff(t, xtables.Desired{Chains: part}, actual)), nil
}

// compareRest compares what a table has besides: jumps from built-in chains, and chains that should not be there. To know what leads
// to those, it reads the chains of others too.
func (c *comparison) compareRest(t names.Table) (few bool, err error) {
	actual := xtables.Content{}
	for list := range slices.Chunk(slices.Sorted(maps.Keys(c.rest[t])), partOfRest) {
		some, err := c.readings[t].Chains(c.ctx, list)
		if err != nil {
			return false, err
		}
		maps.Copy(actual, some)
	}
	d := xtables.Desired{Jumps: jumps(c.rules.localnet()), StaleJump: ofOtherMode}
	d.Stale = func(t names.Table, name string) bool { return names.OfService(name) || ofOtherMode(t, name) }
	few = c.note(xtables.Diff(t, d, actual))
	if t == names.Filter && c.rules.localnet() {
		if !slices.Contains(actual[names.KubeletFirewall], localnetGuard()) {
			return false, nil
		}
		c.syncing.Lock()
		c.openLocalnet()
		c.syncing.Unlock()
	}
	return few, nil
}

// note notes what differs, and reports whether all of that can be put right beside syncs.
func (c *comparison) note(changes []xtables.Change) (few bool) {
	if len(changes) == 0 {
		return true
	}
	c.syncing.Lock()
	defer c.syncing.Unlock()
	if c.engine.full != c.full {
		return true // A sync of everything has compared what there is, or failed: see repair.
	}
	c.differs = append(c.differs, c.untouched(changes)...)
	return len(c.differs) <= mostBeside && !slices.ContainsFunc(c.differs, func(change xtables.Change) bool {
		return change.Op != xtables.Write && (change.Op != xtables.Insert || xtables.Target(change.Rules[0]) == names.KubeletFirewall)
	})
}

// untouched leaves out what syncs have written since the comparison began, and what can't be put right. Syncs must not run.
func (c *comparison) untouched(changes []xtables.Change) []xtables.Change {
	return slices.DeleteFunc(c.WithoutStuck(changes), func(change xtables.Change) bool {
		return change.Op == xtables.Leave || c.touched[tableChainName{change.Table, change.Chain}]
	})
}

// repair puts right what still differs, while syncs wait. Only then it is sure that it is no change of a sync that was read in half.
func (c *comparison) repair() (found drift.Found, again bool, err error) {
	if len(c.differs) == 0 {
		return nil, false, nil
	}
	defer c.writing()()
	c.syncing.Lock()
	defer c.syncing.Unlock()
	if c.current == nil || c.engine.full != c.full {
		return nil, c.current == nil, nil // A sync has compared everything, or failed.
	}
	c.differs = c.untouched(c.differs)
	var writes []xtables.Change
	for _, t := range tables {
		var d xtables.Desired
		var list []string
		for _, change := range c.differs {
			switch {
			case change.Table != t:
				continue
			case change.Op == xtables.Write:
				d.Chains = append(d.Chains, xtables.Chain{Table: t, Name: change.Chain, Rules: change.Rules})
			default:
				d.Jumps = append(d.Jumps, xtables.Jump{Table: t, From: change.Chain, Rule: change.Rules[0]})
			}
			list = append(list, change.Chain)
		}
		if len(list) == 0 {
			continue
		}
		slices.Sort(list)
		actual, err := c.read(c.ctx, t, slices.Compact(list))
		if err != nil {
			return nil, true, err
		}
		writes = append(writes, xtables.Diff(t, d, actual)...)
	}
	c.counts.begin()
	found = xtables.Drift(c.family, writes)
	if err := c.Write(c.ctx, nil, writes); err != nil {
		c.current = nil
		return found, true, err
	}
	return found, false, nil
}

// read reads some chains of a table.
func (e *engine) read(ctx context.Context, t names.Table, chains []string) (xtables.Content, error) {
	r, err := e.Kernel.Read(ctx, t)
	if err != nil {
		return nil, err
	}
	return r.Chains(ctx, chains)
}
