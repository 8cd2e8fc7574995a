package main

import (
	"errors"
	"flag"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	discovery "k8s.io/api/discovery/v1"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
	"nodeproxy/source/manifest"
)

// TestMain is main where TestSmallRun has started this program again on a kernel with IPVS.
func TestMain(m *testing.M) {
	if slices.Contains(os.Args, "-inside") {
		main()
	}
	os.Exit(harness.Main(m))
}

// TestSmallRun runs each scenario with a few Services. At that size goals are missed; what counts is that everything could be measured.
func TestSmallRun(t *testing.T) {
	const (
		few  = " -changes=2 -kube-proxy-changes=2 -settle=0s"
		atIt = few + " -services=100 -additions=2 -turns=2 -together=5 -rate-duration=2s -idle=1s -limit=3m"
	)
	for _, args := range []string{
		"iptables -services=50 -endpoints=10 -wide=2 -changes=2 -rounds=1",
		"ask -services=200 -rounds=1 -changes=1 -blocks=1",
		"api -backend=nft" + atIt,
		"api -backend=legacy -only=nodeproxy -disturb=all" + atIt,
		"api -short -markdown -mode=nftables -disturb=tables,relist" + atIt,
		"nftables -services=100 -rounds=1 -limit=3m" + few,
		"ipvs -services=20 -changes=2 -kube-proxy-changes=1 -turns=1 -together=5 -rate=10 -rate-duration=2s -idle=1s -limit=3m -vips=100",
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			if code := run(t.Context(), strings.Fields(args)); code != 0 && code != 1 {
				t.Errorf("exit code %d, want 0 or 1", code)
			}
		})
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, args := range []string{
		"", "bench", "iptables more", "iptables -services=0", "iptables -only=kube-proxy", "iptables -backend=nft2", "iptables -mode=ipvs",
		"ask -services=99", "ask -services=15838", "ask -rounds=0", "ask -changes=0", "ask -blocks=0", "ask -mode=userspace",
		"api -services=100", "api -services=15838", "api -turns=0", "api -turns=21", "api -additions=3", "api -backend=nft2", "api -mode=ipvs",
		"api -only=kubeproxy", "api -disturb=everything", "api -together=101", "api -settle=-1s", "api -rate=0", "api -rate-duration=1ms", "api -services=10000,20000",
		"api -services=1000 -rate=500 -rate-duration=2500ms", "api -services=1000 -rate-duration=1h", "nftables -short", "api -short -turns=9",
		"ipvs -services=x", "ipvs -services=500,500", "ipvs -turns=9", "ipvs -parts=all", "ipvs -idle=1ms", "ipvs -vips=100000",
		"nftables -endpoints=0", "nftables -kube-proxy-changes=0", "nftables -limit=1ms", "nftables -only=services",
	} {
		if _, _, err := parse(strings.Fields(args)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
	for _, s := range scenarios {
		if _, o, err := parse([]string{s.name}); err != nil || len(o.services) == 0 {
			t.Errorf("%s: %v, %+v", s.name, err, o)
		}
	}
}

// TestRun: the exit code says that something could not be measured, and that help was asked for.
func TestRun(t *testing.T) {
	if got := run(t.Context(), []string{"ask", "-services=1"}); got != 2 {
		t.Errorf("%d with flags that are wrong, want 2", got)
	}
	if _, _, err := parse([]string{"ask", "-h"}); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("%v", err)
	}
}

// TestRowsAreJudgedByTheirGoals: a goal that is just met counts as met, and each that is missed is counted.
func TestRowsAreJudgedByTheirGoals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		row          row
		ours, theirs figures
		want         string
		missed       int
	}{
		{row{}, figures{"k": 5}, figures{"k": 1}, "what 5 1 5", 0},
		{row{alone: true}, figures{"k": 5}, figures{"k": 1}, "what 5 1", 0},
		{row{part: 20}, figures{"k": 4}, figures{"k": 80}, "what 4 80 1/20 <= 1/20 met", 0},
		{row{part: 20}, figures{"k": 4.1}, figures{"k": 80}, "what 4.1 80 1/19.5 <= 1/20 MISSED", 1},
		{row{part: 20}, figures{"k": 4}, figures{"k": math.Inf(1)}, "what 4 > 3m0s - <= 1/20 met", 0},
		{row{part: 20}, figures{"k": 4}, figures{}, "what 4 - <= 1/20", 0},
		{row{most: 3}, figures{"k": 3}, figures{"k": 1}, "what 3 1 3 <= 3 met", 0},
		{row{most: 3}, figures{"k": 3.1}, figures{"k": 9}, "what 3.1 9 1/2.9 <= 3 MISSED", 1},
		{row{most: 3}, figures{"other": 1}, figures{}, "what - <= 3 MISSED", 1},
		{row{most: 3}, figures{}, figures{"k": 1}, "what 1 - <= 3", 0},
		{row{least: 0.9}, figures{"k": 0.9}, figures{}, "what 0.9 - >= 0.9 met", 0},
		{row{least: 0.9}, figures{"k": 0.89}, figures{}, "what 0.89 - >= 0.9 MISSED", 1},
	} {
		var out strings.Builder
		table := newTable(&out)
		table.limit = 3 * time.Minute
		c.row.what, c.row.key, c.row.show = "what", "k", short
		table.compare([]row{c.row}, c.ours, c.theirs)
		_ = table.Flush()
		if got := strings.Join(strings.Fields(out.String()), " "); got != c.want || table.missed != c.missed {
			t.Errorf("%d missed and the line %q, want %d and %q", table.missed, got, c.missed, c.want)
		}
	}
}

