package iptables

import (
	"maps"
	"nodeproxy/kernel/names"
	"slices"
	"strings"
)

// leaveOtherModes removes the rules that lead to chains of another mode, and then those that are in no table of this one.
// Where there are some in table mangle, there are in the others too, which are read anyway.
func (f *fullSync) leaveOtherModes() error {
	if !f.otherModeHeld() {
		return nil
	}
	mangle, err := f.tool.save(f.ctx, names.Mangle)
	if err != nil {
		return err
	}
	for _, t := range fixedTables {
		held := mangle
		if t != names.Mangle {
			held = f.held(t)
		}
		var out strings.Builder
		for _, name := range slices.Sorted(maps.Keys(held)) {
			if !names.Builtin(name) {
				continue
			}
			held[name] = slices.DeleteFunc(slices.Clone(held[name]), func(r string) bool {
				leads := ofOtherMode(t, jumpTarget(r))
				if leads {
					out.WriteString("-D " + name + " " + r + "\n")
				}
				return leads
			})
		}
		if out.Len() > 0 {
			if err := f.restore("*" + string(t) + "\n" + out.String() + "COMMIT\n"); err != nil {
				return err
			}
		}
	}
	stale := obsolete(names.Mangle, mangle, nil)
	f.removed += len(stale)
	return removeChains(f.restore, names.Mangle, stale, f.batch)
}

func (f *fullSync) otherModeHeld() bool {
	for _, t := range []names.Table{names.NAT, names.Filter} {
		for name := range f.held(t) {
			if ofOtherMode(t, name) {
				return true
			}
		}
	}
	return false
}

// sweep removes the chains that nothing wants. One that somebody else's rule leads to can't be removed; it is emptied, so that it
// does nothing, and goes when that rule has gone.
func (f *fullSync) sweep() error {
	for _, t := range []names.Table{names.NAT, names.Filter} {
		var stale []string
		for _, name := range slices.Sorted(maps.Keys(f.held(t))) {
			if (names.OfService(name) || ofOtherMode(t, name)) && !f.wanted[t][name] {
				stale = append(stale, name)
			}
		}
		inUse := usedByOthers(t, f.held(t), stale)
		empty := block{table: t}
		for _, name := range slices.Sorted(maps.Keys(inUse)) {
			if len(f.held(t)[name]) > 0 {
				empty.write(chain{name: name})
				f.log.Warn("a chain that is no longer needed is emptied, but stays, since a rule of another program leads to it",
					"family", f.family, "table", string(t), "chain", name, "from", inUse[name])
			}
		}
		if err := f.write(empty); err != nil {
			return err
		}
		stale = slices.DeleteFunc(stale, func(name string) bool { return inUse[name] != "" })
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

// usedByOthers returns those of some chains that rules of other programs lead to, each with a chain that such a rule is in.
func usedByOthers(t names.Table, held kernelTable, chains []string) map[string]string {
	if len(chains) == 0 {
		return nil
	}
	out := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if names.IsOurs(t, name) {
			continue
		}
		for _, r := range held[name] {
			if _, stale := slices.BinarySearch(chains, jumpTarget(r)); stale {
				out[jumpTarget(r)] = name
			}
		}
	}
	return out
}

// ofOtherMode reports whether a chain is one that only other modes have.
func ofOtherMode(t names.Table, name string) bool {
	return names.IsOurs(t, name) && !names.InMode(names.ModeIPTables, t, name)
}
