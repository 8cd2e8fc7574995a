package main

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

func TestMain(m *testing.M) {
	code := harness.Main(m)
	cluster.KillAll()
	os.Exit(code)
}

// TestSmallRun measures both proxies with a few Services. At that size goals are missed; what counts is that everything
// could be measured.
func TestSmallRun(t *testing.T) {
	for _, v := range harness.Variants {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			code := run(t.Context(), []string{"-backend=" + string(v), "-services=100", "-changes=2", "-additions=2", "-rounds=2",
				"-settle=0s", "-rate-duration=2s"})
			if code != 0 && code != 1 {
				t.Errorf("exit code %d, want 0 or 1", code)
			}
		})
	}
}

// newPods makes two pods; the second one is a server.
func newPods(t *testing.T) (client, server *harness.Pod) {
	t.Helper()
	w := harness.New(t, harness.Options{Pods: []int{2}, Ports: []uint16{}})
	client, server = w.Pod("n1a"), w.Pod("n1b")
	for _, port := range []int{servicePort, endpointPort} {
		s, err := serve(server.Netns, port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.close)
	}
	return client, server
}

func TestAsk(t *testing.T) {
	t.Parallel()
	client, server := newPods(t)
	nobody := netip.MustParseAddr("10.244.1.200")
	for what, c := range map[string]struct {
		to   netip.AddrPort
		want netip.Addr
	}{
		"a server":    {netip.AddrPortFrom(server.IP4, endpointPort), server.IP4},
		"no server":   {netip.AddrPortFrom(server.IP4, endpointPort+1), netip.Addr{}},
		"no host":     {netip.AddrPortFrom(nobody, endpointPort), netip.Addr{}},
		"another pod": {netip.AddrPortFrom(client.IP4, endpointPort), netip.Addr{}},
	} {
		err := client.Do(func() error {
			for range 20 {
				if got, err := ask(c.to, 5*time.Millisecond); got != c.want || err != nil {
					return errors.Join(err, errors.New(got.String()))
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
}

func TestAwaitGivesUp(t *testing.T) {
	t.Parallel()
	client, server := newPods(t)
	to := netip.AddrPortFrom(server.IP4, endpointPort)
	err := client.Do(func() error {
		_, err := await(time.Now(), to, is(client.IP4), 30*time.Millisecond)
		return err
	})
	if !errors.Is(err, errLate) {
		t.Errorf("an endpoint that never answers: %v, want %v", err, errLate)
	}
}

// TestProbeAll: of two changes, one has taken effect already, and one takes effect later.
func TestProbeAll(t *testing.T) {
	t.Parallel()
	const later = 200 * time.Millisecond
	client, server := newPods(t)
	lab := &site{node: server.Node, client: client, server: server}
	effective := make(chan error, 1)
	time.AfterFunc(later, func() { effective <- lab.routeToServer(endpointRange) })
	changes := make(chan *outstanding, 2)
	now := time.Now()
	for _, addr := range []netip.Addr{endpointRange.Addr().Next(), server.IP4} {
		changes <- &outstanding{service: &service{addr: addr}, endpoint: addr, begun: now, due: now}
	}
	close(changes)
	var took []time.Duration
	err := client.Do(func() (err error) {
		took, err = probeAll(changes, nil)
		return err
	})
	if err := errors.Join(err, <-effective); err != nil {
		t.Fatal(err)
	}
	if len(took) != 2 || took[0] >= later || took[1] < later || took[1] > 2*later {
		t.Errorf("changes seen after %v, want the first before, the second soon after %v", took, later)
	}
}

func TestProbeAllEndsWithAFailedRequest(t *testing.T) {
	t.Parallel()
	want := errors.New("conflict")
	failed := make(chan error, 1)
	failed <- want
	if _, err := probeAll(make(chan *outstanding), failed); !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
}

func TestParseStat(t *testing.T) {
	pid, p, ok := parseStat("42 (a (b) c) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 400 20 0 1 0 5")
	if want := (process{"a (b) c", 7, 120, 3400}); !ok || pid != 42 || p != want {
		t.Errorf("%d %+v %v, want 42 %+v", pid, p, ok, want)
	}
	for _, line := range []string{"", "42", "42 (x) S 1 2", "x (x) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 400 20 0"} {
		if _, p, ok := parseStat(line); ok {
			t.Errorf("%q is read as %+v", line, p)
		}
	}
}

func TestParseMemory(t *testing.T) {
	now, peak, err := parseMemory("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
	if now != 1<<20 || peak != 2<<20 || err != nil {
		t.Errorf("%d, %d, %v, want 1 MiB, 2 MiB", now, peak, err)
	}
	for _, text := range []string{"", "VmRSS:\t1024 kB\n", "VmRSS:\tmuch\nVmHWM:\t1 kB\n"} {
		if _, _, err := parseMemory(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

func TestTableJudgesByTheGoals(t *testing.T) {
	theirs := result{
		coldStart: 80 * time.Second, coldCPU: time.Second, changed: []time.Duration{time.Second},
		added: []time.Duration{4 * time.Second}, paced: []time.Duration{3 * time.Second},
		changedCPU: time.Second, addedCPU: time.Second, pacedCPU: time.Second, memory: 100 << 20, peak: 200 << 20,
	}
	ours := result{
		coldStart: 4 * time.Second, coldCPU: time.Second, changed: []time.Duration{50 * time.Millisecond},
		added: []time.Duration{100 * time.Millisecond}, paced: []time.Duration{100 * time.Millisecond},
		changedCPU: 100 * time.Millisecond, addedCPU: time.Second, pacedCPU: time.Second, memory: 50 << 20, peak: 200 << 20,
	}
	var out strings.Builder
	if missed := printTable(&out, options{}, ours, theirs); missed != 0 {
		t.Errorf("%d goals missed where each is just met:\n%s", missed, out.String())
	}
	for what, worse := range map[string]func(*result){
		"cold start": func(r *result) { r.coldStart++ },
		"change":     func(r *result) { r.changed = []time.Duration{50*time.Millisecond + 1} },
		"addition":   func(r *result) { r.added = []time.Duration{100*time.Millisecond + 1} },
		"rate":       func(r *result) { r.paced = []time.Duration{100*time.Millisecond + 1} },
		"CPU":        func(r *result) { r.changedCPU++ },
		"memory":     func(r *result) { r.memory++ },
	} {
		slow := ours
		worse(&slow)
		out.Reset()
		if missed := printTable(&out, options{}, slow, theirs); missed != 1 || strings.Count(out.String(), "MISSED") != 1 {
			t.Errorf("%s just above its goal: %d missed, want 1:\n%s", what, missed, out.String())
		}
	}
}

func TestPercentile(t *testing.T) {
	values := []time.Duration{4, 1, 3, 2}
	for p, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.99: 4, 1: 4} {
		if got := percentile(values, p); got != want {
			t.Errorf("percentile %v: %d, want %d", p, got, want)
		}
	}
}

func TestNumbersAreShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		45678 * time.Microsecond: "45.7 ms", 999900 * time.Microsecond: "1000 ms",
		1650 * time.Second: "1650 s", 1234 * time.Millisecond: "1.23 s",
	} {
		if got := seconds(d); got != want {
			t.Errorf("%v is shown as %q, want %q", d, got, want)
		}
	}
	for _, c := range []struct {
		a, b float64
		want string
	}{{1, 20, "1/20"}, {2, 1, "2"}, {0, 1, "-"}, {1, 1234, "1/1234"}} {
		if got := inverse(c.a, c.b); got != c.want {
			t.Errorf("%v by %v is shown as %q, want %q", c.a, c.b, got, c.want)
		}
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, args := range []string{
		"-services=100", "-services=15838", "-rounds=0", "-rounds=61", "-additions=3", "-backend=nft2",
		"-only=kubeproxy", "-settle=-1s", "-rate=0", "-rate-duration=1ms", "more",
	} {
		if _, err := parse(strings.Fields(args)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
	if _, err := parse(nil); err != nil {
		t.Errorf("defaults: %v", err)
	}
}

// TestFreshEndpoints: addresses are in their range and none comes twice, over the borders of bytes too.
func TestFreshEndpoints(t *testing.T) {
	var o objects
	seen := map[netip.Addr]bool{}
	for range 1 << 17 {
		a := o.freshEndpoint()
		if seen[a] || !endpointRange.Contains(a) {
			t.Fatalf("%s is in use already, or not in %s", a, endpointRange)
		}
		seen[a] = true
	}
}
