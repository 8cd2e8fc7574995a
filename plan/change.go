package plan

// Change says how a plan differs from the previous one: either only in certain ServicePorts, or in ways that are not known, so that
// nothing may be assumed about the previous state. The zero Change is the latter, Everything.
type Change struct {
	keys  Keys
	known bool // only the ServicePorts in keys differ
}

// Everything returns a Change after which nothing may be assumed: the first one, one after an error, and one of the node or of a
// setting, on which every ServicePort may depend.
func Everything() Change { return Change{} }

// Only returns a Change of certain ServicePorts, which are new, differ or have vanished. If there are none, nothing has changed. The set
// is not copied.
func Only(keys Keys) Change { return Change{keys: keys, known: true} }

// All reports whether nothing may be assumed about the previous state.
func (c Change) All() bool { return !c.known }

// None reports whether nothing has changed.
func (c Change) None() bool { return c.known && len(c.keys) == 0 }

// Keys returns the ServicePorts that differ. If All is true, it returns none, so callers ask All first.
func (c Change) Keys() Keys { return c.keys }
