// Command bench measures nodeproxy: by itself over manifests, and side by side with kube-proxy through a real API server, with real rules
// and real connections between network namespaces that go away with it. All that is compared is measured in one run, in turns.
//
// Its first argument names the scenario, and flags follow, such as the sizes; the goals are stated for the default ones. The exit code is 1
// if a goal is missed, 2 if something could not be measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
)

// scenario is one benchmark.
type scenario struct {
	name     string
	defaults string // of the flags that it has, NAME=VALUE each
	short    string // what -short sets; "" if there is none
	run      func(context.Context, *options) (missed int)
}

var scenarios = []scenario{
	{"iptables", "services=10000 endpoints=1000 wide=1000 changes=31 rounds=9 backend=nft,legacy only=services,endpoints,wide v=false", "", runSuites},
	{"ask", "services=10000 rounds=20 changes=15 blocks=5 mode=nftables", "", runQuestions},
	{"api", "services=10000 endpoints=2 changes=120 kube-proxy-changes=20 additions=32 turns=4 settle=1.2s together=100 rate=20 " +
		"rate-duration=1m disturb=none idle=2m mode=iptables backend=nft only=nodeproxy,kube-proxy limit=10m markdown=false", shortRun +
		" additions=8", comparison{
		prober: prober, complete: (*bench).awaitAll, turn: []step{changes, additions, together}, last: lastSteps, rows: apiRows, note: apiNote,
	}.run},
	{"ipvs", "services=1500,10000 endpoints=2 changes=200 kube-proxy-changes=4 turns=2 settle=20ms together=100 rate=20 rate-duration=1m " +
		"disturb=none idle=2m mode=ipvs only=nodeproxy,kube-proxy limit=10m parts=proxies,vips vips=20000 inside=false markdown=false", shortRun +
		" services=10000 parts=proxies", runOnIPVS},
	{"nftables", "services=10000 endpoints=2 changes=200 kube-proxy-changes=8 turns=2 rounds=9 settle=50ms mode=nftables " +
		"only=nodeproxy,kube-proxy,iptables limit=20m markdown=false", "", comparison{
		prober: prober, without: true, complete: (*bench).awaitSynced, turn: []step{changes, memory, syncs}, finally: (*bench).connect,
		rows: nftablesRows, legend: nftablesLegend,
	}.run},
}

// shortRun is a run under all disturbances in about ten minutes: with fewer changes, and with half a minute of each disturbance, in which
// everything is listed again twice. A p99 is then of 600 changes, of which 5 take longer.
const shortRun = "changes=40 kube-proxy-changes=8 turns=2 rate-duration=30s idle=1m disturb=all"

// lastSteps come when the turns are over.
var lastSteps = []step{steady, disturbed, idle, verified, memory}

// ipvsComparison is what scenario ipvs runs on a kernel with IPVS. A connection comes there within a millisecond or not at all; the prober
// leaves the one processor of the test kernel, whose system calls are slow, to the proxy.
var ipvsComparison = comparison{
	prober: probe.Prober{
		Connect: probe.ConnectBlocking, Handshake: 30 * time.Millisecond,
		Pause: func(since time.Duration) time.Duration {
			return min(max(since/30, 2*time.Millisecond), 200*time.Millisecond)
		},
	},
	complete: (*bench).awaitVirtualServers, turn: []step{changes, together}, last: lastSteps, rows: ipvsRows,
}

// options are the sizes of what is measured.
type options struct {
	args                                                                                           []string
	begun                                                                                          time.Time
	services                                                                                       []int
	endpoints, wide, changes, theirChanges, additions, together, turns, rounds, rate, blocks, vips int
	settle, rateDuration, idle, limit                                                              time.Duration
	mode, binary, against                                                                          string
	backends, disturb, only, parts                                                                 []string
	verbose, inside, markdown                                                                      bool
}

// setting is a flag. What a number may be is between least and most, and a word is one of those.
type setting struct {
	name, usage string
	value       any
	least, most int
	words       string
}

