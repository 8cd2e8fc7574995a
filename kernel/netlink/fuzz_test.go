package netlink

import (
	"errors"
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// received are the messages that sockets of the kernel, or of whoever pretends to be the kernel, may hold.
func received(f *testing.F) {
	attributes := Buffer(nil).Uint16(1, 2).Uint32(2, 3).BigEndian32(3, 4).Text(4, "text").
		Nest(5, func(b Buffer) Buffer { return b.BigEndian16(1, 9).Bytes(2, 10, 96, 0, 1) })
	m := Message{Type: 20, Body: attributes}
	f.Add(m.Append(nil, 1))
	f.Add(m.Append(Message{Type: unix.NLMSG_DONE}.Append(nil, 1), 1))
	f.Add(outcome(1, 0))
	f.Add(outcome(1, unix.EEXIST, m.Append(nil, 1)...))
	f.Add(outcome(2, 4103, m.Append(nil, 1)...))
	f.Add([]byte{15, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{255, 255, 255, 255, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0})
	located := Message{Type: unix.NLMSG_ERROR, Flags: unix.NLM_F_CAPPED | unix.NLM_F_ACK_TLVS,
		Body: Buffer([]byte{255, 255, 255, 255, 16: 0, 19: 0}).Uint32(2, 20)}
	f.Add(located.Append(nil, 1))
}

// FuzzMessages: whatever arrives, reading it ends, and nothing is read that has not arrived.
func FuzzMessages(f *testing.F) {
	received(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		length := 0
		err := Messages(b, func(h Header, body []byte) {
			length += unix.SizeofNlMsghdr + len(body)
			if err := Outcome(body); err != nil {
				_ = located(h, body, err).Error()
			}
			inside := 0
			for kind, value := range Attributes(body) {
				if inside += align(attributeHeader + len(value)); kind&typeFlags != 0 {
					t.Errorf("the type %#x has flags", kind)
				}
				_, _, _ = Number(value), BigEndian(value), ByType(value)
				if len(Text(value)) > len(value) {
					t.Error("a text is longer than its attribute")
				}
				for _, family := range plan.Families {
					if a, err := Addr(value, family); err == nil && a.BitLen() != family.Bits() {
						t.Errorf("%s is an address of %s", a, family)
					}
				}
			}
			if inside > align(len(body)) || Whole(body) && inside < len(body) {
				t.Errorf("attributes of %d bytes in %d", inside, len(body))
			}
		})
		if err == nil && length > len(b) {
			t.Errorf("messages of %d bytes in %d", length, len(b))
		}
	})
}

// FuzzConn: whatever a socket answers with, and then nothing more, each kind of request ends.
func FuzzConn(f *testing.F) {
	received(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > longest {
			return
		}
		conn := func() *Conn {
			return NewConn(&fakeSocket{failed: io.EOF, answer: func(Header, []byte) [][]byte { return [][]byte{b} }})
		}
		_ = errors.Join(conn().Do(Message{Type: 20}, Message{Type: 21})...)
		_, _ = conn().Transact([]Message{{Type: 16}, {Type: 20}, {Type: 17}})
		_, _ = conn().Ask(Message{Type: 20})
		n := 0
		_ = Retry(func() error {
			return conn().Dump(Message{Type: 20}, func(body []byte) error { n += len(body); return nil })
		})
		if n > 100*len(b) {
			t.Errorf("a dump has %d bytes of %d", n, len(b))
		}
	})
}
