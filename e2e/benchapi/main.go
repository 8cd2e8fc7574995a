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
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
)

// options are the sizes of what is measured. The goals are stated for the defaults.
type options struct {
	mode                harness.Mode
	variant             harness.Variant
	services, endpoints int
	changes, additions  int
	settle              time.Duration // between two changes
	rounds              int           // of these
	rate                int           // changes a second
	rateDuration        time.Duration
	only                string // the name of a proxy
	measure.Clock
}

func main() { measure.Main(run) }

func parse(args []string) (options, error) {
	o := options{Clock: measure.Clock{Begun: time.Now()}}
	flags := flag.NewFlagSet("benchapi", flag.ContinueOnError)
	mode := flags.String("mode", string(harness.IPTables), "proxy mode of both: iptables or nftables")
	backend := flags.String("backend", string(harness.NFT), "variant of iptables: nft or legacy")
	flags.IntVar(&o.services, "services", 10000, "number of Services")
	flags.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each")
	flags.IntVar(&o.changes, "changes", 60, "endpoints changed one at a time")
	flags.IntVar(&o.additions, "additions", 32, "Services added one at a time")
	flags.DurationVar(&o.settle, "settle", 1500*time.Millisecond, "pause after each, so that the next finds the proxy at rest")
	flags.IntVar(&o.rounds, "rounds", 4, "turns that each proxy takes at these")
	flags.IntVar(&o.rate, "rate", 20, "endpoints changed a second, for -rate-duration")
	flags.DurationVar(&o.rateDuration, "rate-duration", time.Minute, "for how long")
	flags.StringVar(&o.only, "only", "", "measure only this proxy: nodeproxy or kube-proxy; nothing is compared then")
	if err := measure.Parse(flags, args); err != nil {
		return o, err
	}
	o.mode, o.variant = harness.Mode(*mode), harness.Variant(*backend)
	return o, o.validate()
}

// validate rejects what cannot be measured.
func (o options) validate() error {
	errs := []error{
		measure.ServiceCount(o.services),
		measure.Between("endpoints", o.endpoints, 1, 1000),
		measure.Between("changes", o.changes, 1, 10000),
		measure.Between("additions", o.additions, 1, 1000),
		measure.Between("rounds", o.rounds, 1, min(o.changes, o.additions)),
		measure.Between("rate", o.rate, 1, 1000),
	}
	if o.rateDuration < time.Second || o.rateDuration > time.Hour {
		errs = append(errs, fmt.Errorf("-rate-duration=%s is not between 1s and 1h", o.rateDuration))
	}
	if o.settle < 0 {
		errs = append(errs, fmt.Errorf("-settle=%s is negative", o.settle))
	}
	// By two proxies, and one in each turn to see that it has caught up.
	needed := 2 * (o.changes + o.rounds + 1 + o.rate*int(o.rateDuration.Seconds()))
	if o.services < needed {
		errs = append(errs, fmt.Errorf("-services=%d: as each may change only once, it takes %d at least", o.services, needed))
	}
	if o.variant != harness.NFT && o.variant != harness.Legacy {
		errs = append(errs, fmt.Errorf("-backend=%s is neither nft nor legacy", o.variant))
	}
	if o.mode != harness.IPTables && o.mode != harness.NFTables {
		errs = append(errs, fmt.Errorf("-mode=%s is neither iptables nor nftables", o.mode))
	}
	if o.only != "" && o.only != measure.NodeProxy && o.only != measure.KubeProxy {
		errs = append(errs, fmt.Errorf("-only=%s is neither nodeproxy nor kube-proxy", o.only))
	}
	return errors.Join(errs...)
}

// modeName is the mode, with the variant of iptables where the mode runs it.
func (o options) modeName() string {
	if o.mode == harness.IPTables {
		return fmt.Sprintf("%s (%s)", o.mode, o.variant)
	}
	return string(o.mode)
}

func run(ctx context.Context, args []string) int {
	o, err := parse(args)
	return measure.Run("benchapi", "network namespaces and iptables", err, func() (int, error) { return compare(ctx, o) })
}

// compare measures the proxies, prints the table, and returns how many goals are missed.
func compare(ctx context.Context, o options) (missed int, err error) {
	np, kp, err := measure.FindProxies(o.mode)
	if err != nil {
		return 0, err
	}
	np.Flags = append(np.Flags, "--iptables-backend="+string(o.variant))
	if err := printSetting(o, np, kp); err != nil {
		return 0, err
	}
	l, err := measure.NewLab(ctx, o.endpoints, measure.Prober, np, kp)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	tools := filepath.Join(l.Dir, "tools")
	if err := linkTools(o.variant, tools); err != nil {
		return 0, err
	}
	l.Sites[1].Proxy.Env = []string{"PATH=" + tools + ":" + os.Getenv("PATH")}
	if err := l.Fill(ctx, o.services, o.Clock); err != nil {
		return 0, err
	}
	var sites []*measure.Site
	for _, s := range l.Sites {
		if o.only == "" || o.only == s.Proxy.Name {
			sites = append(sites, s)
		}
	}
	return measure.Report(o.Clock,
		func() ([]result, error) { return measureProxies(ctx, l, sites, o) },
		func(w io.Writer, results []result) (missed int) {
			if len(results) < 2 {
				printAlone(w, o, results[0])
				return 0
			}
			return printTable(w, o, results[0], results[1])
		})
}

// printSetting says what is measured, and where.
func printSetting(o options, np, kp measure.Proxy) error {
	tool, err := measure.VersionOf(o.variant.Tool("iptables"), "--version")
	if err != nil {
		return err
	}
	fmt.Println(strings.Join([]string{
		fmt.Sprintf("# nodeproxy %s, kube-proxy %s, mode %s, iptables %s", np.Version, kp.Version, o.mode, tool),
		"# before the run: " + machine.State(),
		"# Both proxies run with the same flags and otherwise with their defaults. One of kube-proxy's is minSyncPeriod 1s: it",
		"# waits a second from one sync to the next. One at a time, changes come " + o.settle.String() + " after the last one took",
		"# effect, so it has waited already; not so when they come faster, or when a Service and its EndpointSlice come as",
		"# two.",
	}, "\n"))
	return nil
}
