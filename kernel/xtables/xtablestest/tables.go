package xtablestest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// Tables are the tables of both families on a machine where several programs change them, in simulated time (testing/synctest). As with the
// nft variant of iptables, what a program writes to one table changes at once, and to two tables one after the other; each change has a
// number, and others are notified of it. The lock guards all fields.
type Tables struct {
	sync.Locker
	Kernels map[plan.Family]*Kernel
	// Draw returns a random time below a limit: how long something takes.
	Draw func(what string, limit time.Duration) time.Duration
	// Changed is called after each change of a table, with the tables locked. by is nil for a change by Change.
	Changed func(f plan.Family, by *Process, input string)

	generation uint32
	trouble    Trouble
	until      time.Time // when the trouble ends
	watching   map[*Process]func(why string)
}

// Trouble is what happens to programs that read or write tables.
type Trouble int

// The troubles.
const (
	Refused     Trouble = iota // nothing is taken
	RefusedLate                // the second table of an input is not taken
	Killed                     // programs end after the first table, and have not said why
	Locked                     // another program holds the lock
	Unreadable                 // reading fails
	Slow                       // reading takes seconds
	Troubles                   // is how many there are
)

func (t Trouble) String() string {
	return [...]string{"refuses all", "refuses second tables", "restores end after one table", "lock held", "unreadable", "slow to read"}[t]
}

// lockWait is how long a program waits for the lock.
const lockWait = 5 * time.Second

// NewTables returns tables with nothing but empty built-in chains.
func NewTables(draw func(string, time.Duration) time.Duration) *Tables {
	t := &Tables{Locker: &sync.Mutex{}, Draw: draw, Kernels: map[plan.Family]*Kernel{}, watching: map[*Process]func(string){}}
	for _, f := range plan.Families {
		t.Kernels[f] = New()
	}
	return t
}

// Suffer lets a trouble happen until some time has passed.
func (t *Tables) Suffer(what Trouble, long time.Duration) {
	t.Lock()
	defer t.Unlock()
	t.trouble, t.until = what, time.Now().Add(long)
}

func (t *Tables) suffers(what ...Trouble) bool {
	t.Lock()
	defer t.Unlock()
	return time.Now().Before(t.until) && slices.Contains(what, t.trouble)
}

// Change changes the tables of a family as programs other than a Process do.
func (t *Tables) Change(f plan.Family, do func(map[names.Table]xtables.Content)) {
	_ = t.change(f, nil, "", func(k *Kernel) error {
		do(k.Tables)
		return nil
	})
}

func (t *Tables) change(f plan.Family, by *Process, input string, do func(*Kernel) error) error {
	t.Lock()
	defer t.Unlock()
	k := t.Kernels[f]
	before := map[names.Table]xtables.Content{}
	if by == nil || by.Dead() { // Nobody else is notified.
		for tbl := range k.Tables {
			before[tbl], _ = k.Save(context.Background(), tbl)
		}
	}
	if err := do(k); err != nil {
		return err
	}
	t.generation++
	if t.Changed != nil {
		t.Changed(f, by, input)
	}
	for p, suspect := range t.watching {
		if p != by && len(before) > 0 && concerns(before, k.Tables) {
			time.AfterFunc(t.Draw("notification", 20*time.Millisecond), func() { suspect("another program has changed " + f.String()) })
		}
	}
	return nil
}

// concerns reports whether a change is of those of which xtables.Watch tells.
func concerns(before, after map[names.Table]xtables.Content) bool {
	for tbl, now := range after {
		for name := range before[tbl] {
			if _, there := now[name]; !there && names.IsOurs(tbl, name) {
				return true
			}
		}
		for name, rules := range now {
			was, there := before[tbl][name]
			switch {
			case names.IsOurs(tbl, name) && (!there || !slices.Equal(was, rules)):
				return true
			case names.Builtin(name) && slices.ContainsFunc(was, func(r string) bool {
				return strings.Contains(r, "KUBE-") && !slices.Contains(rules, r)
			}):
				return true
			}
		}
	}
	return false
}

// Process is a process that reads and writes tables by other programs.
type Process struct {
	*Tables
	dead    chan struct{}
	alone   bool // what it had started goes on without it
	written int
}

// Start starts a process.
func (t *Tables) Start() *Process { return &Process{Tables: t, dead: make(chan struct{})} }

// Kill ends a process. What it has started to write goes on if that is not to die with it.
func (p *Process) Kill(all bool) {
	p.Lock()
	defer p.Unlock()
	p.alone = !all
	delete(p.watching, p)
	close(p.dead)
}

// Dead reports whether the process has been killed.
func (p *Process) Dead() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// Written is how many tables the process has changed.
func (p *Process) Written() int {
	p.Lock()
	defer p.Unlock()
	return p.written
}

// Writing does nothing: a process is not notified of its own changes.
func (p *Process) Writing() (done func()) { return func() {} }