// TestMarkdown: a table as Markdown has it has as many cells in each line.
func TestMarkdown(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	table := newTable(&out)
	table.markdown = true
	table.head("sizes", nodeProxy, kubeProxy, "ratio", "goal", "")
	table.compare([]row{{what: "what", key: "k", show: count, part: 20}}, figures{"k": 1}, figures{"k": 40})
	require.NoError(t, table.Flush())
	if want := "| sizes | nodeproxy | kube-proxy | ratio | goal |  |\n|---|---|---|---|---|---|\n| what | 1 | 40 | 1/40 | <= 1/20 | met |\n"; out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
}

// TestMarkdownOfSizes: each number of Services has a table with a head of its own.
func TestMarkdownOfSizes(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	one := func(*options, bool) []row { return []row{{what: "what", key: "k", show: count}} }
	o := &options{markdown: true, services: []int{1, 2}, endpoints: 3, mode: "ipvs"}
	comparison{rows: one}.print(newTable(&out), o, [][]figures{{{"k": 1}, {"k": 2}}, {{"k": 3}, {"k": 4}}})
	tables := strings.Split(out.String(), "\n\n")
	require.Len(t, tables, 2, out.String())
	for _, table := range tables {
		lines := strings.Split(strings.TrimSpace(table), "\n")
		for i, line := range lines {
			if strings.Count(line, "|") != 7 || strings.HasPrefix(line, "|---") != (i == 1) {
				t.Errorf("line %d of\n%s", i, table)
			}
		}
	}
}

// TestAgainst: another nodeproxy gets the same flags.
func TestAgainst(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\necho some v1\n"), 0o755))
	_, o, err := parse([]string{"api", "-mode=iptables", "-backend=legacy", "-against=" + program})
	require.NoError(t, err)
	np, other := o.findProxies()
	want := []string{"--proxy-mode=iptables", "--iptables-backend=legacy"}
	if !slices.Equal(np.flags, want) || !slices.Equal(other.flags, want) {
		t.Errorf("flags %q and %q; want %q", np.flags, other.flags, want)
	}
}

// TestMappingsAreRestored: a machine that allows more keeps that, and others get back what they had.
func TestMappingsAreRestored(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "max_map_count")
	is := func(want string) {
		t.Helper()
		if got, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("it is %s, %v; want %s", got, err, want)
		}
	}
	for _, was := range []string{"65530", "1048576", "2000000"} {
		require.NoError(t, os.WriteFile(file, []byte(was+"\n"), 0o644))
		restore := allowMappings(file)
		is(strconv.Itoa(max(1<<20, must(strconv.Atoi(was)))))
		require.NoError(t, restore())
		is(was)
	}
}

// TestGuestTimeout: an hour of changes is longer than an hour.
func TestGuestTimeout(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"": "3600", "-rate-duration=1h": "10680", "-short": "3600", "-rate-duration=2m -disturb=tables,lock": "3960",
	} {
		_, o, err := parse(append([]string{"ipvs"}, strings.Fields(args)...))
		if err != nil || o.guestTimeout() != want {
			t.Errorf("%s: %s, %v; want %s", args, o.guestTimeout(), err, want)
		}
	}
}

