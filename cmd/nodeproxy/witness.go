package main

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"nodeproxy/metrics"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// How often the witness verifies: at most every verifyEvery, and for each object that is listed a verifyPerObject more, so that API servers send
// each node ten objects a second at most, however many there are. Between verifications that are asked for it may be a part in verifyAsked of
// that. The pauses are lengthened by a random time of up to half of them, and the first one is random.
const (
	verifyEvery     = 5 * time.Minute
	verifyPerObject = 100 * time.Millisecond
	verifyAsked     = 10
)

// How long a verification waits: for the watch to show whether it has lost something, until a bookmark, and for a comparison with the kernel.
const (
	verifyObjects = 2 * time.Minute
	verifyKernel  = time.Minute
)

// witness verifies now and then, and when it is asked, that what the objects say is in the kernel: it lists the objects anew, makes the plan
// anew, and compares the kernel with it. What differs is repaired, counted, logged, and an event.
type witness struct {
	// objects is as in daemon.
	objects func(context.Context) ([]source.Compared, []source.Difference)
	proxier *proxier.Proxier
	drift   *driftReporter
	metrics *metrics.Set
	event   func(text string)
	random  func(limit time.Duration) time.Duration
	save    func() // gives memory back; it is called before each verification, which takes more, and after it
	log     *slog.Logger
	ctx     context.Context // of the daemon

	mu      sync.Mutex
	last    *outcome
	running bool          // the last one is under way
	wanted  chan struct{} // has a value while it is, and run does not verify yet
}

// outcome is a verification that has ended or is under way.
type outcome struct {
	source.Verification
	ended chan struct{} // closed when it has
}

// newWitness makes the witness of a daemon that has all other parts.
func (d *daemon) newWitness() *witness {
	w := &witness{objects: d.verifyObjects, proxier: d.proxier, drift: d.drift, metrics: d.metrics,
		log: d.log, ctx: d.ctx, random: rand.N[time.Duration], last: &outcome{}, wanted: make(chan struct{}, 1), save: d.saveMemoryAgain,
		event: func(text string) { d.event("VerificationRepaired", "Verify", text) }}
	if d.machine.random != nil {
		w.random = func(limit time.Duration) time.Duration { return d.machine.random("verification", limit) }
	}
	return w
}

// run verifies now and then, and whenever one is wanted, until ctx ends.
func (w *witness) run(ctx context.Context) {
	next := time.After(w.random(w.pause()))
	for {
		select {
		case <-ctx.Done():
			return
		case <-next:
			w.begin()
			next = time.After(w.pause() + w.random(w.pause()/2))
		case <-w.wanted:
			w.save()
			if w.verify(); ctx.Err() == nil {
				w.save()
			}
		}
	}
}

// pause is the least time between two verifications.
func (w *witness) pause() time.Duration {
	n := 0
	if w.objects != nil {
		w.proxier.View(func(s *proxier.State) { n = s.Objects() })
	}
	return max(verifyEvery, time.Duration(n)*verifyPerObject)
}

// begin returns the verification that is under way or has begun a while ago, or has run begin another.
func (w *witness) begin() *outcome {
	within := w.pause() / verifyAsked
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.last.Whole() {
		within = verifyEvery / verifyAsked
	}
	if !w.running && (w.last.Began.IsZero() || time.Since(w.last.Began) >= within) {
		w.last = &outcome{ended: make(chan struct{}),
			Verification: source.Verification{Began: time.Now(), Compared: []source.Compared{}, Differences: []source.Difference{}}}
		w.running = true
		w.wanted <- struct{}{} // There is room: run takes it before it verifies.
	}
	return w.last
}

// asked returns the result of begin. It is not finished where ctx ends before, or the daemon does.
func (w *witness) asked(ctx context.Context) source.Verification {
	o := w.begin()
	select {
	case <-o.ended:
	case <-ctx.Done():
	case <-w.ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return o.Verification
}

func (w *witness) verify() {
	began := time.Now()
	if w.objects != nil {
		ctx, cancel := context.WithTimeout(w.ctx, verifyObjects)
		compared, found := w.objects(ctx)
		cancel()
		w.add(compared, found)
	}
	count, found, err := w.proxier.Verify(w.ctx)
	w.add([]source.Compared{{What: "ServicePorts of the plan", Count: count, Not: reason(err)}}, found)
	ctx, cancel := context.WithTimeout(w.ctx, verifyKernel)
	compared := time.Now()
	err = w.proxier.Compare(ctx)
	cancel()
	w.add([]source.Compared{{What: "ServicePorts in the kernel", Count: count, Not: reason(err)}}, w.drift.since(compared))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last.TookSeconds, w.last.Finished = time.Since(began).Seconds(), w.ctx.Err() == nil
	close(w.last.ended)
	w.running = false
	w.metrics.Verified(w.last.Verification)
}

// add adds to the result, and reports what was found. What is found in the kernel the driftReporter has reported.
func (w *witness) add(compared []source.Compared, found []source.Difference) {
	w.mu.Lock()
	w.last.Compared, w.last.Differences = append(w.last.Compared, compared...), append(w.last.Differences, found...)
	w.mu.Unlock()
	found = slices.DeleteFunc(slices.Clone(found), func(d source.Difference) bool { return d.Part == source.PartKernel })
	for i, d := range found {
		w.log.Warn("a verification has found what was not as it should be; it is repaired", "part", d.Part,
			"object", d.Object, "field", d.Field, "detail", d.Detail)
		if i < fewDifferences {
			w.event("a verification has repaired " + d.String())
		}
	}
	if more := len(found) - fewDifferences; more > 0 {
		w.event(fmt.Sprintf("a verification has repaired %d more differences", more))
	}
}

func reason(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// since returns what comparisons with the kernel have found since a time.
func (d *driftReporter) since(t time.Time) (out []source.Difference) {
	for _, c := range d.recent() {
		if !c.When.Before(t) {
			out = append(out, source.Difference{Part: source.PartKernel, Object: "kernel", Detail: c.What})
		}
	}
	return out
}

// answerTime is how long an answer about a verification may take: servers cut it off after half a minute.
const answerTime = 25 * time.Second

// verification answers who asks for one.
func (d *daemon) verification(ctx context.Context) source.Verification {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	return d.witness.asked(ctx)
}
