package netlink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Subscription is a socket that receives notifications, in the network namespace of the thread that opened it.
type Subscription struct {
	file *os.File
}

// Subscribe opens a Subscription to multicast groups of a netlink protocol, with a receive buffer of room bytes; 0 stands for the
// kernel's default.
func Subscribe(protocol, room int, groups ...int) (*Subscription, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	if room > 0 {
		_ = setReceiveBuffer(fd, room) // With less room, more is lost, which Follow reports.
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, g := range groups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g)
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("subscribing to netlink notifications: %w", err)
	}
	return &Subscription{os.NewFile(uintptr(fd), "netlink notifications")}, nil
}

// Close closes the socket, which ends Follow.
func (s *Subscription) Close() error { return s.file.Close() }

// pauseAfterError keeps a permanent error from using a whole processor.
const pauseAfterError = 100 * time.Millisecond

// Follow calls each with every notification until ctx ends, and then closes the socket. For lost notifications it calls failed with
// the error: unix.ENOBUFS if the buffer was full.
func (s *Subscription) Follow(ctx context.Context, each func(h Header, body []byte), failed func(error)) {
	defer s.Close()
	defer context.AfterFunc(ctx, func() { s.Close() })()
	buffer := make([]byte, longest)
	for {
		n, port, err := s.receive(buffer)
		if err == nil && port == 0 { // Only the kernel has port 0.
			err = Messages(buffer[:n], each)
		}
		switch {
		case ctx.Err() != nil || errors.Is(err, os.ErrClosed):
			return
		case err == nil:
			continue
		}
		if failed(err); !errors.Is(err, unix.ENOBUFS) {
			select {
			case <-ctx.Done():
			case <-time.After(pauseAfterError):
			}
		}
	}
}

func (s *Subscription) receive(b []byte) (n int, port uint32, err error) {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var received error
	err = raw.Read(func(fd uintptr) (done bool) {
		n, port, received = receive(int(fd), b)
		return !errors.Is(received, unix.EAGAIN)
	})
	if err != nil {
		return 0, 0, err
	}
	return n, port, received
}
