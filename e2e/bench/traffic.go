package main

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
)

// patience is how long a client waits for an answer.
const patience = 3 * time.Second

// answer answers a request of one byte, and waits until the client ends the connection.
func answer(fd int, peer syscall.Sockaddr) {
	_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, timeval(patience))
	var request [1]byte
	if n, err := probe.Read(fd, request[:]); err != nil || n == 0 {
		return
	}
	probe.Greet(fd, peer)
	_, _ = probe.Read(fd, request[:])
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
	if _, err := syscall.Write(fd, []byte{1}); err != nil {
		return netip.Addr{}, fmt.Errorf("request to %s: %w", to, err)
	}
	a, err := probe.Receive(fd)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("answer of %s: %w", to, err)
	}
	return a.Endpoint, nil
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
	return measure.Percentile(times, 0.5), nil
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
