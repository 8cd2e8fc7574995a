package plan

// Change says how a plan differs from the previous one: either only in certain ServicePorts, or in any way, and then nothing may be
// assumed about the previous state unless the Change says so. The zero Change is Everything.
type Change struct {
	keys  Keys
	known bool // only the ServicePorts in keys differ
	sure  bool // what is known of the previous state holds
}

// Everything returns a Change after which nothing may be assumed: the first one, one after an error, and one after a doubt.
func Everything() Change { return Change{} }

// EveryService returns a Change of the node or of a setting, on which every ServicePort may depend. The previous state is what was written.
func EveryService() Change { return Change{sure: true} }

// Only returns a Change of certain ServicePorts, which are new, differ or have vanished. If there are none, nothing has changed. The set
// is not copied.
func Only(keys Keys) Change { return Change{keys: keys, known: true, sure: true} }

// All reports whether every ServicePort may differ.
func (c Change) All() bool { return !c.known }

// Unknown reports whether nothing may be assumed about the previous state either, so that it has to be read.
func (c Change) Unknown() bool { return !c.sure }

// None reports whether nothing has changed.
func (c Change) None() bool { return c.known && len(c.keys) == 0 }

// Keys returns the ServicePorts that differ. If All is true, it returns none, so callers ask All first.
func (c Change) Keys() Keys { return c.keys }
