package measure

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
)

// patience is how long a client waits for a connection.
const patience = 3 * time.Second

// Target is an address to which connections are made from a namespace.
type Target struct {
	Name string
	From *harness.Netns
	To   netip.AddrPort
}

// ask makes a connection with these means, and returns the endpoint that answered. Where a signal interrupts connect(2) (the Go
// runtime sends itself some), it starts again.
func ask(to netip.AddrPort, connect func(fd int, to syscall.Sockaddr, wait time.Duration) error) (netip.Addr, error) {
	for {
		interrupted := false
		p := probe.Prober{Connect: func(fd int, to syscall.Sockaddr, wait time.Duration) error {
			err := connect(fd, to, wait)
			interrupted = errors.Is(err, syscall.EINTR)
			return err
		}}
		a, err := p.Ask(to, patience)
		switch {
		case interrupted:
		case err != nil:
			return netip.Addr{}, err
		case !a.Endpoint.IsValid():
			return netip.Addr{}, fmt.Errorf("connect to %s: no connection within %s", to, patience)
		default:
			return a.Endpoint, nil
		}
	}
}

// Ask makes a connection in the calling thread's namespace, and returns the endpoint that answered.
func Ask(to netip.AddrPort) (netip.Addr, error) { return ask(to, probe.ConnectBlocking) }

// ConnectTime is the median time of connect(2) over count connections, after some that do not count.
func (t Target) ConnectTime(count int) (time.Duration, error) {
	times := make([]time.Duration, 0, count+1)
	timed := func(fd int, to syscall.Sockaddr, wait time.Duration) error {
		begun := time.Now()
		err := probe.ConnectBlocking(fd, to, wait)
		times = append(times, time.Since(begun))
		return err
	}
	err := t.From.Do(func() error {
		for i := -count / 10; i < count; i++ {
			if i == 0 {
				times = times[:0]
			}
			if _, err := ask(t.To, timed); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return Percentile(times, 0.5), nil
}

// clients is the number of clients that Rate runs.
const clients = 4

// Rate is how many connections a second the clients get through: connect, answer, close.
func (t Target) Rate(during time.Duration) (float64, error) {
	var made atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, clients)
	begun := time.Now()
	for i := range clients {
		wg.Go(func() {
			errs[i] = t.From.Do(func() error {
				for time.Since(begun) < during {
					if _, err := Ask(t.To); err != nil {
						return err
					}
					made.Add(1)
				}
				return nil
			})
		})
	}
	wg.Wait()
	return float64(made.Load()) / time.Since(begun).Seconds(), errors.Join(errs...)
}

// InTurns measures each target so many times, in turns, and returns the values of each.
func InTurns[T any](times int, targets []Target, once func(Target) (T, error)) ([][]T, error) {
	values := make([][]T, len(targets))
	for round := range times {
		for i := range targets {
			i = (i + round) % len(targets)
			value, err := once(targets[i])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", targets[i].Name, err)
			}
			values[i] = append(values[i], value)
		}
	}
	return values, nil
}

// Turns are many and short, so that other work of the machine leaves some of each target undisturbed.
const (
	turnsPerRound   = 10
	connectsPerTurn = 200
	timePerRate     = 40 * time.Millisecond
)

// The percentiles of the values of one target that count: other work can only lengthen a time and lower a rate.
const (
	BestTime = 0.1
	BestRate = 0.95
)

// ConnectTimes are the values of Target.ConnectTime in so many rounds of short turns. BestTime of them counts.
func ConnectTimes(rounds int, targets ...Target) ([][]time.Duration, error) {
	return InTurns(rounds*turnsPerRound, targets, func(t Target) (time.Duration, error) { return t.ConnectTime(connectsPerTurn) })
}

// Rates are the values of Target.Rate in so many rounds of short turns. BestRate of them counts.
func Rates(rounds int, targets ...Target) ([][]float64, error) {
	return InTurns(rounds*turnsPerRound, targets, func(t Target) (float64, error) { return t.Rate(timePerRate) })
}
