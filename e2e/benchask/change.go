package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"time"

	"nodeproxy/e2e/measure"
	"nodeproxy/plan"
)

// The kinds of blocks of changes.
const (
	quiet  = iota // nobody asks
	asking        // one question after the other is sent to the socket
	busy          // a process takes as much processor time as it gets, and asks nothing
	kinds
)

// spare is the offset in measure.EndpointRange of the last address that no Service has; a change takes one from there down.
const spare = 1<<22 - 2

// changes are what those of one kind took.
type changes struct {
	// all is the time from before the manifest is in place until everything is written; of it, wait is that until the sync began, as
	// the daemon tells it, plan that to find out what must be, with any wait for readers, and write that to bring the kernel to it.
	all, wait, plan, write []time.Duration
	asked                  int // questions that were answered meanwhile
}

// changeAll makes blocks of changes of each kind, in turns.
func (l *lab) changeAll(ctx context.Context, o options) (out [kinds]changes, err error) {
	for range o.blocks {
		for kind := range kinds {
			stop := l.disturb(ctx, kind)
			for range o.changes {
				if err = l.change(ctx, &out[kind]); err != nil {
					break
				}
			}
			asked, failed := stop()
			if err = errors.Join(err, failed); err != nil {
				return out, err
			}
			out[kind].asked += asked
		}
	}
	return out, nil
}

// disturb begins what a block of changes is made beside; stop ends it.
func (l *lab) disturb(ctx context.Context, kind int) (stop func() (asked int, err error)) {
	if kind == quiet {
		return func() (int, error) { return 0, nil }
	}
	ctx, cancel := context.WithCancel(ctx)
	var asked int
	ended := make(chan error, 1)
	go func() {
		if kind == busy {
			_ = exec.CommandContext(ctx, "nice", "-n", "19", "sh", "-c", "while :; do :; done").Run() // It is killed.
			ended <- nil
			return
		}
		svc := l.cluster.Services[0]
		named := "?" + url.Values{"namespace": {measure.Namespace}, "name": {svc.Name}}.Encode()
		trace := "?" + url.Values{"from": {"outside"}, "to": {svc.Frontend().String()}, "protocol": {"TCP"}}.Encode()
		paths := []string{"/v1/services", "/v1/explain" + named, "/v1/trace" + trace, "/v1/findings", "/v1/status", "/v1/desired", "/v1/traffic"}
		for ; ctx.Err() == nil; asked++ {
			_, err := l.request(ctx, question{path: paths[asked%len(paths)]})
			if err != nil && ctx.Err() == nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	return func() (int, error) {
		cancel()
		err := <-ended
		return asked, err
	}
}

// change replaces an endpoint, of another Service each time, and waits until the daemon says what that took.
func (l *lab) change(ctx context.Context, into *changes) error {
	l.changed++
	i := l.changed * measure.Stride % len(l.cluster.Services)
	svc := l.cluster.Services[i]
	svc.Endpoints[0] = measure.Nth(measure.EndpointRange, spare-l.changed)
	replace, err := l.cluster.Prepare(i)
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := replace(); err != nil {
		return err
	}
	for time.Since(begun) < measure.ChangeTimeout {
		syncs, err := l.client.History(ctx, plan.Service{Namespace: measure.Namespace, Name: svc.Name})
		if err != nil {
			return err
		}
		for _, s := range syncs {
			if s.Began.Before(begun) {
				continue
			}
			if s.Error != "" {
				return fmt.Errorf("service %s: %s", svc.Name, s.Error)
			}
			seconds := func(v float64) time.Duration { return time.Duration(v * float64(time.Second)) }
			into.all = append(into.all, s.Began.Sub(begun)+seconds(s.Took.Total()))
			into.wait = append(into.wait, seconds(s.Took.Wait))
			into.plan = append(into.plan, seconds(s.Took.Plan))
			into.write = append(into.write, seconds(s.Took.Write))
			return nil
		}
		time.Sleep(100 * time.Millisecond) // Rarely, as this is a question too.
	}
	return fmt.Errorf("service %s: not programmed within %s", svc.Name, measure.ChangeTimeout)
}
