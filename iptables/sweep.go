package iptables

import (
	"maps"
	"slices"
	"strings"
)

// leaveOtherModes removes the rules that lead to chains of another mode, and then those that are in no table of this one.
// Where there are some in table mangle, there are in the others too, which are read anyway.
func (f *fullSync) leaveOtherModes() error {
	if !f.otherModeHeld() {
		return nil
	}
	mangle, err := f.tool.save(f.ctx, tableMangle)
	if err != nil {
		return err
	}
	for _, t := range fixedTables {
		held := mangle
		if t != tableMangle {
			held = f.held(t)
		}
		var out strings.Builder
		for _, name := range slices.Sorted(maps.Keys(held)) {
			for _, r := range held[name] {
				if builtin(name) && slices.Contains(otherModes[t], jumpTarget(r)) {
					out.WriteString("-D " + name + " " + r + "\n")
				}
			}
		}
		if out.Len() > 0 {
			if err := f.restore("*" + string(t) + "\n" + out.String() + "COMMIT\n"); err != nil {
				return err
			}
		}
	}
	stale := obsolete(tableMangle, mangle, nil)
	f.removed += len(stale)
	return removeChains(f.restore, tableMangle, stale, f.batch)
}

func (f *fullSync) otherModeHeld() bool {
	for _, t := range []table{tableNAT, tableFilter} {
		for name := range f.held(t) {
			if slices.Contains(otherModes[t], name) {
				return true
			}
		}
	}
	return false
}

// sweep removes the chains that nothing wants.
func (f *fullSync) sweep() error {
	for _, t := range []table{tableNAT, tableFilter} {
		var stale []string
		for _, name := range slices.Sorted(maps.Keys(f.held(t))) {
			if (mayBeStale(name) || slices.Contains(otherModes[t], name)) && !f.wanted[t][name] {
				stale = append(stale, name)
			}
		}
		f.removed += len(stale)
		if err := f.ctx.Err(); err != nil {
			return err
		}
		if err := removeChains(f.restore, t, stale, f.batch); err != nil {
			return err
		}
	}
	return nil
}
