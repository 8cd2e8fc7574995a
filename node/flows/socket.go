package flows

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// conn carries netlink messages to and from the kernel.
type conn interface {
	// Send sends whole messages.
	Send(b []byte) error
	// Receive waits for messages and returns how much of b they fill.
	Receive(b []byte) (int, error)
	Close() error
}

// answerTimeout is how long the kernel may take for any one answer. It takes microseconds, unless the machine is in
// trouble; the pass is tried again then.
const answerTimeout = 10 * time.Second

// socket is a netlink socket of the network namespace that its maker's thread was in.
type socket int

func openSocket() (conn, error) {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("netlink socket for conntrack: %w", err)
	}
	timeout := syscall.NsecToTimeval(answerTimeout.Nanoseconds())
	err = errors.Join(
		syscall.Bind(fd, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &timeout),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &timeout),
		syscall.SetsockoptInt(fd, solNetlink, netlinkCapAck, 1),
	)
	if err != nil {
		syscall.Close(fd)
		return nil, fmt.Errorf("netlink socket for conntrack: %w", err)
	}
	return socket(fd), nil
}

// NETLINK_CAP_ACK (Linux 4.3): an error comes without a copy of the message that it is for.
const (
	solNetlink    = 270
	netlinkCapAck = 10
)

func (s socket) Send(b []byte) error {
	for {
		err := syscall.Sendto(int(s), b, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK})
		if err != syscall.EINTR {
			return err
		}
	}
}

func (s socket) Receive(b []byte) (int, error) {
	for {
		n, _, flags, from, err := syscall.Recvmsg(int(s), b, nil, 0)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return 0, fmt.Errorf("no answer from the kernel within %v", answerTimeout)
		case err != nil:
			return 0, err
		case flags&syscall.MSG_TRUNC != 0:
			return 0, fmt.Errorf("an answer of the kernel does not fit into %d bytes", len(b))
		}
		// Any process may send to a netlink socket whose number it guesses; the kernel's is zero.
		if k, ok := from.(*syscall.SockaddrNetlink); ok && k.Pid == 0 {
			return n, nil
		}
	}
}

func (s socket) Close() error { return syscall.Close(int(s)) }
