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

// digests are the digests of chains (xtables.Reading.Digests); 0 of a chain that has to be compared.
type digests map[tableChainName]uint64

// has reports whether the digest of a chain is known.
func (d digests) has(c xtables.Chain) bool { return d[tableChainName{c.Table, c.Name}] != 0 }

// snapshot begins a comparison; nil if it is not known what the kernel should hold, or if a sync of everything has something to try.
func (e *engine) snapshot() *comparison {
	e.syncing.Lock()
	defer e.syncing.Unlock()
	if !e.comparable() {
		return nil
	}
	c := &comparison{engine: e, rules: e.current.snapshot(), full: e.full, before: e.right, right: digests{},
		readings: map[names.Table]*xtables.Reading{}, rest: map[names.Table]map[string]bool{}, lost: map[names.Table]bool{},
		part: map[names.Table][]xtables.Chain{}, size: map[names.Table]int{}}
	e.touched, e.right = map[tableChainName]bool{}, nil
	return c
}

// end ends a comparison, which has compared everything or has not.
func (c *comparison) end(everything bool) {
	c.syncing.Lock()
	defer c.syncing.Unlock()
	if everything && len(c.right) > 0 && c.current != nil && c.engine.full == c.full {
		c.engine.right = c.right
	}
	touched := c.touched
	c.touched = nil
	for name := range touched {
		c.touch(name)
	}
}

// touch notes that a chain is written. Syncs must not run, but for the caller's.
func (e *engine) touch(name tableChainName) {
	if e.touched != nil {
		e.touched[name] = true
	}
	if e.right != nil {
		e.right[name] = 0
	}
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
//
// A chain that is what it was when it was found right, and that no sync has written since, is right: to tell that by its digest takes a small
// part of the time that it takes to make the rules of the chain, and to read them by a program of iptables.
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
	// before are the digests of the comparison before, and right those of what is right by them or by this one. lost are the tables that
	// have lost a chain of another program.
	before, right digests
	lost          map[names.Table]bool
	differs       []xtables.Change
	// written are the chains that syncs had written when the tables had been listed. They are not compared, as the rules of the snapshot may not
	// be theirs any more, and the legacy variant would read them for nothing.
	written map[tableChainName]bool
}

