package xtables

import (
	"cmp"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// lockFile tells when programs of the legacy variant have ended: each opens the file of the xtables lock, holds the lock while it works,
// and closes the file. nil tells nothing.
type lockFile struct{ events *os.File }

// openLockFile makes the file if there is none, as those programs do.
func openLockFile() (*lockFile, error) {
	path := cmp.Or(os.Getenv("XTABLES_LOCKFILE"), "/run/xtables.lock")
	file, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_CLOSE); err != nil {
		_ = events.Close()
		return nil, fmt.Errorf("inotify of %s: %w", path, err)
	}
	return &lockFile{events}, nil
}

// follow returns what receives a value when the file has been closed since the last one, until end is called.
func (l *lockFile) follow() (released <-chan struct{}, end func()) {
	if l == nil {
		return nil, func() {}
	}
	c := make(chan struct{}, 1)
	var reading sync.WaitGroup
	reading.Go(func() {
		events := make([]byte, 4<<10)
		for {
			if _, err := l.events.Read(events); err != nil {
				return
			}
			select {
			case c <- struct{}{}:
			default: // It has one already.
			}
		}
	})
	return c, func() {
		_ = l.events.Close()
		reading.Wait()
	}
}
