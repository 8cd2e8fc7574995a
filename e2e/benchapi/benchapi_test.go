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
	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
)

func TestMain(m *testing.M) {
	code := harness.Main(m)
	cluster.KillAll()
	os.Exit(code)
}

// TestSmallRun measures both proxies with a few Services. At that size goals are missed; what counts is that everything
// could be measured.
func TestSmallRun(t *testing.T) {
	for _, mode := range []string{"-backend=nft", "-backend=legacy", "-mode=nftables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			code := run(t.Context(), []string{mode, "-services=100", "-changes=2", "-additions=2", "-rounds=2",
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
	for _, port := range []int{measure.ServicePort, measure.EndpointPort} {
		s, err := probe.Serve(server.Netns, port, probe.Greet)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
	}
	return client, server
}

// TestProbeAll: of two changes, one has taken effect already, and one takes effect later.
func TestProbeAll(t *testing.T) {
	t.Parallel()
	const later = 200 * time.Millisecond
	client, server := newPods(t)
	effective := make(chan error, 1)
	time.AfterFunc(later, func() { effective <- server.Take(measure.EndpointRange) })
	changes := make(chan *outstanding, 2)
	now := time.Now()
	for _, addr := range []netip.Addr{measure.EndpointRange.Addr().Next(), server.IP4} {
		changes <- &outstanding{service: &measure.Service{Addr: addr}, endpoint: addr, begun: now, due: now}
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
	if len(took) != 2 || took[0] >= later || took[1] < later || took[1] > 10*later {
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

func TestTableJudgesByTheGoals(t *testing.T) {
	of := func(cold, change, added, paced time.Duration, resident int64) result {
		return result{
			Result: measure.Result{ColdStart: cold, ColdCPU: time.Second, Changed: []time.Duration{change}, Resident: resident, Peak: 200 << 20},
			load:   load{added: []time.Duration{added}, paced: []time.Duration{paced}, addedCPU: time.Second, pacedCPU: time.Second},
		}
	}
	theirs := of(80*time.Second, time.Second, 4*time.Second, 3*time.Second, 100<<20)
	ours := of(4*time.Second, 50*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond, 50<<20)
	theirs.ChangedCPU, ours.ChangedCPU = time.Second, 100*time.Millisecond
	var out strings.Builder
	if missed := printTable(&out, options{}, ours, theirs); missed != 0 {
		t.Errorf("%d goals missed where each is just met:\n%s", missed, out.String())
	}
	for what, worse := range map[string]func(*result){
		"cold start": func(r *result) { r.ColdStart++ },
		"change":     func(r *result) { r.Changed = []time.Duration{50*time.Millisecond + 1} },
		"addition":   func(r *result) { r.added = []time.Duration{100*time.Millisecond + 1} },
		"rate":       func(r *result) { r.paced = []time.Duration{100*time.Millisecond + 1} },
		"CPU":        func(r *result) { r.ChangedCPU++ },
		"memory":     func(r *result) { r.Resident++ },
	} {
		slow := ours
		worse(&slow)
		out.Reset()
		if missed := printTable(&out, options{}, slow, theirs); missed != 1 || strings.Count(out.String(), "MISSED") != 1 {
			t.Errorf("%s just above its goal: %d missed, want 1:\n%s", what, missed, out.String())
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