// TestEveryRowHasAFigure: what a row shows is what a node's series or a step has, by the same name.
func TestEveryRowHasAFigure(t *testing.T) {
	t.Parallel()
	n := &node{figures: figures{}, series: map[string][]time.Duration{}, cpu: map[string]time.Duration{}}
	for _, name := range []string{"changed", "patched", "added", "together", "together" + watchedSuffix, "paced", "paced" + watchedSuffix, "paced" + afterSuffix, "synced"} {
		n.series[name], n.cpu[name] = []time.Duration{time.Second}, time.Second
	}
	for _, d := range disturbances {
		n.series[d.series()] = []time.Duration{time.Second}
		n.series[d.series()+watchedSuffix], n.series[d.series()+afterSuffix] = []time.Duration{time.Second}, []time.Duration{time.Second}
	}
	n.summarize()
	for _, key := range []string{
		"cold", "cold cpu", "cold peak", "churned", "cold synced", "written", "idle", "wake-ups", "verified", "verified cpu", "compared",
		"resident", "peak", "grown", "first", "last", "rate", "first times", "last times", "rate times",
	} {
		n.figures[key] = 1
	}
	o := &options{services: []int{10000}, endpoints: 2, disturb: []string{"all"}}
	for _, r := range slices.Concat(apiRows(o, true), ipvsRows(o, true), nftablesRows(o, true)) {
		if _, ok := n.figures[r.key]; !ok {
			t.Errorf("row %q: there is no figure %q", r.what, r.key)
		}
	}
}

// TestGrowthIsJudged: one change with the most Services may take 1.5 times as long as with the fewest.
func TestGrowthIsJudged(t *testing.T) {
	of := func(change float64) figures { return figures{"changed p50": change, "changed count": 1} }
	for change, want := range map[float64]int{0.150: 0, 0.151: 1} {
		var out strings.Builder
		table := newTable(&out)
		o := &options{services: []int{500, 5000}, endpoints: 2, mode: "ipvs", limit: time.Minute}
		comparison{rows: func(*options, bool) []row { return nil }}.print(table, o, [][]figures{{of(0.1), of(1)}, {of(change), of(9)}})
		if table.missed != want {
			t.Errorf("%v: %d goals missed, want %d:\n%s", change, table.missed, want, out.String())
		}
	}
}

func TestQuestionsAreJudged(t *testing.T) {
	one := []time.Duration{time.Millisecond}
	none := changeTimes{took: [len(stages)][]time.Duration{one, one, one, one}}
	for _, test := range []struct {
		took, held time.Duration
		want       int
	}{{askGoal, holdGoal, 0}, {askGoal + 1, holdGoal, 1}, {askGoal, holdGoal + 1, 1}, {askGoal + 1, holdGoal + 1, 2}} {
		var out strings.Builder
		got := printQuestions(&out, &options{services: []int{1}}, []question{
			{name: "get", goal: askGoal, took: []time.Duration{test.took}},
			{name: "diff", took: []time.Duration{time.Hour}},
		}, []question{{name: "/v1/services", goal: holdGoal, took: []time.Duration{test.held}}}, [kinds]changeTimes{none, none, none})
		if got != test.want || strings.Count(out.String(), "MISSED") != test.want {
			t.Errorf("%d goals missed, want %d:\n%s", got, test.want, out.String())
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
	if values[0] != 4 {
		t.Errorf("the values are in another order now: %v", values)
	}
}

func TestNumbersAreShort(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		45678 * time.Microsecond: "45.7 ms", 999900 * time.Microsecond: "1000 ms",
		1650 * time.Second: "1650 s", 12345 * time.Nanosecond: "12.3 us", 0: "0 ms", 1234 * time.Millisecond: "1.23 s",
	} {
		if got := duration(d); got != want {
			t.Errorf("%v is shown as %q, want %q", d, got, want)
		}
	}
	for _, c := range []struct {
		a, b float64
		want string
	}{{1, 20, "1/20"}, {2, 1, "2"}, {0, 1, "-"}, {1, 1234, "1/1234"}} {
		if got := ratio(c.a, c.b); got != c.want {
			t.Errorf("%v by %v is shown as %q, want %q", c.a, c.b, got, c.want)
		}
	}
}

// TestFreshEndpoints: addresses are in their range and none comes twice, over the borders of bytes too.
func TestFreshEndpoints(t *testing.T) {
	t.Parallel()
	var o objects
	seen := map[netip.Addr]bool{}
	for range 1 << 17 {
		a := o.fresh()
		if seen[a] || !endpointRange.Contains(a) {
			t.Fatalf("%s is in use already, or not in %s", a, endpointRange)
		}
		seen[a] = true
	}
	if got := nth(endpointRange, 1<<22-1).String(); got != "10.191.255.255" {
		t.Errorf("the last address is %s", got)
	}
}

// readManifests reads the manifests in dir as nodeproxy does: the Services' addresses, and their endpoints by Service.
func readManifests(t *testing.T, dir string) (services map[string]string, endpoints map[string][]string, local int) {
	t.Helper()
	batch, err := manifest.Load(manifest.Config{Path: dir})
	require.NoError(t, err)
	services, endpoints = map[string]string{}, map[string][]string{}
	for _, s := range batch.Services {
		services[s.Name] = s.Spec.ClusterIP
	}
	for _, slice := range batch.EndpointSlices {
		owner := slice.Labels[discovery.LabelServiceName]
		for _, e := range slice.Endpoints {
			endpoints[owner] = append(endpoints[owner], e.Addresses...)
			if *e.NodeName == "node1" {
				local++
			}
		}
	}
	return services, endpoints, local
}

func newManifests(t *testing.T, sizes ...int) *manifests {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "manifests")
	require.NoError(t, os.Mkdir(dir, 0o755))
	return writeManifests(dir, sizes...)
}

