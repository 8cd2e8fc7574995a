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

// Probes and servers use sockets by system calls: on a kernel where these are slow, each one that package net's poller would
// make takes processor time from the proxy that is measured. Connections end with a reset (SO_LINGER 0), so that none waits
// in TIME_WAIT and the client does not run out of ports.

const (
	// handshake is how long a probe waits for a connection. It comes within a millisecond or not at all: a refusal that
	// meets a socket in the middle of connect(2) would show only when the kernel tries again, a second later.
	handshake = 30 * time.Millisecond
	// patience is how long a client with a connection waits for what the server says.
	patience = 5 * time.Second
)

// server tells each client the address at which it was reached, which is the endpoint's, and the client's own address.
type server struct {
	listener int
	done     sync.WaitGroup
}

// serve starts a server on a port of all addresses that are local in a namespace.
func serve(n *harness.Netns, port int) (*server, error) {
	s := &server{}
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
	s.done.Go(s.accept)
	return s, nil
}

// close ends the server: shutdown wakes it from accept.
func (s *server) close() {
	_ = syscall.Shutdown(s.listener, syscall.SHUT_RDWR)
	s.done.Wait()
	_ = syscall.Close(s.listener)
}

func (s *server) accept() {
	for {
		fd, peer, err := syscall.Accept4(s.listener, syscall.SOCK_CLOEXEC)
		switch err {
		case nil:
			greet(fd, peer)
			_ = syscall.Close(fd)
		case syscall.EINTR, syscall.ECONNABORTED:
		default:
			return
		}
	}
}

func greet(fd int, peer syscall.Sockaddr) {
	local, err := syscall.Getsockname(fd)
	if err != nil {
		return
	}
	at, ok := local.(*syscall.SockaddrInet4)
	from, alsoOK := peer.(*syscall.SockaddrInet4)
	if ok && alsoOK {
		// Not Write: the client may have gone, and that must not raise SIGPIPE.
		_ = syscall.Sendto(fd, append(at.Addr[:], from.Addr[:]...), syscall.MSG_NOSIGNAL, nil)
	}
}

// answer is what a server told a client. The zero answer is none: the connection was refused, or not made in time.
type answer struct {
	endpoint, client netip.Addr
	refused          bool
}

// ask makes a connection in the calling thread's namespace, within wait. An error means that nothing can be measured so.
func ask(to netip.AddrPort, wait time.Duration) (answer, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return answer{}, fmt.Errorf("socket of a probe: %w", err)
	}
	defer syscall.Close(fd)
	send, receive := syscall.NsecToTimeval(wait.Nanoseconds()), syscall.NsecToTimeval(patience.Nanoseconds())
	err = errors.Join(
		syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &send),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &receive))
	if err != nil {
		return answer{}, fmt.Errorf("socket of a probe: %w", err)
	}
	switch err := syscall.Connect(fd, &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err {
	case nil:
	case syscall.ECONNREFUSED:
		return answer{refused: true}, nil
	case syscall.EINPROGRESS, syscall.EINTR, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM,
		syscall.ECONNABORTED, syscall.ETIMEDOUT:
		return answer{}, nil
	default:
		return answer{}, fmt.Errorf("connect to %s: %w", to, err)
	}
	var reply [8]byte
	n, err := read(fd, reply[:])
	switch {
	case errors.Is(err, syscall.ECONNRESET):
		return answer{}, nil
	case err != nil:
		return answer{}, fmt.Errorf("answer of %s: %w", to, err)
	case n != len(reply):
		return answer{}, fmt.Errorf("answer of %s: %d bytes, want %d", to, n, len(reply))
	}
	return answer{endpoint: netip.AddrFrom4([4]byte(reply[:4])), client: netip.AddrFrom4([4]byte(reply[4:]))}, nil
}

// read is read(2), again where a signal interrupts it: the Go runtime sends itself some.
func read(fd int, b []byte) (n int, err error) {
	for {
		if n, err = syscall.Read(fd, b); err != syscall.EINTR {
			return n, err
		}
	}
}

// pause is the time until the next probe of something that was begun so long ago: a thirtieth, but two milliseconds at
// least, so that probes leave the one processor to the proxy.
func pause(since time.Duration) time.Duration {
	return min(max(since/30, 2*time.Millisecond), 200*time.Millisecond)
}

// errLate is what await returns when its time is up.
var errLate = errors.New("no answer in time")

// await probes until a wanted endpoint answers, in the calling thread's namespace, and returns the time since begun. Where
// that is one endpoint of a Service, it may take as many connections as there are: each probe makes up to that many.
func await(
	begun time.Time, to netip.AddrPort, want func(netip.Addr) bool, endpoints int, timeout time.Duration,
) (time.Duration, error) {
	for {
		for range endpoints {
			a, err := ask(to, handshake)
			if err != nil {
				return 0, err
			}
			if a.endpoint.IsValid() && want(a.endpoint) {
				return time.Since(begun), nil
			}
		}
		took := time.Since(begun)
		if took > timeout {
			return 0, fmt.Errorf("%s: %w (%s)", to, errLate, timeout)
		}
		time.Sleep(pause(took))
	}
}
