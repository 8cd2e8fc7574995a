// Command benchipvs measures nodeproxy in mode ipvs side by side with kube-proxy in mode ipvs, and the two values of
// --ipvs-vips with each other. All that is compared is measured in one run, on one kernel.
//
// That kernel is this machine's, if it has IPVS, or else the test kernel of e2e/kernel: this program builds what is needed,
// starts itself there, and watches meanwhile what else this machine has to do. The exit code is 1 if a goal is missed, 2 if
// something could not be measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"nodeproxy/e2e/measure"
)

// The parts of a run.
const (
	partProxies = "proxies" // nodeproxy beside kube-proxy
	partVIPs    = "vips"    // routes beside addresses
)

var allParts = []string{partProxies, partVIPs}

// options are the sizes of what is measured. The goals are stated for the defaults.
type options struct {
	parts     []string
	sizes     []int // numbers of Services; the last one is compared by the goals
	endpoints int   // of each
	// Endpoints changed one at a time: by nodeproxy, which takes milliseconds, and by kube-proxy, which takes seconds.
	changes, theirChanges int
	rounds                int // turns that each proxy takes at these
	settle                time.Duration
	idle                  time.Duration // for how long processor time at rest is counted
	vips                  int           // Services in the comparison of routes with addresses
	inside                bool
	measure.Clock
}

func main() { measure.Main(run) }

func parse(args []string) (options, error) {
	o := options{Clock: measure.Clock{Begun: time.Now()}}
	flags := flag.NewFlagSet("benchipvs", flag.ContinueOnError)
	parts := flags.String("parts", strings.Join(allParts, ","), "what to measure")
	sizes := flags.String("services", "500,5000", "numbers of Services, in ascending order; the goals are for the last one")
	flags.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each")
	flags.IntVar(&o.changes, "changes", 200, "endpoints changed one at a time, for nodeproxy")
	flags.IntVar(&o.theirChanges, "kube-proxy-changes", 8, "endpoints changed one at a time, for kube-proxy")
	flags.IntVar(&o.rounds, "rounds", 2, "turns that each proxy takes at these")
	flags.DurationVar(&o.settle, "settle", 20*time.Millisecond, "pause after each change")
	flags.DurationVar(&o.idle, "idle", time.Minute, "for how long processor time at rest is counted")
	flags.IntVar(&o.vips, "vips", 20000, "Services in the comparison of routes with addresses")
	flags.BoolVar(&o.inside, "inside", false, "this is the right kernel, and all is built")
	if err := measure.Parse(flags, args); err != nil {
		return o, err
	}
	o.parts = strings.Split(*parts, ",")
	for _, text := range strings.Split(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return o, fmt.Errorf("-services=%s: %w", *sizes, err)
		}
		o.sizes = append(o.sizes, n)
	}
	return o, o.validate()
}

// validate rejects what cannot be measured.
func (o options) validate() error {
	var errs []error
	for _, part := range o.parts {
		if !slices.Contains(allParts, part) {
			errs = append(errs, fmt.Errorf("-parts: no part %q; there are %s", part, strings.Join(allParts, ", ")))
		}
	}
	for i, n := range o.sizes {
		errs = append(errs, measure.ServiceCount(n))
		if i > 0 && n <= o.sizes[i-1] {
			errs = append(errs, fmt.Errorf("-services: %d does not come in ascending order", n))
		}
	}
	errs = append(errs,
		measure.Between("endpoints", o.endpoints, 1, 100),
		measure.Between("changes", o.changes, 1, 100000),
		measure.Between("kube-proxy-changes", o.theirChanges, 1, 10000),
		measure.Between("rounds", o.rounds, 1, min(o.changes, o.theirChanges)),
		measure.Between("vips", o.vips, 1, measure.MostServices))
	if o.settle < 0 || o.idle < time.Second {
		errs = append(errs, fmt.Errorf("-settle=%s is negative, or -idle=%s is less than a second", o.settle, o.idle))
	}
	return errors.Join(errs...)
}

func run(ctx context.Context, args []string) int {
	o, err := parse(args)
	inside := 0 // the exit code of a run on the right kernel, which has printed why
	code := measure.Run("benchipvs", "network namespaces, IPVS and the test kernel", err, func() (missed int, err error) {
		if o.inside {
			return measureAll(ctx, o)
		}
		inside, err = runInside(ctx, o, args)
		return 0, err
	})
	return max(code, inside)
}

// measureAll measures what was asked for, and returns how many goals are missed.
func measureAll(ctx context.Context, o options) (missed int, err error) {
	if slices.Contains(o.parts, partProxies) {
		if missed, err = compareProxies(ctx, o); err != nil {
			return 0, err
		}
	}
	if slices.Contains(o.parts, partVIPs) {
		err = compareVIPs(ctx, o)
	}
	return missed, err
}
