package netlink

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Socket carries messages to and from the kernel. Tests replace it.
type Socket interface {
	// Send sends whole messages.
	Send(b []byte) error
	// Receive waits for messages, and returns the number of bytes of b that they fill.
	Receive(b []byte) (int, error)
	Close() error
}

const (
	// answerTimeout is the time that the kernel has for an answer. Loading a module takes the longest.
	answerTimeout = 30 * time.Second
	// receiveBuffer is the size of the receive buffer: room for an error for each message of a batch, and more.
	receiveBuffer = 1 << 20
	// longest is the length of the longest answer: an error that repeats a request as long as an attribute can be. A part of a dump
	// has up to 32 kB.
	longest = 68 << 10
)

// socket is a socket of the kernel.
type socket struct{ fd int }

func openSocket(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout),
		setReceiveBuffer(fd, receiveBuffer),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return &socket{fd}, nil
}

// OpenLarge opens a socket that can send so many bytes at once, for a netlink protocol, in the network namespace of the calling thread.
// The errors of requests are *AtError where the kernel says what it objects to.
func OpenLarge(protocol, bytes int) (Socket, error) {
	s, err := openSocket(protocol)
	if err != nil {
		return nil, err
	}
	if err := setBuffer(s.fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, bytes); err != nil {
		_ = s.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	// Errors then say where in a request the kernel found fault, and do not repeat the request. Kernels before 4.12 do neither.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return s, nil
}

// setReceiveBuffer makes room for this number of bytes or, without the right to do so, as much as net.core.rmem_max allows.
func setReceiveBuffer(fd, size int) error {
	return setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, size)
}

func setBuffer(fd, force, usual, size int) error {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) == nil {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, usual, size)
}

func (s *socket) Send(b []byte) error {
	for {
		if err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (s *socket) Receive(b []byte) (int, error) {
	for {
		n, port, err := receive(s.fd, b)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("no answer from the kernel within %v", answerTimeout)
		case err != nil || port == 0: // Any process may send; only the kernel has port 0.
			return n, err
		}
	}
}

// receive receives once, and also returns the sender's port.
func receive(fd int, b []byte) (n int, port uint32, err error) {
	err = unix.EINTR
	var flags int
	var from unix.Sockaddr
	for errors.Is(err, unix.EINTR) {
		n, _, flags, from, err = unix.Recvmsg(fd, b, nil, 0)
	}
	if err != nil {
		return 0, 0, err
	}
	if flags&unix.MSG_TRUNC != 0 {
		return 0, 0, fmt.Errorf("a message does not fit into %d bytes", len(b))
	}
	sender, ok := from.(*unix.SockaddrNetlink)
	if !ok {
		return 0, 0, errors.New("a message comes from no netlink socket")
	}
	return n, sender.Pid, nil
}

// Close closes the socket. Later uses fail; they never reach another file with the same number.
func (s *socket) Close() error {
	fd := s.fd
	s.fd = -1
	return unix.Close(fd)
}

// Port is the number that the kernel has given to the socket.
func (s *socket) Port() uint32 {
	name, err := unix.Getsockname(s.fd)
	if nl, is := name.(*unix.SockaddrNetlink); err == nil && is {
		return nl.Pid
	}
	return 0
}
