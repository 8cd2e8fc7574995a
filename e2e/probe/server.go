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

// Server hands the connections to one port, over IPv4, to a function.
type Server struct {
	listener int
	handle   func(fd int, peer syscall.Sockaddr)
	done     sync.WaitGroup
}

// Serve starts a server on a port of all addresses that are local in a namespace. It closes each connection when handle,
// which gets its file descriptor, returns.
func Serve(n *harness.Netns, port int, handle func(fd int, peer syscall.Sockaddr)) (*Server, error) {
	s := &Server{handle: handle}
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
		fd, peer, err := syscall.Accept4(s.listener, syscall.SOCK_CLOEXEC)
		switch err {
		case nil:
			s.handle(fd, peer)
			_ = syscall.Close(fd)
		case syscall.EINTR, syscall.ECONNABORTED:
		default:
			return
		}
	}
}

// Greet tells a client the address at which it reached the server, which is the endpoint's, and the client's own. Receive
// is the other end of that.
func Greet(fd int, peer syscall.Sockaddr) {
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
