package xtables

import (
	"context"
	"log/slog"
	"slices"

	"nodeproxy/kernel/names"
)

// Kernel is the tables of one family. Program implements it.
type Kernel interface {
	// Save reads a table. Chains that are as in known share their rules with it.
	Save(ctx context.Context, t names.Table, known ...Content) (Content, error)
	// Exists reports whether the kernel has a table. A program of the legacy variant makes one that it is asked for.
	Exists(t names.Table) (bool, error)
	// Read begins to read a table that may be written meanwhile.
	Read(ctx context.Context, t names.Table) (*Reading, error)
	// Restore makes the changes of an input of iptables-restore --noflush.
	Restore(Input) error
	// Prepare makes the next Restore begin sooner.
	Prepare()
	// Generation returns a number that changes with any change of the tables, by whomever; 0 where there is none.
	Generation() uint32
}

// A Writer makes changes of the tables of one family.
type Writer struct {
	Kernel Kernel
	// MaxNames is how many names of chains one run of iptables-restore should see; 0 for any number.
	MaxNames int
	// Log receives warnings; nil for none.
	Log *slog.Logger
	// Ran, if not nil, is called after each run of iptables-restore with its input and the error, if any.
	Ran func(Input, error)

	// stuck are the chains, by table and name, that the kernel did not remove.
	stuck map[[2]string]bool
}

// MaxNames is how many different chain names one run of iptables-nft-restore should see. Its cost grows with their square
// (it keeps them in a list that it searches linearly), and below this size with the number of runs. The legacy variant
// copies the whole table for every run, so there everything is written in one.
const MaxNames = 300

// rulesPerName is by how much the number of rules that one run should write exceeds that of names. The program keeps all of them in memory,
// some kilobytes each, until it sends them to the kernel.
const rulesPerName = 5

// Writer returns one for the program's tables.
func (t *Program) Writer(log *slog.Logger) *Writer {
	w := &Writer{Kernel: t, Log: log}
	if t.Variant == NFT {
		w.MaxNames = MaxNames
	}
	return w
}

// Write makes steps, one after the other, in one run of iptables-restore. All that a step changes in a table changes at once. If the
// kernel refuses something, the tables that come before it have changed, and the others have not. What succeeds is also made to
// actual.
func (w *Writer) Write(ctx context.Context, actual map[names.Table]Content, steps ...[]Change) error {
	steps = slices.DeleteFunc(slices.Clone(steps), func(s []Change) bool { return len(s) == 0 })
	if len(steps) == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := w.Restore(input(steps)); err != nil {
		return err
	}
	for _, step := range steps {
		for _, c := range step {
			if t := actual[c.Table]; t != nil {
				t.apply(c)
			}
		}
	}
	return nil
}

// Restore runs iptables-restore, once more if another program has held the xtables lock for too long.
func (w *Writer) Restore(input Input) error {
	err := w.run(input)
	if isLocked(err) {
		if w.Log != nil {
			w.Log.Warn("another program holds the xtables lock; trying again", "error", err)
		}
		err = w.run(input)
	}
	return err
}

func (w *Writer) run(input Input) error {
	err := w.Kernel.Restore(input)
	if w.Ran != nil {
		w.Ran(input, err)
	}
	return err
}

// Works reports whether the kernel takes anything at all. Where it does not, as without a lock or memory, a search for what it
// refuses finds nothing, and takes two runs of iptables-restore for each thing.
func (w *Writer) Works() bool { return w.Kernel.Restore(Text("*nat\nCOMMIT\n")) == nil }

// A Load is what one run of iptables-restore takes on. The zero Load is nothing.
type Load struct {
	names map[string]bool // of chains, and of what rules lead to: it looks them up
	rules int
}

// Add adds changes.
func (l *Load) Add(changes ...Change) {
	if l.names == nil {
		l.names = map[string]bool{}
	}
	for _, c := range changes {
		l.names[c.Chain] = true
		l.rules += len(c.Rules)
		for _, r := range c.Rules {
			if to := Target(r); to != "" {
				l.names[to] = true
			}
		}
	}
}

