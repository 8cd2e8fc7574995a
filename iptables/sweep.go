package iptables

import (
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
)

// ofOtherMode reports whether a chain is one that only other modes have.
func ofOtherMode(t names.Table, name string) bool {
	return names.IsOurs(t, name) && !names.InMode(names.ModeIPTables, t, name)
}

// leaveOtherModes removes the rules that lead to chains of another mode, and then those chains that are in no table of this one. The first
// sync looks for them in any case: programs that empty tables nat and filter may have left those in table mangle alone.
func (f *fullSync) leaveOtherModes() error {
	if f.current != nil && !f.otherModeHeld() {
		return nil
	}
	exists, err := f.Kernel.Exists(names.Mangle)
	if err == nil && exists {
		f.actual[names.Mangle], err = f.Kernel.Save(f.ctx, names.Mangle)
	}
	if err != nil {
		return err
	}
	for _, t := range names.Tables {
		jumps := xtables.Diff(t, xtables.Desired{StaleJump: ofOtherMode}, f.actual[t])
		if err := f.write(jumps); err != nil {
			return err
		}
	}
	return f.prune(names.Mangle)
}

func (f *fullSync) otherModeHeld() bool {
	for _, t := range tables {
		for name := range f.actual[t] {
			if ofOtherMode(t, name) {
				return true
			}
		}
	}
	return false
}

// prune removes the chains of a table that nothing wants.
func (f *fullSync) prune(t names.Table) error {
	stale := func(t names.Table, name string) bool {
		return (names.OfService(name) || ofOtherMode(t, name)) && !f.wanted[tableChainName{t, name}]
	}
	changes := xtables.Diff(t, xtables.Desired{Stale: stale}, f.actual[t])
	for _, c := range changes {
		switch c.Op {
		case xtables.Empty:
			f.log.Warn("a chain that is no longer needed is emptied, but stays, since a rule of another program leads to it",
				"family", f.family, "table", string(t), "chain", c.Chain, "from", c.By)
		case xtables.Remove:
			f.removed++
		}
	}
	return f.Prune(f.ctx, f.actual, changes, f.Stays)
}
