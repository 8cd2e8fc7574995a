package xtables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Exists is as in Kernel.
func (t *Program) Exists(tbl names.Table) (bool, error) {
	present, err := presentTables(t.Variant, t.Family)
	return slices.Contains(present, tbl), err
}

// Present reads the tables of a family that exist, and makes none. What can't be read is an error.
func (t *Program) Present(ctx context.Context) (map[names.Table]Content, error) {
	present, err := presentTables(t.Variant, t.Family)
	if err != nil {
		return nil, err
	}
	out := map[names.Table]Content{}
	for _, tbl := range present {
		if out[tbl], err = t.Save(ctx, tbl); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Content returns what tables hold that are as desired, and hold nothing else.
func (d Desired) Content() map[names.Table]Content {
	out := map[names.Table]Content{}
	for _, t := range names.Tables {
		out[t] = Content{}
	}
	for _, c := range d.Chains {
		out[c.Table][c.Name] = c.Rules
	}
	for _, j := range d.Jumps {
		out[j.Table][j.From] = slices.Insert(out[j.Table][j.From], 0, j.Rule)
	}
	return out
}

// Hunks returns what Diff finds, as iptables-save prints it, table by table and in order of the chains. file is the beginning of each
// File, such as "ipv4 ".
func Hunks(f plan.Family, desired Desired, actual map[names.Table]Content) []drift.Hunk {
	var out []drift.Hunk
	for _, t := range names.Tables {
		file := fmt.Sprintf("%s %s (%s)", strings.ToLower(f.String()), t, saveProgram(f))
		built := map[string]*drift.Hunk{}
		var list []drift.Hunk
		for _, c := range Diff(t, desired, actual[t]) {
			switch c.Op {
			case Leave:
			case Insert, Delete, Append:
				h := built[c.Chain]
				if h == nil {
					h = &drift.Hunk{Kind: drift.Rule, File: file, Object: "*" + string(t) + " " + c.Chain}
					built[c.Chain] = h
				}
				if line := "-A " + c.Chain + " " + c.Rules[0]; c.Op == Delete {
					h.Have = append(h.Have, line)
				} else {
					h.Want = append(h.Want, line)
				}
			default:
				h := drift.Hunk{Kind: drift.Chain, File: file, Object: "*" + string(t) + " " + c.Chain}
				if c.Exists {
					h.Have = lines(c.Chain, c.Have)
				}
				if c.Op != Remove {
					h.Want = lines(c.Chain, c.Rules)
				}
				list = append(list, h)
			}
		}
		slices.SortStableFunc(list, func(a, b drift.Hunk) int { return strings.Compare(a.Object, b.Object) })
		for _, name := range slices.Sorted(maps.Keys(built)) {
			out = append(out, *built[name])
		}
		out = append(out, list...)
	}
	return out
}

func saveProgram(f plan.Family) string {
	if f == plan.IPv6 {
		return "ip6tables-save"
	}
	return "iptables-save"
}

// lines are a chain and its rules as iptables-save prints them.
func lines(chain string, rules []string) []string {
	out := make([]string, 0, len(rules)+1)
	out = append(out, ":"+chain+" - [0:0]")
	for _, r := range rules {
		out = append(out, "-A "+chain+" "+r)
	}
	return out
}
