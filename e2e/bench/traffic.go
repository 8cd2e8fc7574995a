package main

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

// prober waits for a SYN-ACK, which comes within some 100 us or not at all. It finds out what is measured to a percent, and does not slow
// down a proxy that takes seconds.
var prober = probe.Prober{
	Connect: probe.ConnectLooking, Handshake: 2 * time.Millisecond,
	Pause: func(since time.Duration) time.Duration {
		return min(max(since/100, 300*time.Microsecond), 100*time.Millisecond)
	},
}

// stage is a node with two pods: a client, and a server that answers at every address of some ranges.
type stage struct {
	*harness.Node
	client, server *harness.Pod
	listening      *probe.Server
}

// newStage prepares a node that has two pods. Its server greets at endpointPort, at the addresses of these ranges. close ends the server.
func newStage(n *harness.Node, ranges ...netip.Prefix) *stage {
	s := &stage{Node: n, client: n.Pods[0], server: n.Pods[1]}
	// Clients reset connections by the hundred thousand. Kept for the usual ten seconds, they would fill the kernel's table, and what is
	// measured would depend on what was measured before.
	check(n.Sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1"))
	for _, p := range ranges {
		check(s.server.Take(p))
	}
	s.listening = must(probe.Serve(s.server.Netns, endpointPort))
	return s
}

func (s *stage) close() { s.listening.Close() }

// inClient does something in the client's namespace.
func (s *stage) inClient(fn func()) { check(s.client.Do(func() error { fn(); return nil })) }

// target is an address to which connections are made from a namespace.
type target struct {
	name string
	from *harness.Netns
	to   netip.AddrPort
}

func (s *stage) target(name string, to netip.AddrPort) target {
	return target{name, s.client.Netns, to}
}

// pod is the target of an address of the server that no Service has.
func (s *stage) pod(name string) target {
	return s.target(name, netip.AddrPortFrom(s.server.IP4, endpointPort))
}

// await waits until a wanted endpoint of a Service answers the stage's client, and returns the time since begun. Each probe makes up to so
// many connections.
func (s *stage) await(
	p probe.Prober, begun time.Time, svc *service, connections int, limit time.Duration, want func(netip.Addr) bool,
) (time.Duration, error) {
	return harness.In(s.client.Netns, func() (time.Duration, error) {
		return p.Await(begun, svc.frontend(), want, connections, limit)
	})
}

// masquerade makes the node track connections, by one rule, as nodes do whose CNI plugin masquerades what leaves the cluster.
func (s *stage) masquerade(v harness.Variant) {
	must(s.Output(v.Tool("iptables"), "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.0/24", "-j", "MASQUERADE"))
}

// ask makes a connection in the calling thread's namespace, with one connect(2), and returns the endpoint that answered. timed gets the
// time that connect(2) took. Where a signal interrupts it (the Go runtime sends itself some), it starts again.
func ask(to netip.AddrPort, timed func(time.Duration)) (netip.Addr, error) {
	const patience = 3 * time.Second
	for {
		interrupted := false
		p := probe.Prober{Connect: func(fd int, to syscall.Sockaddr, wait time.Duration) error {
			begun := time.Now()
			err := probe.ConnectBlocking(fd, to, wait)
			timed(time.Since(begun))
			interrupted = errors.Is(err, syscall.EINTR)
			return err
		}}
		endpoint, err := p.Ask(to, patience)
		if interrupted {
			continue
		}
		if err == nil && !endpoint.IsValid() {
			err = fmt.Errorf("connect to %s: no connection within %s", to, patience)
		}
		return endpoint, err
	}
}

func untimed(time.Duration) {}

// connectTime is the median time of connect(2) over some connections, after others that do not count.
func (t target) connectTime() (time.Duration, error) {
	const count = 200
	var took []time.Duration
	err := t.from.Do(func() error {
		for i := -count / 10; i < count; i++ {
			if i == 0 {
				took = took[:0]
			}
			if _, err := ask(t.to, func(d time.Duration) { took = append(took, d) }); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return percentile(took, 0.5), nil
}

// rate is how many connections a second four clients get through in a short time: connect, answer, close.
func (t target) rate() (float64, error) {
	var made atomic.Int64
	var wg sync.WaitGroup
	var errs [4]error
	begun := time.Now()
	for i := range errs {
		wg.Go(func() {
			errs[i] = t.from.Do(func() error {
				for time.Since(begun) < 40*time.Millisecond {
					if _, err := ask(t.to, untimed); err != nil {
						return err
					}
					made.Add(1)
				}
				return nil
			})
		})
	}
	wg.Wait()
	return float64(made.Load()) / time.Since(begun).Seconds(), errors.Join(errs[:]...)
}

// inTurns measures each target in turns, many and short, so that other work of the machine leaves some of each undisturbed, and returns
// the percentile p of each one's values.
func inTurns[T time.Duration | float64](o *options, p float64, targets []target, once func(target) (T, error)) []T {
	values := make([][]T, len(targets))
	for round := range o.rounds * 10 {
		for i := range targets {
			i = (i + round) % len(targets)
			value, err := once(targets[i])
			check(err, targets[i].name)
			values[i] = append(values[i], value)
		}
	}
	out := make([]T, len(targets))
	for i, v := range values {
		if o.verbose {
			fmt.Printf("#     %s, %T: %v\n", targets[i].name, out[i], v)
		}
		out[i] = percentile(v, p)
	}
	return out
}

// connectTimes and rates return what counts of each target: other work can only lengthen a time and lower a rate.
func connectTimes(o *options, targets ...target) []time.Duration {
	return inTurns(o, 0.1, targets, target.connectTime)
}

func rates(o *options, targets ...target) []float64 {
	return inTurns(o, 0.95, targets, target.rate)
}
