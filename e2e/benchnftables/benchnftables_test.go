package main

import (
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/measure"
)

func TestMain(m *testing.M) {
	code := harness.Main(m)
	cluster.KillAll()
	os.Exit(code)
}

// TestSmallRun measures all proxies with a few Services. Goals for so few there are none but for connections, which a busy machine
// misses; what counts is that everything could be measured.
func TestSmallRun(t *testing.T) {
	t.Parallel()
	code := run(t.Context(), []string{"-services=100", "-changes=2", "-kube-proxy-changes=2", "-rounds=1", "-settle=0s"})
	if code != 0 && code != 1 {
		t.Errorf("exit code %d, want 0 or 1", code)
	}
}

// TestTableJudgesByTheGoals: also what a proxy that was late has no numbers for is in the table.
func TestTableJudgesByTheGoals(t *testing.T) {
	o := options{services: 10000, endpoints: 2, limit: 3 * time.Minute}
	nan := math.NaN()
	ours := result{
		Result: measure.Result{ColdStart: time.Second, Changed: []time.Duration{1}, Patched: []time.Duration{1}},
		synced: 0.2, written: 0.1, syncs: []float64{1e-3}, first: 50e-6, last: 50e-6, firstTimes: 1.1, lastTimes: 1.1, rate: 9000, rateTimes: 0.9,
	}
	theirs := result{lateStart: true, synced: nan, written: nan, first: nan, last: nan, rate: nan, firstTimes: nan, lastTimes: nan, rateTimes: nan}
	var out strings.Builder
	if missed := printTable(&out, o, []result{ours, theirs}); missed != 0 || strings.Count(out.String(), "> 3m0s") != 1 {
		t.Errorf("%d goals missed where each is just met, or no limit:\n%s", missed, out.String())
	}
	for what, worse := range map[string]func(*result){
		"programming": func(r *result) { r.written = 0.11 },
		"sync":        func(r *result) { r.syncs = []float64{1.1e-3} },
		"first":       func(r *result) { r.firstTimes = 1.11 },
		"last":        func(r *result) { r.lastTimes = 1.11 },
		"rate":        func(r *result) { r.rateTimes = 0.89 },
		"unmeasured":  func(r *result) { r.rateTimes = nan },
	} {
		slow := ours
		worse(&slow)
		out.Reset()
		if missed := printTable(&out, o, []result{slow, theirs}); missed != 1 || strings.Count(out.String(), "MISSED") != 1 {
			t.Errorf("%s beyond its goal: %d missed, want 1:\n%s", what, missed, out.String())
		}
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, args := range []string{
		"-services=0", "-services=15838", "-endpoints=1001", "-changes=1", "-kube-proxy-changes=0", "-rounds=0", "-settle=-1s", "-limit=1ms",
		"-proxies=kubeproxy", "more",
	} {
		if _, err := parse(strings.Fields(args)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
	if _, err := parse(nil); err != nil {
		t.Errorf("defaults: %v", err)
	}
}
