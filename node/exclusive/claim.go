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

// claim is an open socket named names.Socket. Others connect to it to learn which process owns it.
type claim struct {
	listener net.Listener
}

// takenError is the error for a claim that another process owns.
type takenError struct {
	// pid is that process, or 0 if it can't be seen; uid is the user it runs as, or -1 if that is not known.
	pid, uid int
}

func (e *takenError) Error() string {
	return fmt.Sprintf("the socket %s belongs to process %d of user %d", names.Socket, e.pid, e.uid)
}

// mayProxy reports whether the owner may be a proxy. A proxy needs root's rights; a process without them that takes the name must
// not keep a proxy from working.
func (e *takenError) mayProxy() bool {
	return e.uid <= 0 || e.uid == os.Geteuid()
}

// newClaim makes the claim. It returns a takenError if another process owns it.
func newClaim() (*claim, error) {
	listener, err := net.Listen("unix", names.Socket)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, askOwner()
	}
	if err != nil {
		return nil, fmt.Errorf("claiming this network namespace: %w", err)
	}
	c := &claim{listener}
	go c.answer()
	return c, nil
}

// answer accepts connections and closes them: the kernel tells the peer which process owns the socket.
func (c *claim) answer() {
	for {
		conn, err := c.listener.Accept()
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

func (c *claim) close() error { return c.listener.Close() }

// askOwner finds out which process owns the claim.
func askOwner() *takenError {
	out := &takenError{uid: -1}
	conn, err := net.DialTimeout("unix", names.Socket, pollEvery)
	if err != nil { // It has just ended, is stopped and its queue is full, or does not listen.
		out.uid = sockets.UserOf("\x00" + names.Socket[1:])
		return out
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return out
	}
	_ = raw.Control(func(fd uintptr) {
		if who, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			out.pid, out.uid = int(who.Pid), int(who.Uid)
		}
	})
	return out
}
