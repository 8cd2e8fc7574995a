package probe

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"
)

// Patience is how long a client with a connection waits for what the server says.
const Patience = 5 * time.Second

// Answer is what a server told a client. The zero answer is none: no connection was made in time.
type Answer struct {
	Endpoint, Client netip.Addr
	Refused          bool
}

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
	syscall.EINPROGRESS, syscall.EINTR, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EPERM,
	syscall.ECONNABORTED, syscall.ETIMEDOUT,
}

// Ask makes a connection in the calling thread's namespace, within wait, to a server that greets. An error means that
// nothing can be measured so.
func (p Prober) Ask(to netip.AddrPort, wait time.Duration) (Answer, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return Answer{}, fmt.Errorf("socket of a probe: %w", err)
	}
	defer syscall.Close(fd)
	receive := syscall.NsecToTimeval(Patience.Nanoseconds())
	err = errors.Join(
		syscall.SetsockoptLinger(fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1}),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &receive))
	if err != nil {
		return Answer{}, fmt.Errorf("socket of a probe: %w", err)
	}
	err = p.Connect(fd, &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, wait)
	switch {
	case err == nil:
	case errors.Is(err, syscall.ECONNREFUSED):
		return Answer{Refused: true}, nil
	case slices.ContainsFunc(noAnswer, func(e syscall.Errno) bool { return errors.Is(err, e) }):
		return Answer{}, nil
	default:
		return Answer{}, fmt.Errorf("connect to %s: %w", to, err)
	}
	a, err := Receive(fd)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		return Answer{}, fmt.Errorf("answer of %s: %w", to, err)
	}
	return a, nil
}

// Receive reads what Greet sends.
func Receive(fd int) (Answer, error) {
	var reply [8]byte
	n, err := Read(fd, reply[:])
	if err != nil {
		return Answer{}, err
	}
	if n != len(reply) {
		return Answer{}, fmt.Errorf("%d bytes, want %d", n, len(reply))
	}
	return Answer{Endpoint: netip.AddrFrom4([4]byte(reply[:4])), Client: netip.AddrFrom4([4]byte(reply[4:]))}, nil
}

// Read is read(2), again where a signal interrupts it: the Go runtime sends itself some.
func Read(fd int, b []byte) (n int, err error) {
	for {
		if n, err = syscall.Read(fd, b); err != syscall.EINTR {
			return n, err
		}
	}
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
			a, err := p.Ask(to, p.Handshake)
			took := time.Since(begun)
			if err != nil {
				return 0, err
			}
			if a.Endpoint.IsValid() && want(a.Endpoint) {
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
