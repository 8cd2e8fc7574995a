// Package sidebyside is what benchmarks of nodeproxy beside kube-proxy have in common: a real API server with many Services,
// nodes in network namespaces that each run one of the proxies, changes that are timed by connections, and a table that
// compares the two by goals.
package sidebyside

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"time"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// Main runs a benchmark with the arguments of the command line, and ends the program with the exit code that it returns.
func Main(run func(context.Context, []string) int) {
	// Probes and servers block in system calls. With a P for each of them none waits until the scheduler notices.
	runtime.GOMAXPROCS(16)
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

// Clock knows when the run began.
type Clock struct {
	Begun time.Time
}

// Progress prints what has been reached, for those who watch.
func (c Clock) Progress(format string, args ...any) {
	fmt.Printf("# %4.0f s  %s\n", time.Since(c.Begun).Seconds(), fmt.Sprintf(format, args...))
}
