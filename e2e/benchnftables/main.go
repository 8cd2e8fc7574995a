// Command benchnftables measures nodeproxy in mode nftables side by side with kube-proxy in its mode of this name, with nodeproxy in
// mode iptables, and with nodes without any proxy: nodes in network namespaces, one real API server, real rules and real connections,
// all in one run.
//
// The proxies take turns, each at rest before it is measured and stopped while the others are. What takes longer than -limit is
// reported so, and its proxy is left out from there on. The exit code is 1 if a goal is missed, 2 if something could not be measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
)

// options are the sizes of what is measured.
type options struct {
	services, endpoints int
	proxies             []string // of names
	changes             int      // endpoints changed one at a time
	theirChanges        int      // the same for kube-proxy, which takes seconds
	settle              time.Duration
	rounds              int
	limit               time.Duration
	measure.Clock
}

// The nodes that are compared, by their names in -proxies.
const (
	ours     = measure.NodeProxy
	theirs   = measure.KubeProxy
	iptables = "iptables"
)

var names = []string{ours, theirs, iptables}

func main() { measure.Main(run) }

func parse(args []string) (options, error) {
	o := options{Clock: measure.Clock{Begun: time.Now()}}
	flags := flag.NewFlagSet("benchnftables", flag.ContinueOnError)
	flags.IntVar(&o.services, "services", 10000, "number of Services")
	flags.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each")
	proxies := flags.String("proxies", strings.Join(names, ","), "which to measure; iptables is nodeproxy in that mode")
	flags.IntVar(&o.changes, "changes", 200, "endpoints changed one at a time, for nodeproxy")
	flags.IntVar(&o.theirChanges, "kube-proxy-changes", 8, "endpoints changed one at a time, for kube-proxy")
	flags.DurationVar(&o.settle, "settle", 50*time.Millisecond, "pause after each change")
	flags.IntVar(&o.rounds, "rounds", 9, "rounds of each comparison of connections")
	flags.DurationVar(&o.limit, "limit", 20*time.Minute, "the longest that a cold start or a change may take")
	if err := measure.Parse(flags, args); err != nil {
		return o, err
	}
	o.proxies = strings.Split(*proxies, ",")
	return o, o.validate()
}

// turns is how many turns each proxy takes at changes.
const turns = 2

// validate rejects what cannot be measured.
func (o options) validate() error {
	errs := []error{
		measure.ServiceCount(o.services),
		measure.Between("endpoints", o.endpoints, 1, 1000),
		measure.Between("changes", o.changes, turns, 10000),
		measure.Between("kube-proxy-changes", o.theirChanges, turns, 10000),
		measure.Between("rounds", o.rounds, 1, 1000),
	}
	for _, p := range o.proxies {
		if !slices.Contains(names, p) {
			errs = append(errs, fmt.Errorf("-proxies: no %q; there are %s", p, strings.Join(names, ", ")))
		}
	}
	if o.settle < 0 || o.limit < time.Second {
		errs = append(errs, fmt.Errorf("-settle=%s is negative, or -limit=%s is less than a second", o.settle, o.limit))
	}
	return errors.Join(errs...)
}

func run(ctx context.Context, args []string) int {
	o, err := parse(args)
	return measure.Run("benchnftables", "network namespaces and nftables", err, func() (int, error) { return compare(ctx, o) })
}

// compare measures, prints the table, and returns how many goals are missed.
func compare(ctx context.Context, o options) (missed int, err error) {
	np, kp, err := measure.FindProxies(harness.NFTables)
	if err != nil {
		return 0, err
	}
	ipt := np
	ipt.Flags = []string{"--proxy-mode=iptables", "--iptables-backend=" + string(harness.NFT)}
	fmt.Printf("# nodeproxy %s, kube-proxy %s\n# before the run: %s\n", np.Version, kp.Version, machine.State())
	l, err := measure.NewLab(ctx, o.endpoints, measure.Prober, np, kp, ipt, measure.Proxy{}, measure.Proxy{})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	l.Limits = measure.Limits{ColdStart: o.limit, Change: o.limit}
	if err := l.Fill(ctx, o.services, o.Clock); err != nil {
		return 0, err
	}
	return measure.Report(o.Clock,
		func() ([]result, error) { return measureAll(ctx, l, o) },
		func(w io.Writer, results []result) (missed int) { return printTable(w, o, results) })
}
