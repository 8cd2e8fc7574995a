// Package measure is what the benchmarks have in common: nodes in network namespaces with a client and a server, Services of
// many sizes, and how a number is summed up and shown. Those that run nodeproxy beside kube-proxy also share a real API server, the
// turns that the proxies take, changes that are timed by connections, and a table that compares the two by goals.
package measure

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
)

// Main runs a benchmark with the arguments of the command line, and ends the program with the exit code that it returns.
func Main(run func(context.Context, []string) int) {
	// Probes and servers block in system calls. With a P for each of them none waits until the scheduler notices.
	runtime.GOMAXPROCS(32)
	os.Exit(harness.Supervise(func() int {
		defer cluster.KillAll()
		return run(context.Background(), os.Args[1:])
	}))
}

// Parse parses a benchmark's flags, and -binary besides, which it puts into NODEPROXY_BIN for the harness.
func Parse(flags *flag.FlagSet, args []string) error {
	binary := flags.String("binary", "", "the nodeproxy to measure; by default $NODEPROXY_BIN, or one built for this run")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *binary == "" {
		return nil
	}
	return os.Setenv("NODEPROXY_BIN", *binary)
}

// Run runs a benchmark, unless its flags are wrong or this process is not root's, and returns its exit code: 1 if goals were missed, 2 if
// something could not be measured, which it prints. root says what the benchmark needs root for, parsed is what is wrong with the flags, and
// measure returns how many goals were missed.
func Run(name, root string, parsed error, measure func() (missed int, err error)) int {
	missed, err := 0, parsed
	switch {
	case err != nil:
	case os.Geteuid() != 0:
		err = fmt.Errorf("needs root, for %s", root)
	default:
		missed, err = measure()
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 2
	case missed > 0:
		return 1
	}
	return 0
}

// ServiceCount rejects a number of Services that a lab can't have, or of which Objects.Next would not change each in turn.
func ServiceCount(n int) error {
	if err := Between("services", n, 1, MostServices); err != nil {
		return err
	}
	if n%Stride == 0 {
		return fmt.Errorf("-services=%d is a multiple of %d: one Service would be changed all the time", n, Stride)
	}
	return nil
}

// Between rejects a size that cannot be measured.
func Between(name string, value, least, most int) error {
	if value < least || value > most {
		return fmt.Errorf("-%s=%d is not between %d and %d", name, value, least, most)
	}
	return nil
}

// Clock knows when the run began.
type Clock struct {
	Begun time.Time
}

// Progress prints what has been reached, for those who watch.
func (c Clock) Progress(format string, args ...any) {
	fmt.Printf("# %4.0f s  %s\n", time.Since(c.Begun).Seconds(), fmt.Sprintf(format, args...))
}

// Report measures, prints the table of what was measured, and returns how many goals were missed according to it. It also prints what else
// the machine did meanwhile, and how long the run took.
func Report[R any](c Clock, measure func() (R, error), table func(io.Writer, R) (missed int)) (missed int, err error) {
	load, before := machine.WatchLoad(), machine.UsageNow()
	measured, err := measure()
	others := load.Stop() + "; " + machine.UsageNow().OthersSince(before)
	if err != nil {
		return 0, err
	}
	c.Progress("done; meanwhile %s", others)
	fmt.Println()
	missed = table(os.Stdout, measured)
	fmt.Printf("\nThe whole run took %.0f s.\n", time.Since(c.Begun).Seconds())
	return missed, nil
}
