package flows

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
)

// errInterrupted says that the table changed its shape while it was being read, so that flows may have been missed.
var errInterrupted = errors.New("the table changed its shape while it was read")

// dumpFlagInterrupted is NLM_F_DUMP_INTR.
const dumpFlagInterrupted = 0x10

// receiveBuffer is the most that the kernel puts into one piece of a dump.
const receiveBuffer = 32 << 10

// table is the kernel's table of flows: one connection to read it, one to delete from it meanwhile.
type table struct {
	reader, writer conn
	seq            uint32
	buf            []byte
	// noFilter is set once the kernel has refused to filter.
	noFilter *bool
	batch    batch
}

// openTable makes the connections. noFilter remembers what the kernel can do from one table to the next.
func openTable(open func() (conn, error), noFilter *bool) (*table, error) {
	reader, err := open()
	if err != nil {
		return nil, err
	}
	writer, err := open()
	if err != nil {
		reader.Close()
		return nil, err
	}
	return &table{reader: reader, writer: writer, buf: make([]byte, receiveBuffer), noFilter: noFilter}, nil
}

func (t *table) close() {
	t.reader.Close()
	t.writer.Close()
}

// removeIf deletes the flows among those of the filter that stale says are, and returns how many it read and deleted. Also
// where there is an error, flows may have been deleted.
func (t *table) removeIf(ctx context.Context, f filter, stale func(*flow) bool) (read, deleted int, err error) {
	var failed error // of a deletion
	visit := func(fl *flow) error {
		if fl.protocol != f.protocol || fl.family != f.family {
			return nil
		}
		read++
		if stale(fl) {
			failed = t.batch.add(t.writer, fl, &deleted)
		}
		return failed
	}
	err = t.dump(ctx, f, !*t.noFilter, visit)
	refused := failed == nil && (errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EOPNOTSUPP))
	if refused && !*t.noFilter {
		*t.noFilter = true
		err = t.dump(ctx, f, false, visit)
	}
	if failed == nil {
		failed = t.batch.flush(t.writer, &deleted)
	}
	switch {
	case failed != nil:
		err = fmt.Errorf("deleting flows of %s: %w", f.family, failed)
	case err != nil:
		err = fmt.Errorf("reading the flows of %s: %w", f.family, err)
	}
	return read, deleted, err
}

// dump reads flows and hands them to visit, each valid during that call only.
func (t *table) dump(ctx context.Context, f filter, inKernel bool, visit func(*flow) error) error {
	t.seq++
	if err := t.reader.Send(dumpRequest(f, inKernel, t.seq)); err != nil {
		return err
	}
	d := dump{seq: t.seq, visit: visit}
	for !d.done {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := t.reader.Receive(t.buf)
		if err != nil {
			return err
		}
		if err := messages(t.buf[:n], d.take); err != nil {
			return err
		}
	}
	if d.interrupted {
		return errInterrupted
	}
	return nil
}

// dump is one dump in progress.
type dump struct {
	seq               uint32
	visit             func(*flow) error
	flow              flow
	done, interrupted bool
}

func (d *dump) take(h header, payload []byte) error {
	if h.seq != d.seq {
		return nil // left over from an earlier dump that was given up
	}
	d.interrupted = d.interrupted || h.flags&dumpFlagInterrupted != 0
	switch h.typ {
	case syscall.NLMSG_DONE, syscall.NLMSG_ERROR:
		d.done = true
		return errnoOf(payload)
	case msgNew:
		if d.flow.parse(payload) {
			return d.visit(&d.flow)
		}
	}
	return nil
}

// header is that of a message.
type header struct {
	typ, flags uint16
	seq        uint32
}

// messages walks over the messages in b until take returns an error.
func messages(b []byte, take func(header, []byte) error) error {
	for len(b) >= headerLen {
		length := int(binary.NativeEndian.Uint32(b))
		if length < headerLen || length > len(b) {
			return fmt.Errorf("a message of the kernel claims to have %d bytes, of %d that arrived", length, len(b))
		}
		h := header{typ: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
			seq: binary.NativeEndian.Uint32(b[8:])}
		if err := take(h, b[headerLen:length]); err != nil {
			return err
		}
		b = b[min(align(length), len(b)):]
	}
	return nil
}

// errnoOf reads the outcome that ends a dump or answers a request.
func errnoOf(payload []byte) error {
	if len(payload) < 4 {
		return nil
	}
	if errno := int32(binary.NativeEndian.Uint32(payload)); errno != 0 {
		return syscall.Errno(-errno)
	}
	return nil
}
