package harness

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"
)

// Load is a stream of requests, each over a new socket, that goes on until it is stopped.
type Load struct {
	stop chan struct{}
	wait sync.WaitGroup

	mu       sync.Mutex
	requests int
	servers  map[string]int
	lastFrom map[string]time.Time
	failures []Answer
}

// The environment variables with how many connections tests of a take-over open each second, as far as the machine can, and how many of
// them stay open.
const (
	RateVariable = "NODEPROXY_E2E_RATE"
	OpenVariable = "NODEPROXY_E2E_OPEN"
)

// ConnectionRate is what RateVariable says, or another number if it is not set.
func ConnectionRate(otherwise int) int { return numberIn(RateVariable, otherwise) }

// OpenConnections is what OpenVariable says, or another number if it is not set.
func OpenConnections(otherwise int) int { return numberIn(OpenVariable, otherwise) }

func numberIn(variable string, otherwise int) int {
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n <= 0 {
		panic(fmt.Sprintf("%s=%s: it is to be a positive number", variable, text))
	}
	return n
}

// StartLoad sends requests from a namespace, workers at a time, each of them pausing between its requests.
func (n *Netns) StartLoad(network string, to netip.AddrPort, workers int, pause time.Duration) *Load {
	l := &Load{stop: make(chan struct{}), servers: map[string]int{}, lastFrom: map[string]time.Time{}}
	for range workers {
		l.wait.Go(func() {
			for {
				select {
				case <-l.stop:
					return
				case <-time.After(pause):
				}
				begun := time.Now()
				a := n.Ask(network, to, Patient)
				l.note(begun, a)
			}
		})
	}
	return l
}

func (l *Load) note(begun time.Time, a Answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests++
	if a.Outcome != Answered {
		l.failures = append(l.failures, a)
		return
	}
	l.servers[a.Server]++
	l.lastFrom[a.Server] = begun
}

// Stop ends the load and waits for the requests under way.
func (l *Load) Stop() {
	close(l.stop)
	l.wait.Wait()
}

// Failures returns the requests that got no answer.
func (l *Load) Failures() []Answer {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Answer(nil), l.failures...)
}

// Requests is the number of requests that have ended.
func (l *Load) Requests() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.requests
}

// Answers is the number of answers from a server.
func (l *Load) Answers(server string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.servers[server]
}

// LastFrom is when the last request that this server answered began.
func (l *Load) LastFrom(server string) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastFrom[server]
}

func (l *Load) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprintf("%d requests, answers %v, %d failed", l.requests, l.servers, len(l.failures))
}
