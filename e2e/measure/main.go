// Package measure is what the benchmarks have in common: nodes in network namespaces with a client and a server, Services of
// many sizes, and how a number is summed up and shown. Those that run nodeproxy beside kube-proxy also share a real API server, the
// turns that the proxies take, changes that are timed by connections, and a table that compares the two by goals.
package measure

import (
	"context"
	"errors"
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

// NeedRoot returns an error if this process is not root's; what says what root is needed for.
func NeedRoot(what string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("needs root, for %s", what)
	}
	return nil
}

// ExitCode is how a benchmark ends: with 1 if goals were missed, with 2 if something could not be measured, which it prints.
func ExitCode(name string, missed int, err error) int {
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
