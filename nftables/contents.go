package nftables

import (
	"iter"
	"maps"

	"nodeproxy/plan"
)

// contents are the ServicePorts that are in the kernel. A nil *contents is not known.
type contents struct {
	// plain are those that are there as the plan had them, with their endpoints in order, as most are; rest has how the others are there.
	plain *plan.Ports
	rest  map[plan.Key]written
}

func newContents() *contents { return &contents{plan.NewPorts(), map[plan.Key]written{}} }

// of returns what is there of a ServicePort; the zero value if nothing is.
func (c *contents) of(k plan.Key) written {
	if c == nil {
		return written{}
	}
	if sp := c.plain.Get(k); sp != nil {
		return written{sp: sp}
	}
	return c.rest[k]
}

// put notes what is there of a ServicePort, in place of what was.
func (c *contents) put(k plan.Key, w written) {
	c.remove(k)
	if w.sp != nil && w.numbers == nil && !w.withoutSources && w.others == nil && w.upTo == nil {
		c.plain.Put(w.sp)
	} else {
		c.rest[k] = w
	}
}

func (c *contents) remove(k plan.Key) {
	c.plain.Delete(k)
	delete(c.rest, k)
}

func (c *contents) len() int { return c.plain.Len() + len(c.rest) }

// all iterates over what there is, in no order.
func (c *contents) all() iter.Seq2[plan.Key, written] {
	return func(yield func(plan.Key, written) bool) {
		for sp := range c.plain.All() {
			if !yield(sp.Key, written{sp: sp}) {
				return
			}
		}
		for k, w := range c.rest {
			if !yield(k, w) {
				return
			}
		}
	}
}

func (c *contents) clone() *contents { return &contents{c.plain.Clone(), maps.Clone(c.rest)} }
