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
			if !builtin(name) {
				continue
			}
			held[name] = slices.DeleteFunc(slices.Clone(held[name]), func(r string) bool {
				leads := slices.Contains(otherModes[t], jumpTarget(r))
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

// sweep removes the chains that nothing wants. One that somebody else's rule leads to can't be removed; it is emptied, so that it
// does nothing, and goes when that rule has gone.
func (f *fullSync) sweep() error {
	for _, t := range []table{tableNAT, tableFilter} {
		var stale []string
		for _, name := range slices.Sorted(maps.Keys(f.held(t))) {
			if (mayBeStale(name) || slices.Contains(otherModes[t], name)) && !f.wanted[t][name] {
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
func usedByOthers(t table, held kernelTable, names []string) map[string]string {
	if len(names) == 0 {
		return nil
	}
	out := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(held)) {
		if isOurs(t, name) {
			continue
		}
		for _, r := range held[name] {
			if _, stale := slices.BinarySearch(names, jumpTarget(r)); stale {
				out[jumpTarget(r)] = name
			}
		}
	}
	return out
}