func TestManifests(t *testing.T) {
	sizes := append(slices.Repeat([]int{2}, perFile), 3*perSlice+1)
	m := newManifests(t, sizes...)
	services, endpoints, local := readManifests(t, m.dir)
	seen := map[string]bool{}
	for i, s := range m.services {
		if services[s.name] != s.addr.String() || len(endpoints[s.name]) != sizes[i] {
			t.Errorf("%s: %q with %d endpoints in the manifests, want %s with %d", s.name, services[s.name], len(endpoints[s.name]), s.addr, sizes[i])
		}
		for _, e := range append(endpoints[s.name], services[s.name]) {
			if seen[e] {
				t.Errorf("%s: %s is in use twice", s.name, e)
			}
			seen[e] = true
		}
	}
	if total := 2*perFile + 3*perSlice + 1; local < total/nodesOfCluster || local > total/nodesOfCluster+1 {
		t.Errorf("%d of %d endpoints are on node1, want one in %d", local, total, nodesOfCluster)
	}
}

func TestChangeDoesNothingUntilReplaced(t *testing.T) {
	m := newManifests(t, 1)
	s, was, replace := m.change()
	if _, got, _ := readManifests(t, m.dir); got[s.name][0] != was.String() {
		t.Errorf("before replace: %s, want %s", got[s.name][0], was)
	}
	require.NoError(t, replace())
	if _, got, _ := readManifests(t, m.dir); got[s.name][0] != s.endpoints[0].String() || s.endpoints[0] == was {
		t.Errorf("after replace: %s, want %s", got[s.name][0], s.endpoints[0])
	}
}

// TestProbeAll: of two changes, one has taken effect already, and one takes effect later.
func TestProbeAll(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{Pods: []int{2}, Ports: []uint16{}})
	client, server := w.Pod("n1a"), w.Pod("n1b")
	greeter, err := probe.Serve(server.Netns, servicePort)
	require.NoError(t, err)
	t.Cleanup(greeter.Close)
	begun := time.Now()
	first, second := server.IP4, endpointRange.Addr().Next()
	made := make(chan *change, 2)
	for _, addr := range []netip.Addr{second, first} {
		made <- &change{service: &service{addr: addr}, endpoint: addr, begun: begun, due: begun}
	}
	close(made)
	const later = 200 * time.Millisecond
	var effective time.Duration
	taken := make(chan error, 1)
	time.AfterFunc(later, func() {
		effective = time.Since(begun)
		taken <- server.Take(endpointRange)
	})
	var seen []*change
	err = client.Do(func() (err error) {
		seen, err = probeAll(prober, made, nil, harness.Limit)
		return err
	})
	require.NoError(t, errors.Join(err, <-taken))
	if len(seen) != 2 || seen[0].endpoint != first || seen[1].endpoint != second || seen[1].inForce.Sub(begun) < effective {
		for _, c := range seen {
			t.Logf("%s after %v", c.endpoint, c.inForce.Sub(begun))
		}
		t.Errorf("want %s first, and %s after %v", first, second, effective)
	}
}

func TestProbeAllEndsWithAFailedRequest(t *testing.T) {
	t.Parallel()
	want := errors.New("conflict")
	failed := make(chan error, 1)
	failed <- want
	if _, err := probeAll(prober, make(chan *change), failed, harness.Limit); !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
}

// TestAttempt: what fails inside a namespace is returned, and the thread is back where it was; what is no failure goes on.
func TestAttempt(t *testing.T) {
	w := harness.New(t, harness.Options{Pods: []int{0}, Ports: []uint16{}})
	own := must(os.Readlink("/proc/thread-self/ns/net"))
	err := attempt(func() {
		check(w.Node1().Do(func() error { must(0, os.ErrExist); return nil }), "not reached")
	})
	check(attempt(func() { check(nil, "nothing") }))
	if now := must(os.Readlink("/proc/thread-self/ns/net")); !errors.Is(err, os.ErrExist) || now != own {
		t.Errorf("error %v, in %s, want %s", err, now, own)
	}
	defer func() {
		if got := recover(); got != "other" {
			t.Errorf("recovered %v", got)
		}
	}()
	_ = attempt(func() { panic("other") })
}
