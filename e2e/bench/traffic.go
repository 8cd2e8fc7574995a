package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
)

// Everything here uses blocking sockets on threads of their own instead of package net, whose poller costs more than the
// network that is to be measured. Connections end with a reset (SO_LINGER 0), so that none waits in TIME_WAIT and the
// client does not run out of ports.

// acceptors is the number of servers that share a listening socket.
const acceptors = 4

// patience is how long a client waits for an answer.
const patience = 3 * time.Second

// servers answer each request of one byte with the address at which it arrived, which tells the endpoint.
type servers struct {
	listener int
	done     sync.WaitGroup
}

func serve(n *harness.Netns, port int) (*servers, error) {
	s := &servers{}
	err := n.Do(func() (err error) {
		if s.listener, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err = errors.Join(
			syscall.SetsockoptInt(s.listener, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1),
			syscall.Bind(s.listener, &syscall.SockaddrInet4{Port: port}),
			syscall.Listen(s.listener, 4096),
		)
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
			answer(fd)
		case syscall.EINTR, syscall.ECONNABORTED:
		default:
			return
		}
	}
}

func answer(fd int) {
	defer syscall.Close(fd)
	_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, timeval(patience))
	var request [1]byte
	if n, err := read(fd, request[:]); err != nil || n == 0 {
		return
	}
	local, err := syscall.Getsockname(fd)
	if err != nil {
		return
	}
	if at, ok := local.(*syscall.SockaddrInet4); ok {
		// Not Write: the client may have gone, and that must not raise SIGPIPE.
		_ = syscall.Sendto(fd, at.Addr[:], syscall.MSG_NOSIGNAL, nil)
		_, _ = read(fd, request[:]) // until the client ends the connection
	}
}

// connect opens a connection and says how long connect(2) took. Where a signal interrupts that (the Go runtime sends
// itself some), it starts again with a new socket, and a new time.
func connect(to netip.AddrPort) (fd int, took time.Duration, err error) {
	for {
		if fd, took, err = connectOnce(to); !errors.Is(err, syscall.EINTR) {
			return fd, took, err
		}
	}
}

func connectOnce(to netip.AddrPort) (fd int, took time.Duration, err error) {
	fd, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, 0, err
	}
	err = errors.Join(
		syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, timeval(patience)),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, timeval(patience)),
	)
	addr := &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	begun := time.Now()
	if err == nil {
		err = syscall.Connect(fd, addr)
	}
	took = time.Since(begun)
	if err != nil {
		_ = syscall.Close(fd)
		return -1, 0, fmt.Errorf("connect to %s: %w", to, err)
	}
	return fd, took, nil
}

// ask makes a connection, sends a request of one byte, and returns the endpoint that answered.
func ask(to netip.AddrPort) (netip.Addr, error) {
	fd, _, err := connect(to)
	if err != nil {
		return netip.Addr{}, err
	}
	defer syscall.Close(fd)
	var reply [4]byte
	if _, err := syscall.Write(fd, []byte{1}); err != nil {
		return netip.Addr{}, fmt.Errorf("request to %s: %w", to, err)
	}
	if n, err := read(fd, reply[:]); err != nil || n != len(reply) {
		return netip.Addr{}, fmt.Errorf("answer of %s: %d bytes, %w", to, n, err)
	}
	return netip.AddrFrom4(reply), nil
}

// read is read(2), again where a signal interrupts it.
func read(fd int, b []byte) (n int, err error) {
	for {
		if n, err = syscall.Read(fd, b); err != syscall.EINTR {
			return n, err
		}
	}
}

// connectTime is the median time of connect(2) over count connections, after some that do not count.
func connectTime(from *harness.Netns, to netip.AddrPort, count int) (time.Duration, error) {
	times := make([]time.Duration, 0, count)
	err := from.Do(func() error {
		for i := -count / 10; i < count; i++ {
			fd, took, err := connect(to)
			if err != nil {
				return err
			}
			_ = syscall.Close(fd)
			if i >= 0 {
				times = append(times, took)
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return median(times), nil
}

// clients is the number of clients that connectionRate runs.
const clients = 4

// connectionRate is how many connections a second the clients get through: connect, request, answer, close.
func connectionRate(from *harness.Netns, to netip.AddrPort, during time.Duration) (float64, error) {
	var made atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, clients)
	begun := time.Now()
	for i := range clients {
		wg.Go(func() {
			errs[i] = from.Do(func() error {
				for time.Since(begun) < during {
					if _, err := ask(to); err != nil {
						return err
					}
					made.Add(1)
				}
				return nil
			})
		})
	}
	wg.Wait()
	return float64(made.Load()) / time.Since(begun).Seconds(), errors.Join(errs...)
}

func timeval(d time.Duration) *syscall.Timeval {
	tv := syscall.NsecToTimeval(d.Nanoseconds())
	return &tv
}

// median sorts its argument.
func median[T time.Duration | float64](v []T) T {
	slices.Sort(v)
	return v[len(v)/2]
}

// percentile sorts its argument; p is between 0 and 1.
func percentile[T time.Duration | float64](v []T, p float64) T {
	slices.Sort(v)
	return v[min(int(p*float64(len(v))), len(v)-1)]
}
