// Package top shows the traffic of Services as it goes, the latest changes, and what syncs cost.
package top

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	tea "charm.land/bubbletea/v2"
)

// Top shows samples.
type Top struct {
	// Every is the time between two of them.
	Every time.Duration
	// Count is how many tables Print prints; 0 for no end.
	Count int
	// Namespace is the only one whose Services are shown; "" for all.
	Namespace string
	// Sample takes one.
	Sample func() Sample

	view view
}

// Live shows them on a terminal until the user has had enough.
func (t *Top) Live(ctx context.Context, out *os.File) error {
	if err := t.first(); err != nil { // It stays readable, unlike what is shown on a screen of its own.
		return err
	}
	_, err := tea.NewProgram(model{view: t.view, every: t.Every, sample: t.Sample}, tea.WithContext(ctx), tea.WithOutput(out)).Run()
	if errors.Is(err, tea.ErrInterrupted) {
		return nil
	}
	return err
}

func (t *Top) first() error {
	t.view.namespace = t.Namespace
	first := t.Sample()
	t.view.take(first)
	return first.Err
}

// Print passes each sample to write, with what writes it as a table.
func (t *Top) Print(ctx context.Context, write func(s Sample, table func(io.Writer) error) error) error {
	if err := t.first(); err != nil {
		return err
	}
	for n := 0; t.Count == 0 || n < t.Count; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(t.Every):
		}
		s := t.Sample()
		if s.Err != nil {
			return s.Err
		}
		t.view.take(s)
		if err := write(s, t.table); err != nil {
			return err
		}
	}
	return nil
}

// table prints what there is to see.
func (t *Top) table(w io.Writer) error {
	text := t.view.traffic(t.view.rows())
	if !t.view.now.Counted {
		text = notCounted + "\n"
	}
	changes := t.view.changes(mostChanges)
	if changes != "" {
		changes += "\n"
	}
	_, err := fmt.Fprintf(w, "%s\n%s\n%s%s\n", t.view.now.At.Local().Format(time.DateTime), t.view.costs(), changes, text)
	return err
}
