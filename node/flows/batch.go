package flows

import (
	"encoding/binary"
	"errors"
	"syscall"
)

// batchSize is how many deletions go to the kernel at once. Should all of them fail, the answers still fit into the
// receive buffer that a socket has by default.
const batchSize = 128

// batch collects deletions, so that many cost one call.
type batch struct {
	text  message
	count int
	last  int // where the last message starts
	seq   uint32
	buf   []byte
}

// add notes a flow for deletion, and deletes what was noted so far if that is enough. deleted grows by what the kernel
// says it deleted.
func (b *batch) add(c conn, f *flow, deleted *int) error {
	b.last = len(b.text)
	b.text = f.deleteRequest(b.text, syscall.NLM_F_REQUEST, b.seq+uint32(b.count)+1)
	b.count++
	if b.count < batchSize {
		return nil
	}
	return b.flush(c, deleted)
}

// flush deletes what was noted. Only the last message asks for an answer; others are answered if they fail. A flow that
// has ended meanwhile is no failure.
func (b *batch) flush(c conn, deleted *int) error {
	if b.count == 0 {
		return nil
	}
	if b.buf == nil {
		b.buf = make([]byte, receiveBuffer)
	}
	binary.NativeEndian.PutUint16(b.text[b.last+6:], syscall.NLM_F_REQUEST|syscall.NLM_F_ACK)
	first, last := b.seq+1, b.seq+uint32(b.count)
	text, count := b.text, b.count
	b.text, b.count, b.seq = b.text[:0], 0, last
	if err := c.Send(text); err != nil {
		return err
	}
	failed, done := 0, false
	var errs error
	for !done {
		n, err := c.Receive(b.buf)
		if err != nil {
			return err
		}
		err = messages(b.buf[:n], func(h header, payload []byte) error {
			if h.typ != syscall.NLMSG_ERROR || h.seq-first >= uint32(count) {
				return nil
			}
			done = done || h.seq == last
			if err := errnoOf(payload); err != nil {
				failed++
				if errs == nil && !errors.Is(err, syscall.ENOENT) {
					errs = err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	*deleted += count - failed
	return errs
}
