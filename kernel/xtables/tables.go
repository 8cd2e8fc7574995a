package xtables

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Tables keeps the rules of one family in the kernel that do not grow with the number of Services: what a mode needs beside what it
// programs by other means.
type Tables struct {
	*Writer
	// Family is that of the rules.
	Family plan.Family
	// Found, if not nil, gathers what Apply finds to differ from what it had written before.
	Found *drift.Found
	// NativeRules, if not nil, is called for tables in which other programs keep rules that iptables can't read: see NativeRules.
	NativeRules func(NativeRules)

	written *Desired // by the last Apply that did not fail; nil where that is not known
	watch   Watch
}

// NewTables finds the iptables programs of a family. It changes nothing.
func NewTables(v Variant, f plan.Family, log *slog.Logger) (*Tables, error) {
	if v == "" {
		v = Detect()
	}
	p, err := Find(v, f)
	if err != nil {
		return nil, err
	}
	if err := p.Usable(); err != nil {
		return nil, err
	}
	x := &Tables{Writer: p.Writer(log), Family: f}
	p.OnNativeRules = func(n NativeRules) {
		if x.NativeRules != nil {
			x.NativeRules(n)
		}
	}
	x.watch.Add(p, names.Tables...)
	return x, nil
}

// Program returns the programs of iptables that the rules are written by.
func (x *Tables) Program() *Program { return x.Kernel.(*Program) }

// ServiceChains reports whether there are chains of single Services, as mode iptables has them: then it is by its rules that
// traffic flows.
func (x *Tables) ServiceChains(ctx context.Context) (bool, error) {
	content, err := x.Kernel.Save(ctx, names.NAT)
	for name := range content {
		if names.OfService(name) {
			return true, err
		}
	}
	return false, err
}

// Sync reads what the kernel has, and writes the differences: each table changes as a whole, so that at no time a packet meets
// half of the rules. What is stale is removed then. It returns how many chains and rules of built-in chains it wrote or removed.
func (x *Tables) Sync(ctx context.Context, desired Desired) (int, error) {
	defer x.watch.Writing()()
	written := x.written
	x.written = nil
	var writes, prunes []Change
	actual := map[names.Table]Content{}
	n := 0
	for _, t := range names.Tables {
		content, err := x.Kernel.Save(ctx, t)
		if err != nil {
			return 0, err
		}
		actual[t] = content
		if written != nil && x.Found != nil {
			*x.Found = append(*x.Found, Drift(x.Family, x.WithoutStuck(Diff(t, *written, content)))...)
		}
		for _, c := range Diff(t, desired, content) {
			switch {
			case c.Op == Leave:
				continue
			case c.Op < Empty:
				writes = append(writes, c)
			default:
				prunes = append(prunes, c)
			}
			n++
		}
	}
	if err := x.Write(ctx, actual, writes); err != nil {
		return 0, err
	}
	if err := x.Prune(ctx, actual, prunes, x.Stays); err != nil {
		return n, err
	}
	x.written = &desired
	return n, nil
}

// OpenWatch opens sockets in the network namespace of the caller's thread, and returns a function that calls suspect, with the
// reason, when another program may have changed what Apply has written, until ctx ends. Where there is an error, only another
// Apply finds out.
func (x *Tables) OpenWatch() (func(ctx context.Context, suspect func(why string)), error) {
	return x.watch.Open()
}

// Render returns the rules as input for iptables-restore.
func (d Desired) Render() string {
	var out strings.Builder
	for _, t := range names.Tables {
		out.WriteString("*" + string(t) + "\n")
		own := slices.DeleteFunc(slices.Clone(d.Chains), func(c Chain) bool { return c.Table != t })
		for _, c := range own {
			out.WriteString(":" + c.Name + " - [0:0]\n")
		}
		var built []string
		for _, j := range slices.Backward(d.Jumps) {
			if j.Table == t {
				built = append(built, "-A "+j.From+" "+j.Rule+"\n")
			}
		}
		slices.SortStableFunc(built, func(a, b string) int { return strings.Compare(strings.Fields(a)[1], strings.Fields(b)[1]) })
		out.WriteString(strings.Join(built, ""))
		for _, c := range own {
			c.AppendTo(&out, "")
		}
		out.WriteString("COMMIT\n")
	}
	return out.String()
}