// Full reports whether a load is as much as one run should take on.
func (w *Writer) Full(l Load) bool {
	return w.MaxNames > 0 && (len(l.names) >= w.MaxNames || l.rules >= w.MaxNames*rulesPerName)
}

// Prune makes those of the changes that empty and remove stale chains. Chains may lead to each other, so all are emptied before any
// goes. For each one that the kernel does not remove, stays is called, and the others are removed all the same: a rule that is
// native to nft may lead to it in a way that can't be read.
func (w *Writer) Prune(ctx context.Context, actual map[names.Table]Content, changes []Change, stays func(Change, error)) error {
	var empty, remove []Change
	for _, c := range changes {
		switch c.Op {
		case Remove:
			remove = append(remove, c)
			if len(c.Have) == 0 {
				continue
			}
			c.Op = Empty
			empty = append(empty, c)
		case Empty:
			empty = append(empty, c)
		}
	}
	for chunk := range w.chunks(empty) {
		if err := w.Write(ctx, actual, chunk); err != nil {
			return err
		}
	}
	search := Search[Change]{Try: func(batch []Change) error { return w.Write(ctx, actual, batch) }, Refused: stays, Works: w.Works}
	for chunk := range w.chunks(remove) {
		if err := search.Run(chunk); err != nil {
			return err
		}
	}
	return nil
}

// Stays logs, once until ForgetStuck, that the kernel does not remove a stale chain, which is empty by then. A later Prune tries it again.
func (w *Writer) Stays(c Change, err error) {
	key := [2]string{string(c.Table), c.Chain}
	if w.stuck[key] {
		return
	}
	if w.stuck == nil {
		w.stuck = map[[2]string]bool{}
	}
	w.stuck[key] = true
	if w.Log != nil {
		w.Log.Warn("a chain that is no longer needed is emptied, but stays, since the kernel does not remove it",
			"table", string(c.Table), "chain", c.Chain, "error", err)
	}
}

// ForgetStuck forgets which chains the kernel has refused to remove: comparisons report them again until it refuses once more.
func (w *Writer) ForgetStuck() { w.stuck = nil }

// WithoutStuck leaves out the removal of empty chains that the kernel has refused to remove before.
func (w *Writer) WithoutStuck(changes []Change) []Change {
	return slices.DeleteFunc(changes, func(c Change) bool {
		return c.Op == Remove && len(c.Have) == 0 && w.stuck[[2]string{string(c.Table), c.Chain}]
	})
}

// chunks divides changes into those of one run each.
func (w *Writer) chunks(changes []Change) func(func([]Change) bool) {
	size := w.MaxNames
	if size == 0 {
		size = max(len(changes), 1)
	}
	return slices.Chunk(changes, size)
}

// A Search does many things at once, and where the kernel refuses that, finds those that it refuses, by halves.
type Search[T any] struct {
	// Try does things together. Errors for which IsRefused is true are what the search is about; any other one ends it.
	Try func([]T) error
	// Refused is called for each thing that the kernel refuses on its own.
	Refused func(T, error)
	// Works is Writer.Works. It is called when something is refused for the first time, and when a single thing is.
	Works func() bool

	worked bool
}

// Run tries things. An error is one that says nothing about any of them.
func (s *Search[T]) Run(things []T) error {
	if len(things) == 0 {
		return nil
	}
	err := s.Try(things)
	if !IsRefused(err) {
		return err
	}
	if !s.worked || len(things) == 1 {
		if !s.Works() {
			return err
		}
		s.worked = true
		// The kernel may have refused everything until just now.
		if err = s.Try(things); !IsRefused(err) {
			return err
		}
	}
	if len(things) == 1 {
		s.Refused(things[0], err)
		return nil
	}
	half := len(things) / 2
	if err := s.Run(things[:half]); err != nil {
		return err
	}
	return s.Run(things[half:])
}