func (o *options) settings() []setting {
	second := int(time.Second)
	return []setting{
		{"services", "number of Services; several, in ascending order, in scenario ipvs", &o.services, 1, mostServices, ""},
		{"endpoints", "endpoints of each; in scenario iptables, of the one Service that has many", &o.endpoints, 1, mostServices, ""},
		{"wide", "Services with 50 endpoints each", &o.wide, 1, mostServices, ""},
		{"changes", "endpoints changed one at a time", &o.changes, 1, 100000, ""},
		{"kube-proxy-changes", "the same for kube-proxy, which takes seconds, and the most Services added", &o.theirChanges, 1, 10000, ""},
		{"additions", "Services added one at a time", &o.additions, 1, 1000, ""},
		{"together", "Services changed at once", &o.together, 1, 100, ""},
		{"turns", "turns that each proxy takes at these", &o.turns, 1, 1000, ""},
		{"rounds", "rounds of each comparison of connections, or how often each question is asked", &o.rounds, 1, 1000, ""},
		{"blocks", "blocks of changes of each kind", &o.blocks, 1, 100, ""},
		{"rate", "endpoints changed a second, for -rate-duration", &o.rate, 1, 1000, ""},
		{"vips", "Services in the comparison of routes with addresses", &o.vips, 1, mostServices, ""},
		{"rate-duration", "for how long", &o.rateDuration, second, 3600 * second, ""},
		{"disturb", "what others do while -rate is repeated; several, or all", &o.disturb, 0, 0, "none all lock tables relist questions"},
		{"settle", "pause after each change, so that the next finds the proxy at rest", &o.settle, 0, 60 * second, ""},
		{"idle", "for how long processor time at rest is counted", &o.idle, second, 3600 * second, ""},
		{"limit", "the longest that a cold start or a change may take; kube-proxy is left out then, and nodeproxy ends the run", &o.limit, second, 86400 * second, ""},
		{"mode", "proxy mode; ipvs needs a kernel that has IPVS", &o.mode, 0, 0, "iptables ipvs nftables"},
		{"backend", "variant of iptables, or several", &o.backends, 0, 0, "nft legacy"},
		{"only", "what to measure, where that is not all", &o.only, 0, 0, ""},
		{"parts", "the same", &o.parts, 0, 0, ""},
		{"v", "print every single value of what is summarised", &o.verbose, 0, 0, ""},
		{"markdown", "print tables as Markdown has them", &o.markdown, 0, 0, ""},
		{"inside", "this is the right kernel, and all is built", &o.inside, 0, 0, ""},
	}
}

// faults are what is wrong with flags.
type faults []error

// reject adds one, if there is one.
func (f *faults) reject(is bool, format string, args ...any) {
	if is {
		*f = append(*f, fmt.Errorf(format, args...))
	}
}

// set is called with the flag's value.
func (s setting) set(text string) (err error) {
	var wrong faults
	inRange := func(n int, err error) int {
		wrong.reject(err != nil || n < s.least || n > s.most, "%s is out of range", text)
		return n
	}
	list := strings.Split(text, ",")
	for _, word := range list {
		wrong.reject(s.words != "" && !slices.Contains(strings.Fields(s.words), word), "%q is none of %s", word, s.words)
	}
	switch v := s.value.(type) {
	case *int:
		*v = inRange(strconv.Atoi(text))
	case *[]int:
		*v = nil
		for _, one := range list {
			*v = append(*v, inRange(strconv.Atoi(one)))
		}
		wrong.reject(!slices.IsSorted(*v) || len(slices.Compact(slices.Clone(*v))) < len(*v), "not in ascending order")
	case *time.Duration:
		*v, err = time.ParseDuration(text)
		inRange(int(*v), err)
	case *string:
		*v = text
		wrong.reject(len(list) > 1, "only one is possible")
	case *[]string:
		*v = list
	case *bool:
		*v, err = strconv.ParseBool(text)
		wrong.reject(err != nil, "%s is neither true nor false", text)
	}
	return errors.Join(wrong...)
}

