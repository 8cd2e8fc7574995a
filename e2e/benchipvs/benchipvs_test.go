package main

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// TestMain is main where TestSmallRun has started this program again on a kernel with IPVS.
func TestMain(m *testing.M) {
	if slices.Contains(os.Args, "-inside") {
		main()
	}
	code := harness.Main(m)
	cluster.KillAll()
	os.Exit(code)
}

// TestSmallRun measures everything with a few Services. At that size goals are missed; what counts is that everything could
// be measured.
func TestSmallRun(t *testing.T) {
	code := run(t.Context(), []string{"-services=20", "-changes=2", "-kube-proxy-changes=1", "-rounds=1", "-idle=1s",
		"-vips=100"})
	if code != 0 && code != 1 {
		t.Errorf("exit code %d, want 0 or 1", code)
	}
}

// newPods makes two pods on a node; the second one is a server.
func newPods(t *testing.T) (client, target *harness.Pod) {
	t.Helper()
	w := harness.New(t, harness.Options{Pods: []int{2, 0}, Ports: []uint16{}})
	client, target = w.Pod("n1a"), w.Pod("n1b")
	s, err := serve(target.Netns, endpointPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	return client, target
}

func TestAsk(t *testing.T) {
	t.Parallel()
	client, target := newPods(t)
	nobody := netip.MustParseAddr("10.244.1.200")
	for what, c := range map[string]struct {
		to   netip.AddrPort
		want answer
	}{
		"a server":    {netip.AddrPortFrom(target.IP4, endpointPort), answer{endpoint: target.IP4, client: client.IP4}},
		"no server":   {netip.AddrPortFrom(target.IP4, endpointPort+1), answer{refused: true}},
		"no host":     {netip.AddrPortFrom(nobody, endpointPort), answer{}},
		"another pod": {netip.AddrPortFrom(client.IP4, endpointPort), answer{refused: true}},
	} {
		err := client.Do(func() error {
			got, err := ask(c.to, 200*time.Millisecond)
			if got != c.want {
				t.Errorf("%s: %+v, want %+v", what, got, c.want)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestAwait: an endpoint that answers later is seen then, and one that never does is given up.
func TestAwait(t *testing.T) {
	t.Parallel()
	const later = 200 * time.Millisecond
	client, target := newPods(t)
	effective := make(chan error, 1)
	time.AfterFunc(later, func() { effective <- routeTo(target.Node, target, endpointRange) })
	endpoint := nth(endpointRange, 1)
	to := netip.AddrPortFrom(endpoint, endpointPort)
	err := client.Do(func() error {
		took, err := await(time.Now(), to, func(a netip.Addr) bool { return a == endpoint }, 2, time.Minute)
		if took < later || took > 2*later {
			t.Errorf("seen after %v, want soon after %v", took, later)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := <-effective; err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	err = client.Do(func() error {
		_, err := await(begun, to, func(netip.Addr) bool { return false }, 1, later)
		return err
	})
	if took := time.Since(begun); !errors.Is(err, errLate) || took > 10*later {
		t.Errorf("an endpoint that never answers: %v after %v, want %v after %v", err, took, errLate, later)
	}
}

func TestARPing(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{Pods: []int{0, 0}, Ports: []uint16{}})
	for addr, want := range map[netip.Addr]bool{w.Nodes[0].IP4: true, netip.MustParseAddr("192.168.77.222"): false} {
		got, err := arping(w.Nodes[1], addr)
		if err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", addr, got, err, want)
		}
	}
}

func TestParseTimes(t *testing.T) {
	t.Parallel()
	got, err := parseTimes("42 (a (b) c) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 400 20 0 1 0 5")
	if want := 35200 * time.Millisecond; got != want || err != nil {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for _, line := range []string{"", "42", "42 (x) S 1 2", "42 (x) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 x 20 0"} {
		if got, err := parseTimes(line); err == nil {
			t.Errorf("%q is read as %v", line, got)
		}
	}
}

func TestKilobytes(t *testing.T) {
	t.Parallel()
	if got, err := kilobytes("VmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n", "VmRSS"); got != 1<<20 || err != nil {
		t.Errorf("%d, %v, want 1 MiB", got, err)
	}
	for _, text := range []string{"", "VmHWM:\t1024 kB\n", "VmRSS:\tmuch\n"} {
		if _, err := kilobytes(text, "VmRSS"); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// resultsWith are results of which each goal is just met.
func resultsWith() [][2]result {
	of := func(services int, change time.Duration) result {
		return result{services: services, changed: []time.Duration{change}, patched: []time.Duration{change},
			coldStart: 1, coldCPU: 1, changedCPU: 1, idle: 1, memory: 1, peak: 1}
	}
	return [][2]result{
		{of(500, 100*time.Millisecond), of(500, time.Second)},
		{of(5000, 150*time.Millisecond), of(5000, 7500*time.Millisecond)},
	}
}

func TestTableJudgesByTheGoals(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	if missed := printProxies(&out, options{}, resultsWith()); missed != 0 || strings.Count(out.String(), "met") != 2 {
		t.Errorf("%d goals missed where both are just met:\n%s", missed, out.String())
	}
	for what, worse := range map[string]func([][2]result){
		"change": func(r [][2]result) { r[1][1].changed[0]-- },
		"growth": func(r [][2]result) { r[0][0].changed[0]-- },
	} {
		results := resultsWith()
		worse(results)
		out.Reset()
		if missed := printProxies(&out, options{}, results); missed != 1 || strings.Count(out.String(), "MISSED") != 1 {
			t.Errorf("%s just above its goal: %d missed, want 1:\n%s", what, missed, out.String())
		}
	}
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	values := []time.Duration{4, 1, 3, 2}
	for p, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.99: 4, 1: 4} {
		if got := percentile(values, p); got != want {
			t.Errorf("percentile %v: %d, want %d", p, got, want)
		}
	}
}

func TestFlagsAreChecked(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"-services=0", "-services=x", "-services=500,500", "-services=15838", "-rounds=0", "-rounds=9", "-changes=0",
		"-endpoints=101", "-parts=all", "-settle=-1s", "-idle=1ms", "-vips=100000", "more",
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
	t.Parallel()
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
