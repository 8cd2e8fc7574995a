// Command benchapi measures nodeproxy side by side with kube-proxy: two nodes in network namespaces, one real API server
// with many Services, real rules and real connections, all in one run.
//
// The proxies take turns, each at rest before it is measured and stopped while the other is. Latencies end with a
// connection that the new endpoint answers. The exit code is 1 if a goal is missed, 2 if something could not be measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// options are the sizes of what is measured. The goals are stated for the defaults.
type options struct {
	variant             harness.Variant
	services, endpoints int
	changes, additions  int
	settle              time.Duration // between two changes
	rounds              int           // of these
	rate                int           // changes a second
	rateDuration        time.Duration
	only                string // the name of a proxy
	begun               time.Time
}

func main() {
	// Probes and servers block in system calls. With a P for each of them none waits until the scheduler notices.
	runtime.GOMAXPROCS(16)
	os.Exit(harness.Supervise(func() int {
		defer cluster.KillAll()
		return run(context.Background(), os.Args[1:])
	}))
}

func parse(args []string) (options, error) {
	o := options{begun: time.Now()}
	flags := flag.NewFlagSet("benchapi", flag.ContinueOnError)
	backend := flags.String("backend", string(harness.NFT), "variant of iptables: nft or legacy")
	binary := flags.String("binary", "", "the nodeproxy to measure; by default $NODEPROXY_BIN, or one built for this run")
	flags.IntVar(&o.services, "services", 10000, "number of Services")
	flags.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each")
	flags.IntVar(&o.changes, "changes", 60, "endpoints changed one at a time")
	flags.IntVar(&o.additions, "additions", 32, "Services added one at a time")
	flags.DurationVar(&o.settle, "settle", 1500*time.Millisecond, "pause after each, so that the next finds the proxy at rest")
	flags.IntVar(&o.rounds, "rounds", 4, "turns that each proxy takes at these")
	flags.IntVar(&o.rate, "rate", 20, "endpoints changed a second, for -rate-duration")
	flags.DurationVar(&o.rateDuration, "rate-duration", time.Minute, "for how long")
	flags.StringVar(&o.only, "only", "", "measure only this proxy: nodeproxy or kube-proxy; nothing is compared then")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.variant = harness.Variant(*backend)
	if *binary != "" {
		if err := os.Setenv("NODEPROXY_BIN", *binary); err != nil {
			return o, err
		}
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return o, o.validate()
}

// validate rejects what cannot be measured.
func (o options) validate() error {
	var errs []error
	check := func(flag string, value, most int) {
		if value < 1 || value > most {
			errs = append(errs, fmt.Errorf("-%s=%d is not between 1 and %d", flag, value, most))
		}
	}
	check("services", o.services, 60000) // as many as the service range has addresses for
	check("endpoints", o.endpoints, 1000)
	check("changes", o.changes, 10000)
	check("additions", o.additions, 1000)
	check("rounds", o.rounds, min(o.changes, o.additions))
	check("rate", o.rate, 1000)
	if o.rateDuration < time.Second || o.rateDuration > time.Hour {
		errs = append(errs, fmt.Errorf("-rate-duration=%s is not between 1s and 1h", o.rateDuration))
	}
	if o.settle < 0 {
		errs = append(errs, fmt.Errorf("-settle=%s is negative", o.settle))
	}
	// By two proxies, and one in each turn to see that it has caught up.
	needed := 2 * (o.changes + o.rounds + 1 + o.rate*int(o.rateDuration.Seconds()))
	if o.services < needed || o.services%stride == 0 {
		errs = append(errs, fmt.Errorf("-services=%d: as each may change only once, it takes %d at least, and no multiple of %d",
			o.services, needed, stride))
	}
	if o.variant != harness.NFT && o.variant != harness.Legacy {
		errs = append(errs, fmt.Errorf("-backend=%s is neither nft nor legacy", o.variant))
	}
	if o.only != "" && o.only != "nodeproxy" && o.only != "kube-proxy" {
		errs = append(errs, fmt.Errorf("-only=%s is neither nodeproxy nor kube-proxy", o.only))
	}
	return errors.Join(errs...)
}

// progress prints what has been reached, for those who watch.
func (o options) progress(format string, args ...any) {
	fmt.Printf("# %4.0f s  %s\n", time.Since(o.begun).Seconds(), fmt.Sprintf(format, args...))
}

func run(ctx context.Context, args []string) int {
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("needs root, for network namespaces and iptables")
	}
	var missed int
	if err == nil {
		missed, err = compare(ctx, o)
	}
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "benchapi:", err)
		return 2
	case missed > 0:
		return 1
	}
	return 0
}

// compare measures the proxies, prints the table, and returns how many goals are missed.
func compare(ctx context.Context, o options) (missed int, err error) {
	np, err := ours(o.variant)
	if err != nil {
		return 0, err
	}
	kp, err := theirs(o.variant)
	if err != nil {
		return 0, err
	}
	if err := printSetting(o, np, kp); err != nil {
		return 0, err
	}
	l, err := newLab(ctx, o.endpoints, np, kp)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := l.objects.createAll(ctx, o.services); err != nil {
		return 0, err
	}
	o.progress("%d Services with %d endpoints each created", o.services, o.endpoints)
	var sites []*site
	for _, s := range l.sites {
		if o.only == "" || o.only == s.proxy.name {
			sites = append(sites, s)
		}
	}
	load, before := watchLoad(), usageNow()
	results, err := measure(ctx, l, sites, o)
	if err != nil {
		return 0, err
	}
	o.progress("done; meanwhile %s; %s", load.stop(), usageNow().othersSince(before))
	fmt.Println()
	if len(results) < 2 {
		printAlone(os.Stdout, o, results[0])
	} else {
		missed = printTable(os.Stdout, o, results[0], results[1])
	}
	fmt.Printf("\nThe whole run took %.0f s.\n", time.Since(o.begun).Seconds())
	return missed, nil
}

// printSetting says what is measured, and where.
func printSetting(o options, np, kp proxy) error {
	tool, err := output(o.variant.Tool("iptables"), "--version")
	if err != nil {
		return err
	}
	before := usageNow()
	time.Sleep(time.Second)
	fmt.Println(strings.Join([]string{
		fmt.Sprintf("# nodeproxy %s, kube-proxy %s, iptables %s; kernel %s, %d processors", np.version, kp.version, tool,
			firstLine("/proc/sys/kernel/osrelease"), runtime.NumCPU()),
		fmt.Sprintf("# before the run: load average %s; within a second, %s", firstLine("/proc/loadavg"),
			usageNow().othersSince(before)),
		"# Both proxies run with the same flags and otherwise with their defaults. One of kube-proxy's is minSyncPeriod 1s: it",
		"# waits a second from one sync to the next. One at a time, changes come " + o.settle.String() + " after the last one took",
		"# effect, so it has waited already; not so when they come faster, or when a Service and its EndpointSlice come as",
		"# two.",
	}, "\n"))
	return nil
}
