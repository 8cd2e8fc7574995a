package iptables

import (
	"slices"
	"time"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
)

// ofOtherMode reports whether a chain is one that only other modes have.
func ofOtherMode(t names.Table, name string) bool {
	return names.IsOurs(t, name) && !names.InMode(names.ModeIPTables, t, name)
}

// mangleTime is for how long syncs fail because table mangle can't be read, before it is left alone.
const mangleTime = 15 * time.Second

// leaveOtherModes removes the rules that lead to chains of another mode, and then those of these chains that this mode lacks. As long as it is
// not known what the kernel holds, it looks into table mangle as well: others may have emptied tables nat and filter, and left that. This mode
// itself has nothing there, so if it can't be read, it gives up in the end.
func (f *fullSync) leaveOtherModes() error {
	held := f.otherModeHeld()
	if f.current != nil && !held {
		return nil
	}
	switch err := f.readMangle(); {
	case err == nil:
		f.mangleFailed = time.Time{}
	case held || f.ctx.Err() != nil:
		return err
	case f.mangleFailed.IsZero():
		f.mangleFailed = time.Now()
		return err
	case time.Since(f.mangleFailed) < mangleTime:
		return err
	default:
		f.log.Warn("table mangle can't be read: if another mode has left chains there, they stay", "family", f.family, "error", err)
		f.mangleFailed = time.Time{}
	}
	for _, t := range names.Tables {
		jumps := xtables.Diff(t, xtables.Desired{StaleJump: ofOtherMode}, f.actual[t])
		if err := f.write(jumps); err != nil {
			return err
		}
	}
	return f.prune(names.Mangle)
}

// readMangle reads table mangle, if it has chains of another mode.
func (f *fullSync) readMangle() error {
	exists, err := f.Kernel.Exists(names.Mangle)
	if err != nil || !exists { // A program of the legacy variant would make it.
		return err
	}
	r, err := f.Kernel.Read(f.ctx, names.Mangle)
	if err != nil || !slices.ContainsFunc(r.Names, func(name string) bool { return ofOtherMode(names.Mangle, name) }) {
		return err
	}
	f.actual[names.Mangle], err = f.Kernel.Save(f.ctx, names.Mangle)
	return err
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
