package xtables

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"nodeproxy/kernel/names"
)

// Watch notices that other programs change tables of this program. The kernel sends a notification of each change of the nft variant
// (notify.go). The legacy variant has none; the number of entries and bytes of a table is read instead (info.go) whenever a program has
// released the xtables lock (lock.go), and once a second besides. A Watch may be used concurrently.
type Watch struct {
	tables []watched

	mu    sync.Mutex
	busy  int              // how many syncs are at work
	sizes map[watched]info // of the legacy variant, as they were after the last sync; nil where that is not watched
	noted []watched        // tables that others have changed, and that have not been reported yet
	lost  bool             // whether one of those has fewer entries than before
	last  time.Time        // when a suspicion was reported last
	probe *infoSockets
	every time.Duration // how often the sizes are read without a sign; of a Watch that polls
}

// watched is a table that belongs to a backend.
type watched struct {
	tool  *Program
	table names.Table
}

func (t watched) String() string { return fmt.Sprintf("table %s (%s)", t.table, t.tool.Family) }

// Add has the watch notice changes of tables that p writes. It must be called before Run and Open.
func (w *Watch) Add(t *Program, tables ...names.Table) {
	for _, name := range tables {
		w.tables = append(w.tables, watched{t, name})
	}
}

// Run calls suspect when another program may have changed something of ours, until ctx ends. It begins with a call: nothing reports
// what happened since the first sync has read the tables. It may be an iptables-restore of a daemon that was killed.
func (w *Watch) Run(ctx context.Context, suspect func(why string)) error {
	follow, err := w.Open()
	if err != nil {
		return fmt.Errorf("watching for changes of iptables rules by other programs: %w", err)
	}
	suspect("changes by other programs were not watched for until now")
	follow(ctx, suspect)
	return nil
}

// Open opens sockets in the network namespace of the caller's thread, and returns what follows them until ctx ends.
func (w *Watch) Open() (func(context.Context, func(string)), error) {
	var nft, legacy []watched
	for _, t := range w.tables {
		if t.tool.Variant == NFT {
			nft = append(nft, t)
		} else {
			legacy = append(legacy, t)
		}
	}
	var all []func(context.Context, func(string))
	if len(nft) > 0 {
		n, err := openNotifications(nft)
		if err != nil {
			return nil, err
		}
		all = append(all, n.follow)
	}
	if len(legacy) > 0 {
		probe, err := openInfo()
		if err != nil {
			return nil, err
		}
		released, err := openLockFile()
		if w.every = PollInterval; err != nil {
			w.every = pollOften
		}
		w.begin(probe, legacy)
		all = append(all, func(ctx context.Context, suspect func(string)) { w.poll(ctx, released, suspect) })
	}
	return func(ctx context.Context, suspect func(string)) {
		var wg sync.WaitGroup
		for _, follow := range all {
			wg.Go(func() { follow(ctx, suspect) })
		}
		wg.Wait()
	}, nil
}

// PollInterval is how often the sizes of tables are read without a sign that a program has worked, as by one that takes no lock or another
// one, and pollOften the same where there are no signs. A thread that wakes up wakes others in turn: four times a second is 30 of these.
// ReportInterval is the least time between two suspicions, unless a table has lost entries: those may be ours, and Services may be without
// rules, while a program that adds to its own rules all the time is not to cost a comparison each time.
const (
	PollInterval   = time.Second
	pollOften      = 250 * time.Millisecond
	ReportInterval = time.Second
)

func (w *Watch) begin(probe *infoSockets, legacy []watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.probe, w.sizes, w.noted = probe, make(map[watched]info, len(legacy)), nil
	for _, t := range legacy {
		w.sizes[t] = probe.read(t.tool.Family, t.table)
	}
}

// Writing must be called before rules are written, and done after that. The sizes that the tables have then are the right ones, so
// what others did just before is noted first, and at the end what they did to tables of a family in which nothing was written: it may
// have come after these were compared.
func (w *Watch) Writing() (done func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.busy == 0 {
		w.note()
	}
	w.busy++
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.busy--; w.busy == 0 {
			w.note()
		}
	}
}

// note reads the sizes of all tables, and notes those that are not as they were though nothing has been written there. The lock must be held.
func (w *Watch) note() {
	for s, was := range w.sizes {
		now := w.probe.read(s.tool.Family, s.table)
		if now != was && !s.tool.written.Load() {
			w.noted = append(w.noted, s)
			w.lost = w.lost || now.entries < was.entries
		}
		w.sizes[s] = now
	}
	for s := range w.sizes {
		s.tool.written.Store(false)
	}
}

// poll looks at the sizes of tables now and then, and when the lock has been released. Whoever replaces rules by as many of the same length
// goes unnoticed here.
func (w *Watch) poll(ctx context.Context, lock *lockFile, suspect func(string)) {
	released, end := lock.follow()
	defer end()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.probe.close()
		w.sizes, w.noted = nil, nil
	}()
	ticks := time.NewTicker(w.every)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		case <-released:
		}
		if other := w.Changed(); len(other) > 0 {
			slices.Sort(other)
			other = slices.Compact(other)
			suspect("another program has changed " + strings.Join(other, ", "))
		}
	}
}

// Changed names the tables that others have changed since the last time, if it is time to report them. While rules are written, it is those
// that were noted before: where one sync follows the other, hardly any look comes between them.
func (w *Watch) Changed() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.busy == 0 {
		w.note()
	}
	if len(w.noted) == 0 || !w.lost && time.Since(w.last) < ReportInterval {
		return nil
	}
	var out []string
	for _, s := range w.noted {
		out = append(out, s.String())
	}
	w.noted, w.lost, w.last = nil, false, time.Now()
	return out
}
