package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"nodeproxy/config"
	"nodeproxy/source"
)

// A configuration that can't be put in force is tried again, as what it lacks may come. The wait doubles from firstReload to
// lastReload: every node may have the same one, and where it is the objects that can't be read, each try asks the API server.
const firstReload, lastReload = 10 * time.Second, 5 * time.Minute

// reportReload is after how long it is reported that a new configuration is not in force yet.
const reportReload = 5 * time.Second

// reloads keeps a daemon running with the configuration that the file has, or with the last one that could be put in force.
type reloads struct {
	claim   *claim
	front   *front
	updates chan update
	// newDaemon makes a daemon with a configuration.
	newDaemon func(context.Context, *config.Config) (*daemon, error)

	// wanted is what the file holds; nil while that is wrong, and before it changes. It is tried again after wait, as long as it is not in force.
	wanted *config.Config
	wait   time.Duration
}

// forThisMachine makes a daemon for the machine that this process runs on.
func forThisMachine(ctx context.Context, cfg *config.Config) (*daemon, error) {
	return newDaemon(ctx, machine{}, cfg, newLog(cfg))
}

// update is what the configuration file has come to hold: a configuration, or something that is wrong.
type update struct {
	cfg *config.Config
	err error
}

// run runs a daemon, and in its place one with each new configuration that can be put in force, until ctx ends or a daemon does.
func (r *reloads) run(ctx context.Context, d *daemon) error {
	var former *config.Config // what to go back to if d can't start
	var rejected *string      // why d was not in force until now, as was said last
	for {
		ended := make(chan error, 1)
		go func() { ended <- d.run(r.claim, r.front) }()
		next, err := r.await(ctx, d, ended)
		var start *startError
		switch {
		case next != nil:
			d.log.Info("the configuration file has changed; what it says now takes effect, while the rules stay in force")
			d.replaced = true
			d.cancel()
			if err := <-ended; err != nil {
				d.log.Warn("the former configuration ended with an error", "error", err)
			}
			former, rejected = d.cfg, d.rejected.Load()
			d = next
		case errors.As(err, &start) && former != nil:
			back, failure := r.newDaemon(ctx, former)
			if failure != nil {
				return errors.Join(err, failure)
			}
			back.rejected.Store(rejected)
			back.begin()
			back.notInForce(fmt.Errorf("the configuration file has changed, but what it says now can't run: %w", err))
			d, former = back, nil
		default:
			return err
		}
		slog.SetDefault(d.log)
	}
}

// await returns the daemon that is to take the place of d, once there is one that can. When d ends before, it returns nil and the
// error of d.
func (r *reloads) await(ctx context.Context, d *daemon, ended <-chan error) (*daemon, error) {
	var try trial
	var again, late <-chan time.Time
	begin := func() {
		if try, again = r.try(ctx, r.wanted), nil; try.daemon != nil {
			late = time.After(reportReload)
		}
	}
	retry := func() { again, r.wait = time.After(r.wait), min(2*r.wait, lastReload) }
	if r.wanted != nil && !r.wanted.SameEffect(d.cfg) { // Its trial went well, and yet it could not start.
		retry()
	}
	abandon := func() {
		r.abandon(try)
		try, again, late = trial{}, nil, nil
	}
	for {
		select {
		case err := <-ended:
			abandon()
			return nil, err
		case u := <-r.updates:
			abandon()
			r.wanted, r.wait = u.cfg, firstReload
			switch {
			case u.err != nil:
				d.notInForce(fmt.Errorf("the configuration file is wrong: %w", u.err))
			case u.cfg.SameEffect(d.cfg):
				d.inForce(u.cfg.Findings)
			default:
				begin()
			}
		case err := <-try.done:
			if ctx.Err() != nil { // Everything ends.
				abandon()
				return nil, <-ended
			}
			if err == nil {
				return try.daemon, nil
			}
			abandon()
			d.notInForce(fmt.Errorf("the configuration file has changed, but what it says now can't run: %w", err))
			retry()
		case <-late:
			d.notInForce(fmt.Errorf("the configuration file has changed, but not all objects have come yet from %s", try.daemon.from))
		case <-again:
			begin()
		}
	}
}

// trial is a daemon of a new configuration that reads objects, while the one in force goes on. The zero trial is none.
type trial struct {
	daemon *daemon    // nil if it could not even be made
	done   chan error // receives how it went
}

// try finds out whether a configuration can be put in force: whether its addresses can be listened at, its mode can work, and then
// whether all objects can be read.
func (r *reloads) try(ctx context.Context, cfg *config.Config) trial {
	t := trial{done: make(chan error, 1)}
	err := r.front.prepare(cfg)
	if err == nil {
		t.daemon, err = r.newDaemon(ctx, cfg)
	}
	if err != nil {
		t.done <- err
		return t
	}
	t.daemon.running.Go(func() {
		err := t.daemon.check()
		if err == nil {
			t.daemon.begin()
			err = t.daemon.await()
		}
		t.done <- err
	})
	return t
}

// abandon ends a trial, and does not wait for its end: to look whether a mode can work may take a while. Without a trial, it leaves
// alone what the front has prepared: that is for a daemon that starts at this time.
func (r *reloads) abandon(t trial) {
	if t.done == nil {
		return
	}
	r.front.discard()
	if t.daemon != nil {
		t.daemon.cancel()
	}
}

// startError is the error of a daemon that could not start to work. It has programmed nothing.
type startError struct{ error }

func (e *startError) Unwrap() error { return e.error }

// notInForce reports that the configuration file has something else than what is in force, and why: once for each reason.
func (d *daemon) notInForce(why error) {
	d.metrics.ConfigRejected(true)
	text := why.Error()
	if before := d.rejected.Swap(&text); before == nil || *before != text {
		d.log.Error("the configuration file is not used; the former configuration stays in force", "error", why)
		d.event("ConfigRejected", "ReloadConfig", text+"; the former configuration stays in force")
	}
}

// inForce reports that the configuration file has what is in force, and what else there is to say about it.
func (d *daemon) inForce(findings []source.Finding) {
	d.metrics.ConfigRejected(false)
	if d.rejected.Swap(nil) != nil {
		d.log.Info("the configuration file holds what is in force")
	}
	for _, f := range findings {
		if !saidOf(d.findings, f) {
			d.report(f)
		}
	}
	d.findings = findings
}

// saidOf reports whether the same has been said, be it of another line.
func saidOf(said []source.Finding, f source.Finding) bool {
	return slices.ContainsFunc(said, func(other source.Finding) bool {
		other.Where = f.Where
		return other == f
	})
}
