package netlink

import (
	"encoding/binary"
	"errors"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeSocket answers each send with what answer makes of its messages. A received error is an answer too.
type fakeSocket struct {
	sent    []int // how many messages each send had
	answer  func(h Header, body []byte) [][]byte
	answers [][]byte
	failed  error // what Receive returns once, when there are no answers
}

func (s *fakeSocket) Close() error { return nil }

func (s *fakeSocket) Send(b []byte) error {
	s.sent = append(s.sent, 0)
	return Messages(b, func(h Header, body []byte) {
		s.sent[len(s.sent)-1]++
		s.answers = append(s.answers, s.answer(h, body)...)
	})
}

func (s *fakeSocket) Receive(b []byte) (int, error) {
	if len(s.answers) == 0 {
		return 0, s.failed
	}
	n := copy(b, s.answers[0])
	s.answers = s.answers[1:]
	return n, nil
}

func outcome(seq uint32, err syscall.Errno, request ...byte) []byte {
	body := binary.NativeEndian.AppendUint32(nil, uint32(-int32(err)))
	return Message{Type: unix.NLMSG_ERROR, Body: append(body, request...)}.Append(nil, seq)
}

// TestDo: each request of a batch has its own outcome, and only the last of a send asks for an answer.
func TestDo(t *testing.T) {
	t.Parallel()
	s := &fakeSocket{}
	s.answer = func(h Header, body []byte) [][]byte {
		switch {
		case body[0] == 7:
			return [][]byte{outcome(h.Seq, unix.EEXIST)}
		case h.Flags&unix.NLM_F_ACK != 0:
			return [][]byte{outcome(h.Seq-1000, unix.EIO), outcome(h.Seq, 0)} // The first one is for a request of long ago.
		}
		return nil
	}
	c := NewConn(s)
	requests := slices.Repeat([]Message{{Type: 20, Body: []byte{1}}}, 2*maxBatch+10)
	if errs := c.Do(requests...); errs != nil {
		t.Errorf("errors %v", errs)
	}
	if want := []int{maxBatch, maxBatch, 10}; !slices.Equal(s.sent, want) {
		t.Errorf("sent %v, want %v", s.sent, want)
	}
	failing := []int{0, maxBatch - 1, maxBatch, 2*maxBatch + 9}
	for _, i := range failing {
		requests[i].Body = []byte{7}
	}
	for i, err := range c.Do(requests...) {
		if slices.Contains(failing, i) != errors.Is(err, unix.EEXIST) {
			t.Errorf("request %d: %v", i, err)
		}
	}
	if errs := c.Do(); errs != nil {
		t.Errorf("of no requests: %v", errs)
	}
}

// TestAnswersLost: requests whose answers are lost have the error that says so; those before them keep theirs.
func TestAnswersLost(t *testing.T) {
	t.Parallel()
	s := &fakeSocket{failed: unix.ENOBUFS}
	s.answer = func(h Header, body []byte) [][]byte {
		if body[0] == 7 {
			return [][]byte{outcome(h.Seq, unix.EEXIST)}
		}
		return nil
	}
	errs := NewConn(s).Do(Message{Body: []byte{1}}, Message{Body: []byte{7}}, Message{Body: []byte{1}})
	if len(errs) != 3 || !errors.Is(errs[0], unix.ENOBUFS) || !errors.Is(errs[1], unix.EEXIST) || !errors.Is(errs[2], unix.ENOBUFS) {
		t.Errorf("errors %v", errs)
	}
}

// TestDumpGivenUp: after a dump that was given up, the next request waits for its end, and takes nothing of it for its own answer.
func TestDumpGivenUp(t *testing.T) {
	t.Parallel()
	s := &fakeSocket{}
	s.answer = func(h Header, _ []byte) [][]byte {
		item := func(n byte, flags uint16) []byte {
			return Message{Type: 20, Flags: flags, Body: []byte{n}}.Append(nil, h.Seq)
		}
		done := Message{Type: unix.NLMSG_DONE, Body: make([]byte, 4)}.Append(nil, h.Seq)
		switch {
		case h.Type == 2:
			return [][]byte{item(9, 0)}
		case h.Type == 3:
			return [][]byte{item(1, unix.NLM_F_DUMP_INTR), done}
		}
		return [][]byte{append(item(1, 0), item(2, 0)...), item(3, 0), done}
	}
	c := NewConn(s)
	giveUp, got := errors.New("enough"), []byte(nil)
	err := c.Dump(Message{Type: 1}, func(body []byte) error { got = append(got, body[0]); return giveUp })
	if err != giveUp || len(got) != 1 || len(s.answers) != 2 {
		t.Errorf("%v after %v, and %d parts left", err, got, len(s.answers))
	}
	if answer, err := c.Ask(Message{Type: 2}); err != nil || answer[0] != 9 || len(s.answers) != 0 {
		t.Errorf("the next answer is %v, %v; %d parts left", answer, err, len(s.answers))
	}
	got = nil
	err = c.Dump(Message{Type: 1}, func(body []byte) error { got = append(got, body[0]); return nil })
	if err != nil || string(got) != "\x01\x02\x03" {
		t.Errorf("a dump: %v, %v", got, err)
	}
	if err := c.Dump(Message{Type: 3}, func([]byte) error { return nil }); !errors.Is(err, ErrInterrupted) {
		t.Errorf("an interrupted dump: %v", err)
	}
}

// TestAskAll: each request has its own answer, whatever the others have; what is not an answer to any is passed over; and after an error of
// each, the rest of what was asked is read, so that the next request gets its own.
func TestAskAll(t *testing.T) {
	t.Parallel()
	s := &fakeSocket{}
	s.answer = func(h Header, body []byte) [][]byte {
		if body[0]%3 == 0 {
			return [][]byte{outcome(h.Seq, unix.ENOENT)}
		}
		late := Message{Type: 20, Body: []byte{0}}.Append(nil, h.Seq-1)
		return [][]byte{append(late, Message{Type: 20, Body: body[:1]}.Append(nil, h.Seq)...), late}
	}
	c := NewConn(s)
	requests := make([]Message, 2*AskedAtOnce+10)
	for i := range requests {
		requests[i] = Message{Type: 1, Body: []byte{byte(i)}}
	}
	next := 0
	err := c.AskAll(requests, func(i int, answer []byte, err error) error {
		absent := byte(i)%3 == 0
		if i != next || absent != errors.Is(err, unix.ENOENT) || absent != (answer == nil) || !absent && answer[0] != byte(i) {
			t.Errorf("answer %d, want %d: %v, %v", i, next, answer, err)
		}
		next++
		return nil
	})
	if err != nil || next != len(requests) || !slices.Equal(s.sent, []int{AskedAtOnce, AskedAtOnce, 10}) {
		t.Errorf("%d answers, sent in %v: %v", next, s.sent, err)
	}
	enough := errors.New("enough")
	if err := c.AskAll(requests, func(i int, _ []byte, _ error) error { return enough }); err != enough || len(s.answers) > 1 {
		t.Errorf("%v, with %d answers left", err, len(s.answers))
	}
	if answer, err := c.Ask(Message{Type: 1, Body: []byte{200}}); err != nil || answer[0] != 200 {
		t.Errorf("the next answer is %v, %v", answer, err)
	}
	s.answers, s.failed = nil, unix.ENOBUFS
	s.answer = func(Header, []byte) [][]byte { return nil }
	if err := c.AskAll(requests[:2], func(int, []byte, error) error { return nil }); !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("where answers are lost: %v", err)
	}
}

// TestOutcome: errors above those that all of the kernel shares come with the request, in which the subsystem may have written.
func TestOutcome(t *testing.T) {
	t.Parallel()
	var own *SubsystemError
	for _, c := range []struct {
		number int32
		want   error
	}{{0, nil}, {-int32(unix.ENOENT), unix.ENOENT}, {-4095, syscall.Errno(4095)}, {5, nil}} {
		body := binary.NativeEndian.AppendUint32(nil, uint32(c.number))
		if err := Outcome(body); err != c.want {
			t.Errorf("%d: %v, want %v", c.number, err, c.want)
		}
	}
	private := int32(-4103)
	err := Outcome(append(binary.NativeEndian.AppendUint32(nil, uint32(private)), 1, 2, 3))
	if !errors.As(err, &own) || own.Number != 4103 || string(own.Request) != "\x01\x02\x03" {
		t.Errorf("an error of a subsystem: %v", err)
	}
	if err := Messages([]byte{200, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, func(Header, []byte) {}); err == nil {
		t.Error("a message that is cut short is none")
	}
}
