// Package probe has TCP servers and clients for benchmarks, made of system calls on threads of their own. Package net would
// do, but its poller takes processor time from what is measured. The clients end connections with a reset (SO_LINGER 0), so
// that none waits in TIME_WAIT and a client does not run out of ports.
package probe

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"nodeproxy/e2e/harness"
)

// acceptors is the number of threads that share a listening socket.
const acceptors = 4

// Server tells the clients of one port, over IPv4, the address at which they reached it, which is the endpoint's.
type Server struct {
	listener int
	done     sync.WaitGroup
}

// Serve starts a server on a port of all addresses that are local in a namespace.
func Serve(n *harness.Netns, port int) (*Server, error) {
	s := &Server{}
	err := n.Do(func() (err error) {
		if s.listener, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err = errors.Join(
			syscall.SetsockoptInt(s.listener, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1),
			syscall.Bind(s.listener, &syscall.SockaddrInet4{Port: port}),
			syscall.Listen(s.listener, 4096))
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

// Close ends the server: shutdown wakes the threads that wait in accept.
func (s *Server) Close() {
	_ = syscall.Shutdown(s.listener, syscall.SHUT_RDWR)
	s.done.Wait()
	_ = syscall.Close(s.listener)
}

func (s *Server) accept() {
	for {
		fd, _, err := syscall.Accept4(s.listener, syscall.SOCK_CLOEXEC)
		switch err {
		case nil:
			greet(fd)
			_ = syscall.Close(fd)
		case syscall.EINTR, syscall.ECONNABORTED:
		default:
			return
		}
	}
}

func greet(fd int) {
	local, err := syscall.Getsockname(fd)
	if at, ok := local.(*syscall.SockaddrInet4); ok && err == nil {
		// Not Write: the client may have gone, and that must not raise SIGPIPE.
		_ = syscall.Sendto(fd, at.Addr[:], syscall.MSG_NOSIGNAL, nil)
	}
}
