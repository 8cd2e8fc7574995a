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

// claim is a socket with that name. Others may connect to it to learn whose it is.
type claim struct {
	listener net.Listener
}

// takenError tells that another process has the claim.
type takenError struct {
	// pid is that process, 0 where it can't be seen; uid is the user it runs as, -1 if that is not known.
	pid, uid int
}

func (e *takenError) Error() string {
	return fmt.Sprintf("the socket %s belongs to process %d of user %d", names.Socket, e.pid, e.uid)
}

// mayProxy reports whether the owner may be a proxy. A proxy needs rights that are root's; anybody else who takes the name must
// not be able to keep a proxy from working.
func (e *takenError) mayProxy() bool {
	return e.uid <= 0 || e.uid == os.Geteuid()
}

// newClaim makes the claim. It returns a takenError if another process has it.
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

// answer takes connections and closes them: the kernel tells the other side whose socket it is connected to.
func (c *claim) answer() {
	for {
		conn, err := c.listener.Accept()
		switch {
		case err == nil:
			_ = conn.Close()
		case errors.Is(err, net.ErrClosed):
			return
		default: // No file descriptor is left, most likely; whoever waits has learned what there is to learn.
			time.Sleep(pollEvery)
		}
	}
}

func (c *claim) close() error { return c.listener.Close() }

// askOwner finds out who has the claim.
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
