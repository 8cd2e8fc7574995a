package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
	"nodeproxy/inspect"
	"nodeproxy/plan"
)

// traceSocket returns a path for the socket of a daemon. It is short, as such a path has to be.
func traceSocket(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "np")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

// inFirstTierTraced is of how many packets the first tier asks about one. It has no divisor in common with the numbers of clients, protocols and
// families, over which the inner loops go that make the cells, so all of them come up.
const inFirstTierTraced = 7

// checkTraces compares what nodeproxy says will happen to the packet of each question with what is expected of the packet itself: that
// the daemon says so for all, and that it is said offline for a part of them, as each takes a process of its own. The first tier asks about a
// part of both.
func (m *matrix) checkTraces(t *testing.T, socket string, flags ...string) {
	t.Helper()
	client := inspect.NewClient(socket)
	binary, err := harness.Binary()
	require.NoError(t, err)
	var (
		mu    sync.Mutex
		wrong []string
		work  = make(chan cell)
		wait  sync.WaitGroup
	)
	online := func(q inspect.TraceQuery) (*inspect.Trace, error) {
		for begin := time.Now(); ; {
			answer, err := client.Trace(context.Background(), q)
			// On a busy machine, the daemon may give no sign for as long as a user is to wait for one.
			if silent := (*inspect.SilentError)(nil); !errors.As(err, &silent) || time.Since(begin) > harness.Limit {
				return answer, err
			}
		}
	}
	offline := func(q inspect.TraceQuery) (*inspect.Trace, error) {
		args := append([]string{"trace", q.From, q.To, "--protocol=" + string(q.Protocol), "-o", "json", "--manifests=" + m.world.Manifests,
			"--node-name=" + m.world.Node1().Name, "--mode=" + string(mode),
			"--service-cidr=" + harness.ServiceCIDR4.String() + "," + harness.ServiceCIDR6.String()}, flags...)
		out, err := exec.Command(binary, args...).Output() // It exits with 1 if the packet is refused.
		answer := &inspect.Trace{}
		if bad := json.Unmarshal(out, answer); bad != nil {
			return nil, fmt.Errorf("%q: %w, %w", args, bad, err)
		}
		return answer, nil
	}
	for range 4 {
		wait.Go(func() {
			for c := range work {
				problems := []string{m.predicted(c, online)}
				if c.network == "tcp" && c.family == 4 && c.other == "Cluster" {
					problems = append(problems, m.predicted(c, offline))
				}
				for i, p := range problems {
					if p != "" {
						mu.Lock()
						wrong = append(wrong, fmt.Sprintf("%s: trace by %s: %s", c, []string{"the daemon", "a command"}[i], p))
						mu.Unlock()
					}
				}
			}
		})
	}
	begin, every := time.Now(), 1
	if os.Getenv(tierVariable) == firstTier {
		every = inFirstTierTraced
	}
	asked := 0
	for i := 0; i < len(m.cells); i += every {
		work <- m.cells[i]
		asked++
	}
	close(work)
	wait.Wait()
	t.Logf("trace is wrong %d times about %d of %d packets; that took %v", len(wrong), asked, len(m.cells), time.Since(begin).Round(time.Second))
	for _, problem := range wrong {
		t.Error(problem)
	}
}

// predicted returns how what trace says of a question differs from what is expected; "" if it does not.
func (m *matrix) predicted(c cell, trace func(inspect.TraceQuery) (*inspect.Trace, error)) string {
	q := inspect.TraceQuery{From: c.client.IP(c.family).String(), To: c.to.String(), Protocol: plan.Protocol(strings.ToUpper(c.network))}
	if c.source == "own-node" {
		q.From = "node"
	}
	answer, err := trace(q)
	if err != nil {
		return err.Error()
	}
	p := answer.Packets[0]
	set, view, answered := strings.Cut(c.want, "/")
	if !answered {
		// What passes to an address of the node itself is refused there, as nothing listens.
		own := c.to.Addr().IsLoopback() && p.Action == plan.Pass.String() && c.want == "refused"
		if want := map[string]plan.Action{"refused": plan.Reject, "dropped": plan.Drop}[c.want]; p.Action != want.String() && !own {
			return fmt.Sprintf("it is to %s, want %s: %q", p.Action, want, p.Reasons)
		}
		return ""
	}
	names := c.sit.cluster
	if set == "local" {
		names = c.sit.local
	}
	want := map[string]string{} // what each endpoint is to see, by its address
	for _, name := range names {
		pod := m.world.Pod(name)
		source := m.world.Node1().IP(c.family)
		if view == "kept" && name != c.client.Name {
			source = c.client.IP(c.family)
		}
		want[netip.AddrPortFrom(pod.IP(c.family), 8080).String()] = source.String()
	}
	got := map[string]string{}
	for _, o := range p.Outcomes {
		source := p.Source
		if o.Masqueraded {
			source = m.world.Node1().IP(c.family).String()
		}
		got[o.Endpoint] = source
		if o.Action != "accept" || math.Abs(o.Probability-1/float64(len(names))) > 1e-6 {
			return fmt.Sprintf("%s is to happen to a share of %g at %s", o.Action, o.Probability, o.Endpoint)
		}
	}
	if !maps.Equal(got, want) {
		return fmt.Sprintf("endpoints are to see %v, want %v", got, want)
	}
	if len(p.Outcomes) != len(want) || len(p.Steps)+len(p.Outcomes[0].Steps) == 0 || !slices.Contains([]string{"programmed", ""}, p.State) {
		return fmt.Sprintf("the answer is %+v", p)
	}
	return ""
}
