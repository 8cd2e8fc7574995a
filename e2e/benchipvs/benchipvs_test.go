package main

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/measure"
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

// resultsWith are results of which each goal is just met.
func resultsWith() [][2]result {
	of := func(services int, change time.Duration) result {
		return result{services: services, idle: 1, Result: measure.Result{Changed: []time.Duration{change},
			Patched: []time.Duration{change}, ColdStart: 1, ColdCPU: 1, ChangedCPU: 1, Resident: 1, Peak: 1}}
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
		"change": func(r [][2]result) { r[1][1].Changed[0]-- },
		"growth": func(r [][2]result) { r[0][0].Changed[0]-- },
	} {
		results := resultsWith()
		worse(results)
		out.Reset()
		if missed := printProxies(&out, options{}, results); missed != 1 || strings.Count(out.String(), "MISSED") != 1 {
			t.Errorf("%s just above its goal: %d missed, want 1:\n%s", what, missed, out.String())
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