// CompareBeside implements backend.Engine.
func (e *engine) CompareBeside(ctx context.Context) (found drift.Found, again bool, err error) {
	generation := e.Kernel.Generation()
	c := e.snapshot()
	if c == nil {
		return nil, true, nil
	}
	c.ctx = ctx
	e.asItShould = 0
	few := false
	defer func() { c.end(few) }()
	if few, err = c.compare(); !few {
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
		if err := c.recognize(t); err != nil {
			return false, err
		}
	}
	if c.recognizedAll() {
		c.allowLocalnet()
		return true, nil
	}
	c.syncing.Lock()
	c.written = maps.Clone(c.touched)
	c.syncing.Unlock()
	few = true
	for chain := range c.rules.chains(c.right) {
		t := chain.Table
		if delete(c.rest[t], chain.Name); c.right.has(chain) {
			continue
		}
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
	c.allowLocalnet()
	return true, nil
}

// recognize finds the chains of a table that are as they were when they were found right.
func (c *comparison) recognize(t names.Table) error {
	var known []string
	for chain, digest := range c.before {
		switch {
		case chain.table != t:
		case !c.rest[t][chain.name]:
			c.lost[t] = c.lost[t] || !names.OfService(chain.name)
		case digest != 0:
			known = append(known, chain.name)
		}
	}
	if len(known) == 0 {
		return nil
	}
	now, err := c.readings[t].Digests(known)
	if err != nil {
		return err
	}
	for i, name := range known {
		if at := (tableChainName{t, name}); now[i] == c.before[at] {
			c.right[at] = now[i]
		}
	}
	return nil
}

// recognizedAll reports whether the tables consist of what was found right.
func (c *comparison) recognizedAll() bool {
	there := 0
	for _, r := range c.readings {
		there += len(r.Names)
	}
	return len(c.right) > 0 && len(c.right) == len(c.before) && len(c.right) == there
}

// reading calls read, which reads chains and reports whether they are right, and keeps their digests if they are, and if nothing at all has
// changed meanwhile.
func (c *comparison) reading(t names.Table, chains []string, read func() (right bool, err error)) error {
	if c.readings[t].Digests == nil {
		_, err := read()
		return err
	}
	generation := c.Kernel.Generation()
	now, err := c.readings[t].Digests(chains)
	if err != nil {
		return err
	}
	right, err := read()
	if err != nil {
		return err
	}
	right = right && generation != 0 && c.Kernel.Generation() == generation
	for i, name := range chains {
		if !right {
			now[i] = 0
		}
		c.right[tableChainName{t, name}] = now[i]
	}
	return nil
}

// allowLocalnet makes the kernel setting that node ports at localhost need.
func (c *comparison) allowLocalnet() {
	if c.rules.localnet() {
		c.syncing.Lock()
		defer c.syncing.Unlock()
		c.openLocalnet()
	}
}

// comparePart compares the next chains of a table.
func (c *comparison) comparePart(t names.Table) (few bool, err error) {
	part := slices.DeleteFunc(c.part[t], func(chain xtables.Chain) bool { return c.written[tableChainName{t, chain.Name}] })
	if c.part[t], c.size[t] = nil, 0; len(part) == 0 {
		return true, nil
	}
	list, known := make([]string, 0, len(part)), make(xtables.Content, len(part))
	for _, chain := range part {
		list, known[chain.Name] = append(list, chain.Name), chain.Rules
	}
	err = c.reading(t, list, func() (right bool, err error) {
		actual, err := c.readings[t].Chains(c.ctx, list, known)
		if err != nil {
			return false, err
		}
		changes := xtables.Diff(t, xtables.Desired{Chains: part}, actual)
		few = c.note(changes)
		return len(changes) == 0, nil
	})
	return few, err
}

// compareRest compares what a table has besides: jumps from built-in chains, and chains that should not be there. To know what leads
// to those, it reads the chains of others too, unless all are as they were.
func (c *comparison) compareRest(t names.Table) (few bool, err error) {
	rest := slices.DeleteFunc(slices.Sorted(maps.Keys(c.rest[t])), func(name string) bool {
		return names.OfService(name) && c.written[tableChainName{t, name}]
	})
	if len(rest) > 0 && !c.lost[t] && !slices.ContainsFunc(rest, func(name string) bool { return c.right[tableChainName{t, name}] == 0 }) {
		return true, nil
	}
	err = c.reading(t, rest, func() (right bool, err error) {
		actual := xtables.Content{}
		for list := range slices.Chunk(rest, partOfRest) {
			some, err := c.readings[t].Chains(c.ctx, list)
			if err != nil {
				return false, err
			}
			maps.Copy(actual, some)
		}
		d := xtables.Desired{Jumps: jumps(c.rules.localnet()), StaleJump: ofOtherMode}
		d.Stale = func(t names.Table, name string) bool { return names.OfService(name) || ofOtherMode(t, name) }
		changes := xtables.Diff(t, d, actual)
		few = c.note(changes)
		if t == names.Filter && c.rules.localnet() && !slices.Contains(actual[names.KubeletFirewall], localnetGuard()) {
			few = false
		}
		return len(changes) == 0, nil
	})
	return few, err
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
		actual, err := c.readAgain(t, slices.Compact(list))
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
	if len(writes) > 0 { // A rule that has just been repaired may have led to one.
		c.ForgetStuck()
	}
	return found, false, nil
}

// readAgain reads chains of a table that differ from what was written, and more where a table can only be read as a whole.
func (c *comparison) readAgain(t names.Table, chains []string) (xtables.Content, error) {
	if c.readings[t].Digests == nil {
		return c.Kernel.Save(c.ctx, t)
	}
	r, err := c.Kernel.Read(c.ctx, t)
	if err != nil {
		return nil, err
	}
	return r.Chains(c.ctx, chains)
}
