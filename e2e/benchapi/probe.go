package main

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
)

// Probes and servers use sockets by system calls on threads of their own. Package net would do, but its poller takes
// processor time from the proxies that are measured. All connections end with a reset (SO_LINGER 0), so that none waits in
// TIME_WAIT and the client does not run out of ports.

const (
	// acceptors is the number of servers that share a listening socket.
	acceptors = 4
	// handshake is how long a probe waits for the other side's SYN-ACK, which comes within some 100 us or not at all: a
	// REJECT that meets a socket in the middle of connect(2) would show only when the kernel tries again, a second later.
	handshake = 2 * time.Millisecond
	// betweenLooks is the pause between two looks at a handshake that is under way.
	betweenLooks = 100 * time.Microsecond
	// patience is how long a client with a connection waits for what the server says.
	patience = 3 * time.Second
)

// servers tell each client the address at which they were reached, which is the endpoint's, and close.
type servers struct {
	listener int
	done     sync.WaitGroup
}

// serve starts servers on a port of all addresses that are local in a namespace.
func serve(n *harness.Netns, port int) (*servers, error) {
	s := &servers{}
	err := n.Do(func() (err error) {
		if s.listener, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err = errors.Join(
			syscall.SetsockoptInt(s.listener, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1),
			syscall.Bind(s.listener, &syscall.SockaddrInet4{Port: port}),
			syscall.Listen(s.listener, 1024))
		if err != nil {
			_ = syscall.Close(s.listener)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("serve port %d in %s: %w", port, n.Name, err)
	}
	for range acceptors {
		s.done.Go(s.accept)
	}
	return s, nil
}

// close ends the servers: shutdown wakes those that wait in accept.
func (s *servers) close() {
	_ = syscall.Shutdown(s.listener, syscall.SHUT_RDWR)
	s.done.Wait()
	_ = syscall.Close(s.listener)
}

func (s *servers) accept() {
	for {
		fd, _, err := syscall.Accept4(s.listener, syscall.SOCK_CLOEXEC)
		switch err {
		case nil:
			if local, err := syscall.Getsockname(fd); err == nil {
				if at, ok := local.(*syscall.SockaddrInet4); ok {
					// Not Write: the client may have gone, and that must not raise SIGPIPE.
					_ = syscall.Sendto(fd, at.Addr[:], syscall.MSG_NOSIGNAL, nil)
				}
			}
			_ = syscall.Close(fd)
		case syscall.EINTR, syscall.ECONNABORTED:
		default:
			return
		}
	}
}

// ask makes a connection in the calling thread's namespace and returns the endpoint that answered, or an invalid address
// if none did: the connection was refused, or not made within wait. An error means that nothing can be measured so.
func ask(to netip.AddrPort, wait time.Duration) (netip.Addr, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("socket of a probe: %w", err)
	}
	defer syscall.Close(fd)
	receive := syscall.NsecToTimeval(patience.Nanoseconds())
	err = errors.Join(
		syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &receive))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("socket of a probe: %w", err)
	}
	if made, err := connect(fd, to, wait); !made || err != nil {
		return netip.Addr{}, err
	}
	if err := syscall.SetNonblock(fd, false); err != nil {
		return netip.Addr{}, fmt.Errorf("socket of a probe: %w", err)
	}
	var reply [4]byte
	n, err := read(fd, reply[:])
	switch {
	case errors.Is(err, syscall.ECONNRESET):
		return netip.Addr{}, nil
	case err != nil:
		return netip.Addr{}, fmt.Errorf("answer of %s: %w", to, err)
	case n != len(reply):
		return netip.Addr{}, fmt.Errorf("answer of %s: %d bytes, want %d", to, n, len(reply))
	}
	return netip.AddrFrom4(reply), nil
}

// connect reports whether a non-blocking socket gets its connection within wait. connect(2) again tells how it goes.
func connect(fd int, to netip.AddrPort, wait time.Duration) (bool, error) {
	at := &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	for begun := time.Now(); ; {
		switch err := syscall.Connect(fd, at); err {
		case nil, syscall.EISCONN:
			return true, nil
		case syscall.EINPROGRESS, syscall.EINTR:
			continue // mostly it is made by now
		case syscall.EALREADY:
			if time.Since(begun) >= wait {
				return false, nil
			}
			time.Sleep(betweenLooks)
		case syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM,
			syscall.ECONNABORTED, syscall.ETIMEDOUT:
			return false, nil
		default:
			return false, fmt.Errorf("connect to %s: %w", to, err)
		}
	}
}

// read is read(2), again where a signal interrupts it: the Go runtime sends itself some.
func read(fd int, b []byte) (n int, err error) {
	for {
		if n, err = syscall.Read(fd, b); err != syscall.EINTR {
			return n, err
		}
	}
}

// pause is the time until the next probe of something that was begun so long ago: a hundredth, so that what is measured is
// known to a percent and the probes of a proxy that takes seconds do not slow it down.
func pause(since time.Duration) time.Duration {
	return min(max(since/100, 300*time.Microsecond), 100*time.Millisecond)
}

// errLate is what await returns when its time is up.
var errLate = errors.New("no answer in time")

// await probes until a wanted endpoint answers, in the calling thread's namespace, and returns the time since begun.
func await(begun time.Time, to netip.AddrPort, want func(netip.Addr) bool, timeout time.Duration) (time.Duration, error) {
	for {
		from, err := ask(to, handshake)
		took := time.Since(begun)
		switch {
		case err != nil:
			return 0, err
		case from.IsValid() && want(from):
			return took, nil
		case took > timeout:
			return 0, fmt.Errorf("%s: %w (%s)", to, errLate, timeout)
		}
		time.Sleep(pause(took))
	}
}
