package plan

// Change says how a plan differs from the one before: in these ServicePorts and nothing else, or in ways that are not known, so that
// nothing may be assumed about what was before. The zero Change is the latter.
type Change struct {
	keys  Keys
	known bool // whether keys says it all
}

// Everything is the Change of who can't say what differs: at first, after an error, and where the node or a setting has changed, on
// which every ServicePort may depend.
func Everything() Change { return Change{} }

// Only is the Change of some ServicePorts: those that are new, that differ, and that have vanished. Without any, nothing has
// changed. The set is not copied.
func Only(keys Keys) Change { return Change{keys: keys, known: true} }

// All reports whether nothing may be assumed about what was before.
func (c Change) All() bool { return !c.known }

// None reports whether nothing has changed.
func (c Change) None() bool { return c.known && len(c.keys) == 0 }

// Keys are the ServicePorts that differ. They are none where All is true, which has to be asked first.
func (c Change) Keys() Keys { return c.keys }
