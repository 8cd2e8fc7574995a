// Command bench measures the iptables backend against its goals: the real binary, manifests on disk, real rules and real
// connections, in network namespaces that go away with it.
//
// All that is compared is measured in one run, in turns, on two copies of the same small network of which only one has a
// proxy. The goals bind the nft variant of iptables; the legacy variant is measured for the same table. The exit code is
// 1 if a goal is missed that binds, 2 if something could not be measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
)

// options are the sizes of what is measured. The goals are stated for the defaults.
type options struct {
	services  int // of 2 endpoints each, in suite "services"
	endpoints int // of one service, in suite "endpoints"
	wide      int // services of 50 endpoints each, in suite "wide"
	changes   int // how often an endpoint is changed
	rounds    int // of each comparison
	verbose   bool
	variants  []harness.Variant
	suites    map[string]bool // by name
}

// suites are the parts that can be run alone, in their order.
var suites = []struct {
	name string
	run  func(*report, harness.Variant, options) error
}{
	{"services", measureServices},
	{"endpoints", measureEndpoints},
	{"wide", measureWide},
}

func main() { measure.Main(run) }

// parse reads the flags: the sizes, and which variants of iptables and which suites are asked for.
func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	backend := flags.String("backend", "both", "variant of iptables: nft, legacy or both")
	only := flags.String("only", "", "comma-separated suites to run: services, endpoints, wide; all by default")
	flags.IntVar(&o.services, "services", 10000, "services with 2 endpoints each")
	flags.IntVar(&o.endpoints, "endpoints", 1000, "endpoints of one service")
	flags.IntVar(&o.wide, "wide", 1000, "services with 50 endpoints each")
	flags.IntVar(&o.changes, "changes", 31, "changes of an endpoint")
	flags.IntVar(&o.rounds, "rounds", 9, "rounds of each comparison")
	flags.BoolVar(&o.verbose, "v", false, "print every single value of what is summarised")
	if err := measure.Parse(flags, args); err != nil {
		return o, err
	}
	var bad error
	o.variants, err = parseBackend(*backend)
	o.suites, bad = parseSuites(*only)
	return o, errors.Join(err, bad, o.validate())
}

func run(_ context.Context, args []string) int {
	o, err := parse(args)
	return measure.Run("bench", "network namespaces and iptables", err, func() (int, error) { return measureAll(o) })
}

// measureAll runs the suites, prints the table, and returns how many goals are missed. A suite that fails does not keep the others
// from being run.
func measureAll(o options) (missed int, err error) {
	var r report
	for _, variant := range o.variants {
		r.begin(variant)
		for _, s := range suites {
			if !o.suites[s.name] {
				continue
			}
			begun := time.Now()
			if failed := s.run(&r, variant, o); failed != nil {
				r.fail(s.name)
				err = errors.Join(err, fmt.Errorf("%s, %s: %w", variant, s.name, failed))
			}
			fmt.Printf("# %s, %s: took %.1f s; %s\n", variant, s.name, time.Since(begun).Seconds(), machine.LoadAverage())
		}
	}
	return r.print(os.Stdout), err
}

// validate rejects sizes that cannot be measured.
func (o options) validate() error {
	return errors.Join(
		measure.Between("services", o.services, 1, measure.MostServices),
		measure.Between("endpoints", o.endpoints, 1, measure.MostServices),
		measure.Between("wide", o.wide, 1, measure.MostServices),
		measure.Between("changes", o.changes, 1, maxChanges),
		measure.Between("rounds", o.rounds, 1, 1000))
}

// parseSuites reads a list of names; an empty one stands for all suites.
func parseSuites(list string) (map[string]bool, error) {
	chosen := map[string]bool{}
	for _, s := range suites {
		chosen[s.name] = list == ""
	}
	if list == "" {
		return chosen, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		if _, known := chosen[name]; !known {
			return nil, fmt.Errorf("-only: there is no suite %q", name)
		}
		chosen[name] = true
	}
	return chosen, nil
}

func parseBackend(s string) ([]harness.Variant, error) {
	switch s {
	case "both":
		return harness.Variants, nil
	case string(harness.NFT), string(harness.Legacy):
		return []harness.Variant{harness.Variant(s)}, nil
	}
	return nil, errors.New("-backend is neither nft nor legacy nor both")
}
