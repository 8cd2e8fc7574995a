package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// conn is a netlink socket for many requests at once. Neither moby/ipvs nor vishvananda/netlink sends a second request
// before it has read the answer to the first.
//
// The kernel deals with all messages of one send in order before send returns, and answers those that failed in any case.
// So only the last message of a send asks for an answer, and its answer says that there are no more: a few hundred changes
// cost one send and one receive.
type conn struct {
	fd     int
	seq    uint32
	buffer []byte
}

// message is one request. Its body is what follows the netlink header.
type message struct {
	kind, flags uint16
	body        []byte
}

const (
	// maxBatch is how many messages are sent at once: so few that an error for each fits into the socket's receive buffer.
	maxBatch = 200
	// answerTimeout is for a kernel that never answers. Loading a module takes the longest.
	answerTimeout = 30 * time.Second
)

func dial(protocol int) (*conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<20), // as far as net.core.rmem_max allows
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return &conn{fd: fd, buffer: make([]byte, 64<<10)}, nil
}

// close closes the socket. What uses it afterwards gets an error, and not whatever has its number by then.
func (c *conn) close() error {
	fd := c.fd
	c.fd = -1
	return unix.Close(fd)
}

// do carries out messages in order. It returns nil, or an error (or nil) for each message. Where the kernel's answers are
// lost, each message without an answer has the error that says so; it may have been carried out.
func (c *conn) do(ms []message) []error {
	var errs []error
	fail := func(i int, err error) {
		if errs == nil {
			errs = make([]error, len(ms))
		}
		errs[i] = err
	}
	for start := 0; start < len(ms); {
		end := min(start+maxBatch, len(ms))
		if err := c.batch(ms[start:end], func(i int, err error) { fail(start+i, err) }); err != nil {
			for i := start; i < len(ms); i++ {
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

// batch sends messages at once, and reports those that failed.
func (c *conn) batch(ms []message, fail func(int, error)) error {
	first := c.seq + 1
	var b []byte
	for i, m := range ms {
		c.seq++
		if i == len(ms)-1 {
			m.flags |= unix.NLM_F_ACK
		}
		b = c.append(b, m)
	}
	if err := c.send(b); err != nil {
		return err
	}
	for {
		answers, err := c.receive()
		if err != nil {
			return err
		}
		for _, a := range answers {
			i := a.Header.Seq - first // Below 0, and so above any index, for answers to what was given up earlier.
			if i >= uint32(len(ms)) || a.Header.Type != unix.NLMSG_ERROR {
				continue
			}
			if err := answerError(a.Data); err != nil {
				fail(int(i), err)
			}
			if int(i) == len(ms)-1 {
				return nil
			}
		}
	}
}

// ask sends one request that is answered with one message.
func (c *conn) ask(m message) (body []byte, err error) {
	c.seq++
	if err := c.send(c.append(nil, m)); err != nil {
		return nil, err
	}
	for {
		answers, err := c.receive()
		if err != nil {
			return nil, err
		}
		for _, a := range answers {
			switch {
			case a.Header.Seq != c.seq:
			case a.Header.Type == unix.NLMSG_ERROR:
				return nil, answerError(a.Data)
			default:
				return a.Data, nil
			}
		}
	}
}

// dump sends a request that is answered with any number of messages, and calls each with their bodies. What changed while
// the kernel was at it may be missing or twice in there: then the error is errInterrupted.
func (c *conn) dump(m message, each func(body []byte) error) error {
	c.seq++
	m.flags |= unix.NLM_F_DUMP
	if err := c.send(c.append(nil, m)); err != nil {
		return err
	}
	var failed error
	interrupted := false
	for {
		answers, err := c.receive()
		if err != nil {
			return err
		}
		for _, a := range answers {
			if a.Header.Seq != c.seq {
				continue
			}
			interrupted = interrupted || a.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch a.Header.Type {
			case unix.NLMSG_ERROR, unix.NLMSG_DONE:
				if err := answerError(a.Data); failed == nil && err != nil {
					failed = err
				}
				if failed == nil && interrupted {
					failed = errInterrupted
				}
				return failed
			default: // Even after a failure, all is read: the socket takes no other request before.
				if failed == nil {
					failed = each(a.Data)
				}
			}
		}
	}
}

// errInterrupted says that what a dump returned was changed meanwhile.
var errInterrupted = errors.New("it kept changing while it was read")

// whole calls a function that dumps until nothing changes meanwhile.
func whole(dump func() error) error {
	var err error
	for range 10 {
		if err = dump(); !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return err
}

func (c *conn) append(b []byte, m message) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+len(m.body)))
	b = binary.NativeEndian.AppendUint16(b, m.kind)
	b = binary.NativeEndian.AppendUint16(b, m.flags|unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, c.seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // the port: the kernel knows
	return pad(append(b, m.body...))
}

func (c *conn) send(b []byte) error {
	if err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("netlink send: %w", err)
	}
	return nil
}

// receive returns copies: they may be kept.
func (c *conn) receive() ([]syscall.NetlinkMessage, error) {
	for {
		n, from, err := unix.Recvfrom(c.fd, c.buffer, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("netlink receive: no answer within %v", answerTimeout)
		case err != nil:
			return nil, fmt.Errorf("netlink receive: %w", err)
		}
		if s, ok := from.(*unix.SockaddrNetlink); !ok || s.Pid != 0 {
			continue // Only the kernel has port 0; any process may send.
		}
		messages, err := syscall.ParseNetlinkMessage(append([]byte(nil), c.buffer[:n]...))
		if err != nil {
			return nil, fmt.Errorf("netlink receive: %w", err)
		}
		return messages, nil
	}
}

// answerError is the error in an NLMSG_ERROR or NLMSG_DONE; 0, or none at all, is success.
func answerError(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	n := int32(binary.NativeEndian.Uint32(body))
	switch {
	case n >= 0 || n == math.MinInt32:
		return nil
	case n <= -ipsetPrivateErrors:
		return setError{number: -n, entry: failedEntry(body[4:])}
	default:
		return syscall.Errno(-n)
	}
}
