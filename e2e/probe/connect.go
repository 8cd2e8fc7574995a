package probe

import (
	"syscall"
	"time"
)

// betweenLooks is the pause between two looks at a handshake that is under way.
const betweenLooks = 100 * time.Microsecond

// ConnectBlocking makes a connection by as few system calls as there can be. The kernel counts wait in its timer's ticks,
// which are some milliseconds.
func ConnectBlocking(fd int, to syscall.Sockaddr, wait time.Duration) error {
	send := syscall.NsecToTimeval(wait.Nanoseconds())
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &send); err != nil {
		return err
	}
	return syscall.Connect(fd, to)
}

// ConnectLooking makes a connection without blocking: connect(2) again tells how it goes. It waits exactly.
func ConnectLooking(fd int, to syscall.Sockaddr, wait time.Duration) error {
	if err := syscall.SetNonblock(fd, true); err != nil {
		return err
	}
	for begun := time.Now(); ; {
		switch err := syscall.Connect(fd, to); err {
		case nil, syscall.EISCONN:
			return syscall.SetNonblock(fd, false)
		case syscall.EINPROGRESS, syscall.EINTR: // mostly it is made by now
		case syscall.EALREADY:
			if time.Since(begun) >= wait {
				return syscall.ETIMEDOUT
			}
			time.Sleep(betweenLooks)
		default:
			return err
		}
	}
}
