package nftables

import (
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// HandOver puts what a plan asks for into the tables of a kube-proxy in mode nftables, and removes those of this program. Such a
// kube-proxy removes the rules of all other modes when it starts, but leaves its own tables as they are until its first transaction, which
// makes the chains with hooks anew. Those here have the same names, so they are in force until then, and no longer. What they lead to
// stays behind without effect; its names begin with names.HandedOver, as none of kube-proxy's does.
func HandOver(p *plan.Plan, families []plan.Family, o Options) error {
	var errs []error
	for _, f := range families {
		err := handOver(p, f, o)
		if err == nil {
			if err = nft.DeleteTable(f, names.NFTables); errors.Is(err, unix.ENOENT) { // In other modes there is none.
				err = nil
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f, err))
		}
	}
	return errors.Join(errs...)
}

// handOver writes the table of a family. It takes several transactions, as no packet comes to the table before the last one.
func handOver(p *plan.Plan, f plan.Family, o Options) error {
	c, err := nft.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	b := nft.NewBatch(f, names.KubeProxy)
	b.AddTable()
	b.DeleteTable() // What a hand-over before this one has left.
	b.AddTable()
	sets := o.sets(f)
	for i := range sets {
		sets[i].Name = names.HandedOver + sets[i].Name
		b.AddSet(sets[i])
	}
	l := layoutOf(p, f, o)
	var hooked, others []nft.Chain
	for _, ch := range l.chains() {
		switch ch = handedOver(ch); {
		case ch.Hook == nil:
			others = append(others, ch)
		case ch.Name != "": // Others only refuse what is for no Service, and have had other priorities in kube-proxy.
			hooked = append(hooked, ch)
		}
	}
	if err := b.AddChains(others); err != nil {
		return err
	}
	waiting, added := 0, make([][]nft.Element, len(sets))
	put := func(i id, v value) {
		if v.chain != "" {
			v.chain = names.HandedOver + v.chain
		}
		added[i.set] = append(added[i.set], i.element(v))
		waiting++
	}
	commit := func() error {
		for i, list := range added {
			b.AddElements(sets[i], list)
			added[i] = list[:0]
		}
		err := c.Commit(b)
		b, waiting = nft.NewBatch(f, names.KubeProxy), 0
		return err
	}
	used := map[kind]bool{}
	for _, sp := range p.Sorted(f) {
		for _, el := range l.elements(place(written{}, sp), used) {
			if put(el.id, el.value); waiting < mostInTransaction {
				continue
			}
			if err := commit(); err != nil {
				return err
			}
		}
	}
	for _, ch := range l.kindChains(used) {
		hooked = append(hooked, handedOver(ch))
	}
	for i, v := range fixed(used) {
		put(i, v)
	}
	if err := b.AddChains(hooked); err != nil {
		return err
	}
	return commit()
}

// handedOver returns a chain as it is in kube-proxy's table. One with a hook is in the place of a chain of kube-proxy's, and has no name
// if there is none.
func handedOver(c nft.Chain) nft.Chain {
	if c.Hook == nil {
		c.Name = names.HandedOver + c.Name
	} else {
		c.Name = names.KubeProxyBases[c.Name]
		hook := *c.Hook
		hook.Priority++ // priorityDNAT and prioritySNAT are just before kube-proxy's.
		c.Hook = &hook
	}
	c.Rules = slices.Clone(c.Rules)
	for i := range c.Rules {
		exprs := slices.Clone(c.Rules[i].Exprs)
		for n := range exprs {
			exprs[n] = handedOverExpr(exprs[n])
		}
		c.Rules[i].Exprs = exprs
	}
	return c
}

// handedOverExpr returns an expression with the names that chains and sets have in kube-proxy's table.
func handedOverExpr(of expr.Any) expr.Any {
	switch e := of.(type) {
	case *expr.Verdict:
		if e.Chain != "" {
			return &expr.Verdict{Kind: e.Kind, Chain: names.HandedOver + e.Chain}
		}
	case *expr.Lookup:
		out := *e
		out.SetName = names.HandedOver + e.SetName
		return &out
	case *expr.Dynset:
		out := *e
		out.SetName = names.HandedOver + e.SetName
		return &out
	}
	return of
}
