package conntrack

// Parse reads a flow.
func (f *Flow) Parse(b []byte) bool { return f.parse(b) }

// HasKey reports whether a flow can be deleted.
func (f *Flow) HasKey() bool { return len(f.orig) > 0 }
