package inspect

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/sys/unix"
)

// Listen makes a unix socket at path that only root and the user of this process can connect to. Its directory is made if it does not
// exist. A socket that nobody listens on any more is replaced; one that another process listens on is an error.
func Listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != os.ModeSocket { // A connection to it would be refused too.
		return nil, fmt.Errorf("%s is no socket", path)
	}
	if most := len(unix.RawSockaddrUnix{}.Path) - 1; len(path) > most {
		return nil, fmt.Errorf("%s: the path of a socket can have %d bytes at most", path, most)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		conn.Close()
		return nil, fmt.Errorf("another process answers at %s", path)
	case errors.Is(err, syscall.ECONNREFUSED):
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return ownersOnly{l}, nil
}

// ownersOnly is a listener at a unix socket that closes the connections of other users: the mode of the file comes a moment after the
// socket, and anybody who may write to its directory could change it.
type ownersOnly struct{ net.Listener }

func (l ownersOnly) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil || allowed(conn) {
			return conn, err
		}
		conn.Close()
	}
}

// allowed reports whether the other end of a connection belongs to root or to the user of this process.
func allowed(conn net.Conn) bool {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return false
	}
	var peer *unix.Ucred
	if controlErr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); controlErr != nil || err != nil {
		return false
	}
	return peer.Uid == 0 || int(peer.Uid) == os.Geteuid()
}

// mostClients is how many clients are answered at once: the answer to each may take megabytes.
const mostClients = 16

// Serve answers at l until it is closed. A client that does not read its answer for half a minute is cut off.
func Serve(l net.Listener, h http.Handler) error {
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: 10 * time.Second}
	if err := server.Serve(netutil.LimitListener(l, mostClients)); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
