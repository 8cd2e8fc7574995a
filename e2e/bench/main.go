// Command bench measures the iptables backend against its goals: the real binary, manifests on disk, real rules and real
// connections, in network namespaces that go away with it.
//
// All that is compared is measured in one run, in turns, on two copies of the same small network of which only one has a
// proxy. The goals bind the nft variant of iptables; the legacy variant is measured for the same table. The exit code is
// 1 if a goal is missed that binds, 2 if something could not be measured.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"nodeproxy/e2e/harness"
)

// options are the sizes of what is measured. The goals are stated for the defaults.
type options struct {
	services  int // of 2 endpoints each, in suite "services"
	endpoints int // of one service, in suite "endpoints"
	wide      int // services of 50 endpoints each, in suite "wide"
	changes   int // how often an endpoint is changed
	rounds    int // of each comparison; the median of the rounds counts
	verbose   bool
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

func main() {
	// The clients and servers below block in system calls, as threads of their own would. With a P for each of them none
	// waits until the scheduler notices.
	runtime.GOMAXPROCS(32)
	os.Exit(harness.Supervise(run))
}

func run() int {
	var o options
	backend := flag.String("backend", "both", "variant of iptables: nft, legacy or both")
	binary := flag.String("binary", "", "the nodeproxy to measure; by default $NODEPROXY_BIN, or one built for this run")
	only := flag.String("only", "", "comma-separated suites to run: services, endpoints, wide; all by default")
	flag.IntVar(&o.services, "services", 10000, "services with 2 endpoints each")
	flag.IntVar(&o.endpoints, "endpoints", 1000, "endpoints of one service")
	flag.IntVar(&o.wide, "wide", 1000, "services with 50 endpoints each")
	flag.IntVar(&o.changes, "changes", 31, "changes of an endpoint")
	flag.IntVar(&o.rounds, "rounds", 9, "rounds of each comparison")
	flag.BoolVar(&o.verbose, "v", false, "print every single value of what is summarised")
	flag.Parse()
	variants, err := parseBackend(*backend)
	chosen, bad := parseSuites(*only)
	err = errors.Join(err, bad, o.validate())
	if flag.NArg() > 0 {
		err = errors.Join(err, fmt.Errorf("unexpected argument %q", flag.Arg(0)))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 2
	}
	if *binary != "" {
		if err := os.Setenv("NODEPROXY_BIN", *binary); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			return 2
		}
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "bench: needs root, for network namespaces and iptables")
		return 2
	}
	var r report
	failed := false
	for _, variant := range variants {
		r.begin(variant)
		for _, s := range suites {
			if !chosen[s.name] {
				continue
			}
			begun := time.Now()
			if err := s.run(&r, variant, o); err != nil {
				failed = true
				r.fail(s.name, err)
			}
			fmt.Printf("# %s, %s: took %.1f s; %s\n", variant, s.name, time.Since(begun).Seconds(), loadAverage())
		}
	}
	missed := r.print(os.Stdout)
	switch {
	case failed:
		return 2
	case missed > 0:
		return 1
	}
	return 0
}

// validate rejects sizes that cannot be measured.
func (o options) validate() error {
	var errs []error
	check := func(flag string, value, most int) {
		if value < 1 || value > most {
			errs = append(errs, fmt.Errorf("-%s=%d is not between 1 and %d", flag, value, most))
		}
	}
	check("services", o.services, maxServices)
	check("endpoints", o.endpoints, maxServices)
	check("wide", o.wide, maxServices)
	check("changes", o.changes, maxChanges)
	check("rounds", o.rounds, 1000)
	return errors.Join(errs...)
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