// parse reads the name of a scenario and its flags.
func parse(args []string) (*scenario, *options, error) {
	var names []string
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	if len(args) == 0 || !slices.Contains(names, args[0]) {
		return nil, nil, fmt.Errorf("usage: bench SCENARIO [FLAG...], with one of %s", strings.Join(names, ", "))
	}
	s, o := &scenarios[slices.Index(names, args[0])], &options{args: args, begun: time.Now()}
	flags := flag.NewFlagSet("bench "+s.name, flag.ContinueOnError)
	flags.StringVar(&o.binary, "binary", "", "the nodeproxy to measure; by default $NODEPROXY_BIN, or one built for this run")
	flags.StringVar(&o.against, "against", "", "another nodeproxy to compare with, in place of kube-proxy; goals are not judged then")
	settings := o.settings()
	named := func(field string) (f setting, value string) {
		name, value, _ := strings.Cut(field, "=")
		return settings[slices.IndexFunc(settings, func(f setting) bool { return f.name == name })], value
	}
	if s.short != "" {
		flags.BoolFunc("short", "set "+s.short+"; flags after it go before that", func(string) (err error) {
			for _, field := range strings.Fields(s.short) {
				f, value := named(field)
				err = errors.Join(err, f.set(value))
			}
			return err
		})
	}
	for _, field := range strings.Fields(s.defaults) {
		f, value := named(field)
		name := f.name
		if name == "only" || name == "parts" {
			f.words = strings.ReplaceAll(value, ",", " ") // By default it is all.
		}
		if err := f.set(value); err != nil {
			return nil, nil, fmt.Errorf("-%s: %w", name, err)
		}
		if _, ok := f.value.(*bool); ok {
			flags.BoolFunc(name, f.usage, f.set)
		} else {
			flags.Func(name, fmt.Sprintf("%s (default %s)", f.usage, value), f.set)
		}
	}
	if err := flags.Parse(args[1:]); err != nil {
		return nil, nil, err
	}
	if flags.NArg() > 0 {
		return nil, nil, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.binary != "" {
		if err := os.Setenv("NODEPROXY_BIN", o.binary); err != nil {
			return nil, nil, err
		}
	}
	return s, o, o.validate(s.name)
}

// validate rejects what cannot be measured.
func (o *options) validate(name string) error {
	var wrong faults
	for _, n := range o.services {
		wrong.reject(n%stride == 0, "-services=%d is a multiple of %d: one Service would be changed all the time", n, stride)
	}
	wrong.reject(name != "ipvs" && len(o.services) > 1, "-services: one number only")
	wrong.reject(o.turns > o.changes || o.theirChanges > 0 && o.turns > o.theirChanges || o.additions > 0 && o.turns > o.additions,
		"-turns=%d: there is not a change for each", o.turns)
	// One that changes again before it was seen to have changed would never be seen.
	atOnce := max(int(min(o.rateDuration, time.Minute).Seconds()*float64(o.rate)), o.together)
	wrong.reject(o.services[0] < atOnce, "-services=%d: it takes %d at least, as each may change once a minute", o.services[0], atOnce)
	switch name {
	case "api":
		wrong.reject(len(o.backends) > 1, "-backend: one only")
		wrong.reject(o.mode == "ipvs", "-mode: scenario ipvs measures mode ipvs")
	case "ipvs", "nftables":
		wrong.reject(o.mode != name, "-mode: the scenario says it")
	case "ask":
		wrong.reject(o.services[0] < 100, "-services=%d: too few", o.services[0])
	}
	return errors.Join(wrong...)
}

func main() {
	// Probes and servers block in system calls. With a P for each of them none waits until the scheduler notices.
	runtime.GOMAXPROCS(32)
	os.Exit(harness.Supervise(func() int { return run(context.Background(), os.Args[1:]) }))
}

// run returns the exit code.
func run(ctx context.Context, args []string) int {
	s, o, err := parse(args)
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("needs root, for network namespaces and rules")
	}
	missed := 0
	if err == nil {
		err = attempt(func() { missed = s.run(ctx, o) })
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		return 2
	case missed > 0:
		return 1
	}
	return 0
}

// progress prints what has been reached, for those who watch.
func (o *options) progress(format string, args ...any) {
	fmt.Printf("# %4.0f s  %s\n", time.Since(o.begun).Seconds(), fmt.Sprintf(format, args...))
}

// ended prints how long the run took.
func (o *options) ended() {
	fmt.Printf("\nThe whole run took %.0f s.\n", time.Since(o.begun).Seconds())
}
