// Package netlink sends requests to the kernel and reads its answers and notifications. It is what kernel/ipvs, kernel/ipset,
// kernel/conntrack, kernel/host, kernel/nft, kernel/nfacct and kernel/sockets have in common, and knows no subsystem.
//
// It exists because neither library serves without loss. vishvananda/netlink sends a request only after it has read the answer to
// the one before: 3,000 changes of virtual servers would be 3,000 round trips instead of 15. mdlayher/netlink can send several at once,
// but returns an error without the sequence number that says which of them failed, and without the request, in which ipset notes
// the entry that it refused; and it does not report that a dump was interrupted. A dump of 100,000 tracked flows takes the same
// time with all three, most of it in the kernel, and allocates 0.2 MB here, 34 MB with vishvananda/netlink and 63 MB with
// mdlayher/netlink. Lists of links, addresses, routes and routing rules, which are short, are left to vishvananda/netlink, and the
// encoding of nftables expressions to google/nftables.
package netlink

import (
	"cmp"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Conn is a socket for requests, in the network namespace of the thread that opened it. It is not safe for concurrent use.
//
// The kernel handles all messages of one send in order before send returns, and answers those that failed in any case. So only the
// last message of a send asks for an answer, and its answer says that there are no more: a few hundred changes cost one send and
// one receive.
type Conn struct {
	socket Socket
	seq    uint32 // of the last message sent
	// dumping is set while answers to an abandoned dump are still to come.
	dumping bool
	in, out []byte
}

// maxBatch is the number of messages that are sent at once: so few that an error for each fits into the socket's receive buffer.
const maxBatch = 200

// Dial opens a Conn for a netlink protocol, such as unix.NETLINK_ROUTE.
func Dial(protocol int) (*Conn, error) {
	s, err := openSocket(protocol)
	if err != nil {
		return nil, err
	}
	return NewConn(s), nil
}

// DialParts opens a Conn that has room for answers of so many bytes, and whose dumps come in parts of at most that length, or of 32 KiB if that is less.
func DialParts(protocol, most int) (*Conn, error) {
	c, err := Dial(protocol)
	if err == nil {
		c.in = make([]byte, most)
	}
	return c, err
}

// NewConn returns a Conn that uses a socket.
func NewConn(s Socket) *Conn { return &Conn{socket: s} }

// Close closes the socket.
func (c *Conn) Close() error { return c.socket.Close() }

// Do carries out requests in order. It returns nil, or an error (or nil) for each. If answers of the kernel are lost, each request
// without an answer gets the error that says so; it may have been carried out. A failed request does not keep those after it from
// being carried out.
func (c *Conn) Do(requests ...Message) []error {
	var errs []error
	fail := func(i int, err error) {
		if errs == nil {
			errs = make([]error, len(requests))
		}
		errs[i] = err
	}
	for start := 0; start < len(requests); {
		end := min(start+maxBatch, len(requests))
		if err := c.batch(requests[start:end], end-start-1, func(i int, err error) { fail(start+i, err) }); err != nil {
			for i := start; i < len(requests); i++ {
				if errs == nil || errs[i] == nil {
					fail(i, err)
				}
			}
			return errs
		}
		start = end
	}
	return errs
}

// Transact carries out requests of which the first begins a transaction and the last commits it, in a single send, which must fit
// into the send buffer (see OpenLarge). The error of the transaction as a whole is that of the first request. Kernels before 6.10 do
// not answer the last request, so the one before it asks for an answer; a first request that fails may be the only one to be answered.
// Where the answers are lost, the error says so, and the transaction may have been committed.
func (c *Conn) Transact(requests []Message) (errs map[int]error, err error) {
	errs = map[int]error{}
	err = c.batch(requests, len(requests)-2, func(i int, err error) { errs[i] = err })
	return errs, err
}

// batch sends requests at once, and reports those that failed. asks is the index of the one that asks for an answer.
func (c *Conn) batch(requests []Message, asks int, fail func(int, error)) error {
	if err := c.send(asks, requests...); err != nil {
		return err
	}
	return c.answers(len(requests), func(i int, h Header, body []byte) bool {
		if h.Type != unix.NLMSG_ERROR {
			return false
		}
		err := Outcome(body)
		if err != nil {
			fail(i, located(h, body, err))
		}
		return i == asks || asks != len(requests)-1 && i == 0 && err != nil
	})
}

// answers calls each with the answers to the last n requests, by their indexes, until it returns true, and with what came together with the
// answer for which it did.
func (c *Conn) answers(n int, each func(i int, h Header, body []byte) (done bool)) error {
	first := c.seq - uint32(n) + 1
	for done := false; !done; {
		err := c.receive(func(h Header, body []byte) {
			if i := h.Seq - first; i < uint32(n) { // Answers to abandoned requests have numbers below 0, and so above any index.
				done = each(int(i), h, body) || done
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Ask sends a request that is answered with one message, and returns the body of that message, which is valid until the next
// request.
func (c *Conn) Ask(m Message) (answer []byte, err error) {
	err = c.AskFor(m, 1, func(body []byte) error {
		answer = body
		return nil
	})
	return answer, err
}

// AskedAtOnce is how many answers are asked for at once: so few that an answer, for which the kernel may take a page and more,
// fits into the receive buffer of a socket that could not be made larger than is usual.
const AskedAtOnce = 64

// AskAll sends requests, each of which is answered with one message, and calls each, in order, with their indexes and the bodies of the
// answers, which are valid only during the call, or with errors. It stops at the first error of each.
func (c *Conn) AskAll(requests []Message, each func(i int, answer []byte, err error) error) error {
	for start := 0; start < len(requests); start += AskedAtOnce {
		some := requests[start:min(start+AskedAtOnce, len(requests))]
		if err := c.send(-1, some...); err != nil {
			return err
		}
		next := 0
		var failed error
		err := c.answers(len(some), func(i int, h Header, body []byte) bool {
			if i != next { // a second answer
				return false
			}
			var err error
			if h.Type == unix.NLMSG_ERROR {
				body, err = nil, Outcome(body)
			}
			if next++; failed == nil {
				failed = each(start+i, body, err)
			}
			return next == len(some)
		})
		if err := cmp.Or(err, failed); err != nil {
			return err
		}
	}
	return nil
}

// AskFor sends a request that is answered with n messages, or with fewer and an error, and calls each with the bodies of the messages, which
// are valid only during the call. It stops at the first error of each. n may be as many as AskAll asks for at once: AskedAtOnce.
func (c *Conn) AskFor(m Message, n int, each func(answer []byte) error) error {
	if err := c.send(-1, m); err != nil {
		return err
	}
	var failed error
	err := c.answers(1, func(_ int, h Header, body []byte) bool {
		switch {
		case n == 0:
		case h.Type == unix.NLMSG_ERROR:
			n, failed = 0, cmp.Or(failed, Outcome(body))
		default:
			if n--; failed == nil {
				failed = each(body)
			}
		}
		return n == 0
	})
	return cmp.Or(err, failed)
}

// Dump sends a request that is answered with any number of messages, and calls each with their bodies, which are valid only during
// the call. It stops at the first error of each. If the listed objects have changed meanwhile, so that some may be missing or
// listed twice, the error is ErrInterrupted.
func (c *Conn) Dump(m Message, each func(body []byte) error) error {
	m.Flags |= unix.NLM_F_DUMP
	if err := c.send(-1, m); err != nil {
		return err
	}
	c.dumping = true
	var failed, interrupted error
	err := c.answers(1, func(_ int, h Header, body []byte) bool {
		switch {
		case failed != nil:
		case h.Type == unix.NLMSG_ERROR || h.Type == unix.NLMSG_DONE:
			failed = Outcome(body)
		default:
			failed = each(body)
		}
		if h.Flags&unix.NLM_F_DUMP_INTR != 0 {
			interrupted = ErrInterrupted
		}
		return failed != nil || !c.dumping
	})
	return cmp.Or(err, failed, interrupted)
}

// ErrInterrupted is the error of a dump of objects that changed meanwhile.
var ErrInterrupted = errors.New("it changed while it was read")

// Retry calls a function that dumps until nothing changes meanwhile, up to a limit.
func Retry(dump func() error) error {
	var err error
	for range 10 {
		if err = dump(); !errors.Is(err, ErrInterrupted) {
			return err
		}
	}
	return err
}

// send sends requests at once. asks is the index of the one that asks for an answer even if it succeeds; -1 for none.
func (c *Conn) send(asks int, requests ...Message) error {
	if err := c.drain(); err != nil {
		return err
	}
	c.out = c.out[:0]
	for i, m := range requests {
		c.seq++
		if m.Flags |= unix.NLM_F_REQUEST; i == asks {
			m.Flags |= unix.NLM_F_ACK
		}
		c.out = m.Append(c.out, c.seq)
	}
	if err := c.socket.Send(c.out); err != nil {
		return fmt.Errorf("netlink send: %w", err)
	}
	return nil
}

// drain reads the rest of an abandoned dump: the kernel begins no other before its end.
func (c *Conn) drain() error {
	for c.dumping {
		if err := c.receive(func(Header, []byte) {}); err != nil {
			c.dumping = false // If it is not over, the next request fails.
			return err
		}
	}
	return nil
}

// receive waits for messages, and calls each with those from the kernel.
func (c *Conn) receive(each func(h Header, body []byte)) error {
	if c.in == nil {
		c.in = make([]byte, longest)
	}
	n, err := c.socket.Receive(c.in)
	if err == nil {
		err = Messages(c.in[:n], func(h Header, body []byte) {
			if h.Seq == c.seq && (h.Type == unix.NLMSG_ERROR || h.Type == unix.NLMSG_DONE) {
				c.dumping = false
			}
			each(h, body)
		})
	}
	if err != nil {
		return fmt.Errorf("netlink receive: %w", err)
	}
	return nil
}

// Port is the number of the socket, which the kernel's notifications have of who has made a change; 0 where that is not known.
func (c *Conn) Port() uint32 {
	if s, is := c.socket.(interface{ Port() uint32 }); is {
		return s.Port()
	}
	return 0
}