// Run is as that of xtables.Watch.
func (p *Process) Run(ctx context.Context, suspect func(why string)) error {
	follow := p.Open(suspect)
	suspect("changes by other programs were not watched for until now")
	follow(ctx)
	return nil
}

// Open has suspect called when others change tables, until the context of what it returns ends.
func (p *Process) Open(suspect func(why string)) (follow func(context.Context)) {
	p.Lock()
	defer p.Unlock()
	if !p.Dead() {
		p.watching[p] = suspect
	}
	return func(ctx context.Context) {
		<-ctx.Done()
		p.Lock()
		defer p.Unlock()
		delete(p.watching, p)
	}
}

// Program returns the xtables.Kernel by which a process uses the tables of a family.
func (p *Process) Program(f plan.Family) *Program { return &Program{p, f} }

// Program is the tables of a family as a process uses them.
type Program struct {
	*Process
	family plan.Family
}

var errDead = errors.New("this process has been killed")

// Save is as that of xtables.Kernel.
func (p *Program) Save(ctx context.Context, t names.Table, known ...xtables.Content) (xtables.Content, error) {
	out, err := p.read(ctx, func(k *Kernel) (xtables.Content, error) { return k.Save(ctx, t, known...) })
	if err != nil {
		return nil, fmt.Errorf("reading table %s: %w", t, err)
	}
	return out, nil
}

func (p *Program) read(ctx context.Context, what func(*Kernel) (xtables.Content, error)) (xtables.Content, error) {
	most := 5 * time.Millisecond
	if p.suffers(Slow) {
		most = 3 * time.Second
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-p.dead:
		return nil, errDead
	case <-time.After(p.Draw("reading "+p.family.String(), most)):
	}
	if p.suffers(Unreadable) {
		return nil, errors.New("exit status 4")
	}
	p.Lock()
	defer p.Unlock()
	return what(p.Kernels[p.family])
}

// Read is as that of xtables.Kernel. Each reading of chains has them as they are then.
func (p *Program) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	content, err := p.Save(ctx, t)
	if err != nil {
		return nil, err
	}
	r := xtables.ReadingOf(content)
	slices.Sort(r.Names)
	r.Chains = func(ctx context.Context, list []string, _ ...xtables.Content) (xtables.Content, error) {
		now, err := p.Save(ctx, t)
		if err != nil {
			return nil, err
		}
		return xtables.ReadingOf(now).Chains(ctx, list)
	}
	r.Digests = func(chains []string) (out []uint64, err error) {
		_, err = p.read(ctx, func(k *Kernel) (xtables.Content, error) {
			for _, name := range chains {
				out = append(out, digest(k.Tables[t][name]))
			}
			return nil, nil
		})
		return out, err
	}
	return r, nil
}

// Exists is as that of xtables.Kernel: all tables exist.
func (*Program) Exists(names.Table) (bool, error) { return true, nil }

// Prepare is as that of xtables.Kernel. There is nothing to prepare.
func (*Program) Prepare() {}

// Generation is as that of xtables.Kernel.
func (p *Program) Generation() uint32 {
	p.Lock()
	defer p.Unlock()
	return p.generation + 1
}

// Restore is as that of xtables.Kernel.
func (p *Program) Restore(input xtables.Input) error {
	if p.Dead() {
		return errDead
	}
	ended, text := make(chan error, 1), input.String()
	go func() { ended <- p.restore(text) }()
	select {
	case err := <-ended:
		return err
	case <-p.dead:
		return errDead
	}
}

func (p *Program) restore(input string) error {
	refused := func(status int, why string) error {
		return &xtables.RestoreError{Program: "fake", Message: why, Err: fmt.Errorf("exit status %d", status)}
	}
	for late := time.Now().Add(lockWait); p.suffers(Locked); time.Sleep(50*time.Millisecond + p.Draw("lock "+p.family.String(), time.Millisecond)) {
		if time.Now().After(late) {
			return refused(4, "Another app is currently holding the xtables lock")
		}
	}
	for i, part := range slices.DeleteFunc(strings.SplitAfter(input, "COMMIT\n"), func(s string) bool { return s == "" }) {
		time.Sleep(p.Draw("writing "+p.family.String(), 3*time.Millisecond))
		switch {
		case p.suffers(Refused), i > 0 && p.suffers(RefusedLate):
			return refused(1, "refused")
		case i > 0 && p.suffers(Killed):
			return errors.New("signal: killed")
		}
		if err := p.change(p.family, p.Process, part, func(k *Kernel) error { return p.commit(k, part) }); err != nil {
			return err
		}
	}
	return nil
}

// commit writes a table. The lock must be held.
func (p *Program) commit(k *Kernel, part string) error {
	if p.Dead() && !p.alone {
		return errDead
	}
	err := k.Restore(xtables.Text(part))
	k.Restores = nil
	if err == nil && (strings.Contains(part, "\n:") || strings.Contains(part, "\n-")) {
		p.written++
	}
	return err
}
