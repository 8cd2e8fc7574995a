package exclusive

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/sockets"
)

// makeClaim acquires the claim: an open socket named names.Socket, to which others connect to learn which process owns it. It returns the
// proxy that owns it if that is another one.
func (g *Guard) makeClaim() *Proxy {
	if g.claim != nil {
		return nil
	}
	listener, err := net.Listen("unix", names.Socket)
	if err == nil {
		g.claim = listener
		go answer(listener)
		return nil
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		pid, uid := owner()
		// A proxy needs root's rights; a process without them that takes the name must not keep a proxy from working.
		if uid <= 0 || uid == os.Geteuid() {
			return &Proxy{Name: "nodeproxy", PID: pid}
		}
		err = fmt.Errorf("the socket %s belongs to process %d of user %d", names.Socket, pid, uid)
	}
	g.warn("another nodeproxy can't be detected", err)
	return nil
}

// answer accepts connections and closes them: the kernel tells the peer which process owns the socket.
func answer(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		switch {
		case err == nil:
			_ = conn.Close()
		case errors.Is(err, net.ErrClosed):
			return
		default: // Probably no file descriptor is left. A waiting process has learned all it needs by connecting.
			time.Sleep(pollEvery)
		}
	}
}

// owner finds out which process owns the claim, or 0 if it can't be seen, and the user it runs as, or -1 if that is not known.
func owner() (pid, uid int) {
	conn, err := net.DialTimeout("unix", names.Socket, pollEvery)
	if err != nil { // It has just ended, is stopped and its queue is full, or does not listen.
		return 0, sockets.UserOf("\x00" + names.Socket[1:])
	}
	defer conn.Close()
	uid = -1
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return pid, uid
	}
	_ = raw.Control(func(fd uintptr) {
		if who, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid, uid = int(who.Pid), int(who.Uid)
		}
	})
	return pid, uid
}
