// Package conntrack reads and removes entries of the kernel's connection tracking, and sets its sysctls. It does not decide which
// flows to remove.
//
// The kernel filters (Linux 5.8 or later). Its answer is read piece by piece, and flows are removed meanwhile, so the use of memory
// does not depend on the number of flows.
package conntrack

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// Dial opens a socket for connection tracking in the network namespace of the caller's thread.
func Dial() (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	return c, nil
}

// Table is the kernel's table of flows. It is not safe for concurrent use.
type Table struct {
	// Dial opens a socket; nil for that of this package.
	Dial func() (*netlink.Conn, error)
	// Unfiltered is set once the kernel has refused to filter.
	Unfiltered bool
}

// Session is a pair of sockets: one to read the table, one to delete from it meanwhile.
type Session struct {
	table          *Table
	reader, writer *netlink.Conn
	deletions      []netlink.Message
	flow           Flow
}

// Open opens the sockets.
func (t *Table) Open() (*Session, error) {
	dial := t.Dial
	if dial == nil {
		dial = Dial
	}
	reader, err := dial()
	if err != nil {
		return nil, err
	}
	writer, err := dial()
	if err != nil {
		reader.Close()
		return nil, err
	}
	return &Session{table: t, reader: reader, writer: writer, deletions: make([]netlink.Message, 0, deletionsAtOnce)}, nil
}

// Close closes the sockets.
func (s *Session) Close() {
	s.reader.Close()
	s.writer.Close()
}

// Each calls visit with each flow of a filter. The kernel may also list others.
func (s *Session) Each(ctx context.Context, f Filter, visit func(*Flow)) error {
	_, _, err := s.RemoveIf(ctx, f, func(fl *Flow) bool {
		visit(fl)
		return false
	})
	return err
}

// RemoveIf removes those flows of a filter for which stale returns true, and returns how many it read and removed. Flows may have
// been removed even if it returns an error.
func (s *Session) RemoveIf(ctx context.Context, f Filter, stale func(*Flow) bool) (read, removed int, err error) {
	var failed error // of a deletion
	visit := func(fl *Flow) error {
		if fl.Protocol != f.Protocol || fl.Family != f.Family {
			return nil
		}
		read++
		if stale(fl) {
			failed = s.remove(fl, &removed)
		}
		return failed
	}
	err = s.dump(ctx, f, !s.table.Unfiltered, visit)
	refused := failed == nil && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP))
	if refused && !s.table.Unfiltered {
		s.table.Unfiltered = true
		err = s.dump(ctx, f, false, visit)
	}
	if failed == nil {
		failed = s.flush(&removed)
	}
	switch {
	case failed != nil:
		err = fmt.Errorf("deleting flows of %s: %w", f.Family, failed)
	case err != nil:
		err = fmt.Errorf("reading the flows of %s: %w", f.Family, err)
	}
	return read, removed, err
}

// lookAfter is the number of flows after which it checks whether the context is done.
const lookAfter = 256

// dump reads flows and hands them to visit.
func (s *Session) dump(ctx context.Context, f Filter, inKernel bool, visit func(*Flow) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	n := 0
	return s.reader.Dump(dumpRequest(f, inKernel), func(body []byte) error {
		if n++; n%lookAfter == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if s.flow.parse(body) {
			return visit(&s.flow)
		}
		return nil
	})
}

// deletionsAtOnce is the number of deletions that are sent at once.
const deletionsAtOnce = 128

// remove queues a flow for deletion, and deletes the queued ones if they are enough. removed grows by the number that the kernel
// says it deleted.
func (s *Session) remove(f *Flow, removed *int) error {
	n := len(s.deletions)
	s.deletions = s.deletions[:n+1]
	m := &s.deletions[n] // Its body is reused.
	m.Type, m.Body = msgDelete, f.appendDelete(m.Body[:0])
	if n+1 < deletionsAtOnce {
		return nil
	}
	return s.flush(removed)
}

// flush deletes the queued flows. A flow that has ended meanwhile is not an error.
func (s *Session) flush(removed *int) error {
	if len(s.deletions) == 0 {
		return nil
	}
	errs := s.writer.Do(s.deletions...)
	*removed += len(s.deletions)
	s.deletions = s.deletions[:0]
	var failed error
	for _, err := range errs {
		if err == nil {
			continue
		}
		*removed--
		if failed == nil && !errors.Is(err, unix.ENOENT) {
			failed = err
		}
	}
	return failed
}
