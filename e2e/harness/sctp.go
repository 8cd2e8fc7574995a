package harness

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
)

// ServeSCTP is ServeTCP for SCTP, which not every kernel has.
func (w *World) ServeSCTP(n *Netns, name string, at netip.AddrPort) error {
	l, err := In(n, func() (net.Listener, error) {
		f, err := sctpSocket(at)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		const backlog = 128
		if err := syscall.Listen(int(f.Fd()), backlog); err != nil {
			return nil, err
		}
		return net.FileListener(f)
	})
	if err != nil {
		return fmt.Errorf("SCTP server %s: %w", name, err)
	}
	// Package net knows streams of TCP only, and these are as good.
	w.serve(l.(*net.TCPListener), func(*net.TCPConn) string { return name }, at.Port())
	return nil
}

// AskSCTP is Ask over SCTP. The socket has only the host's own address, for SCTP tells a server of every address of a host
// that it may use, and these would go past any translation.
func (h *Host) AskSCTP(to netip.AddrPort, timeout time.Duration) Answer {
	return h.askFrom(h.IP(familyOf(to.Addr())), "sctp", to, timeout)
}

func dialSCTP(from netip.Addr, to netip.AddrPort, deadline time.Time) (net.Conn, error) {
	f, err := sctpSocket(netip.AddrPortFrom(from, 0))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	limit := syscall.NsecToTimeval(time.Until(deadline).Nanoseconds())
	if err := syscall.SetsockoptTimeval(int(f.Fd()), syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit); err != nil {
		return nil, err
	}
	err = syscall.Connect(int(f.Fd()), sockaddr(to))
	if errors.Is(err, syscall.EINPROGRESS) || errors.Is(err, syscall.EAGAIN) {
		err = syscall.ETIMEDOUT
	}
	if err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// sctpSocket makes a blocking socket of the one-to-one style (RFC 6458, section 4) at an address of the host.
func sctpSocket(at netip.AddrPort) (*os.File, error) {
	domain := syscall.AF_INET
	if at.Addr().Is6() {
		domain = syscall.AF_INET6
	}
	fd, err := syscall.Socket(domain, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, syscall.IPPROTO_SCTP)
	if err != nil {
		return nil, fmt.Errorf("SCTP socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), "sctp")
	if err := syscall.Bind(fd, sockaddr(at)); err != nil {
		f.Close()
		return nil, fmt.Errorf("SCTP socket at %s: %w", at, err)
	}
	return f, nil
}

func sockaddr(a netip.AddrPort) syscall.Sockaddr {
	if a.Addr().Is6() {
		return &syscall.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &syscall.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}
