package probe

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"
)

// patience is how long a client with a connection waits for what the server says.
const patience = 5 * time.Second

// Prober asks again and again who answers at an address. How best to do so depends on how fast system calls are.
type Prober struct {
	// Connect makes a connection of a blocking socket, within wait: ConnectBlocking or ConnectLooking.
	Connect func(fd int, to syscall.Sockaddr, wait time.Duration) error
	// Handshake is how long a probe waits for a connection. It should be short: a REJECT that meets a socket in the
	// middle of connect(2) shows only when the kernel tries again, a second later.
	Handshake time.Duration
	// Pause is the time until the next probe of something that was begun so long ago.
	Pause func(since time.Duration) time.Duration
}

// noAnswer are the errors with which connect(2) ends where a handshake did not take place.
var noAnswer = []syscall.Errno{
	syscall.EINPROGRESS, syscall.EINTR, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM,
	syscall.ECONNABORTED, syscall.ETIMEDOUT,
}

// Ask makes a connection in the calling thread's namespace, within wait, and returns the endpoint that answers; the zero Addr if no
// connection was made in time. An error means that nothing can be measured so.
func (p Prober) Ask(to netip.AddrPort, wait time.Duration) (endpoint netip.Addr, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return endpoint, fmt.Errorf("socket of a probe: %w", err)
	}
	defer syscall.Close(fd)
	receive := syscall.NsecToTimeval(patience.Nanoseconds())
	err = errors.Join(
		syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &receive))
	if err != nil {
		return endpoint, fmt.Errorf("socket of a probe: %w", err)
	}
	err = p.Connect(fd, &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, wait)
	if slices.ContainsFunc(noAnswer, func(e syscall.Errno) bool { return errors.Is(err, e) }) {
		return endpoint, nil
	}
	if err != nil {
		return endpoint, fmt.Errorf("connect to %s: %w", to, err)
	}
	var reply [4]byte
	n, err := syscall.Read(fd, reply[:])
	for errors.Is(err, syscall.EINTR) { // The Go runtime sends itself signals.
		n, err = syscall.Read(fd, reply[:])
	}
	if errors.Is(err, syscall.ECONNRESET) {
		return endpoint, nil
	}
	if err == nil && n != len(reply) {
		err = fmt.Errorf("%d bytes", n)
	}
	if err != nil {
		return endpoint, fmt.Errorf("answer of %s: %w", to, err)
	}
	return netip.AddrFrom4(reply), nil
}

// ErrLate is what Await returns when its time is up.
var ErrLate = errors.New("no answer in time")

// Await probes until a wanted endpoint answers, in the calling thread's namespace, and returns the time since begun. Each
// probe makes up to so many connections, without a pause between them.
func (p Prober) Await(
	begun time.Time, to netip.AddrPort, want func(netip.Addr) bool, connections int, timeout time.Duration,
) (time.Duration, error) {
	for {
		for range connections {
			endpoint, err := p.Ask(to, p.Handshake)
			took := time.Since(begun)
			if err != nil {
				return 0, err
			}
			if endpoint.IsValid() && want(endpoint) {
				return took, nil
			}
		}
		took := time.Since(begun)
		if took > timeout {
			return 0, fmt.Errorf("%s: %w (%s)", to, ErrLate, timeout)
		}
		time.Sleep(p.Pause(took))
	}
}
