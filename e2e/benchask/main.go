// Command benchask measures what questions to a running nodeproxy cost: how long get, explain, trace and others take with 10,000
// Services, and whether they delay a sync.
//
// All of it is measured in one run, with the real binary, manifests on disk and real rules, in network namespaces that go away with it.
// Blocks of changes with and without questions take turns, and there are others beside a process that only takes processor time: what
// they differ by is what questions cost otherwise, such as by locks. The exit code is 1 if a goal is missed, 2 if something could not be
// measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/machine"
	"nodeproxy/e2e/measure"
	"nodeproxy/inspect"
)

// options are the sizes of what is measured. The goals are stated for the defaults.
type options struct {
	measure.Clock
	services int // of 2 endpoints each
	rounds   int // of each question
	changes  int // in each block
	blocks   int // of each kind
	mode     string
}

func main() { measure.Main(run) }

func parse(args []string) (o options, err error) {
	o.Begun = time.Now()
	flags := flag.NewFlagSet("benchask", flag.ContinueOnError)
	flags.IntVar(&o.services, "services", 10000, "Services with 2 endpoints each")
	flags.IntVar(&o.rounds, "rounds", 20, "how often each question is asked")
	flags.IntVar(&o.changes, "changes", 15, "changes of an endpoint in each block")
	flags.IntVar(&o.blocks, "blocks", 5, "blocks of changes of each kind")
	flags.StringVar(&o.mode, "mode", string(harness.NFTables), "proxy mode: iptables, ipvs or nftables; ipvs needs a kernel with IPVS")
	if err := measure.Parse(flags, args); err != nil {
		return o, err
	}
	err = errors.Join(
		measure.Between("services", o.services, 100, measure.MostServices),
		measure.Between("rounds", o.rounds, 1, 1000),
		measure.Between("changes", o.changes, 1, 100),
		measure.Between("blocks", o.blocks, 1, 100))
	if o.services%measure.Stride == 0 {
		err = errors.Join(err, fmt.Errorf("-services: %d is a multiple of %d: one Service would be changed all the time", o.services, measure.Stride))
	}
	if mode := harness.Mode(o.mode); mode != harness.IPTables && mode != harness.IPVS && mode != harness.NFTables {
		err = errors.Join(err, fmt.Errorf("-mode=%s: want iptables, ipvs or nftables", o.mode))
	}
	return o, err
}

func run(ctx context.Context, args []string) int {
	o, err := parse(args)
	return measure.Run("benchask", "network namespaces and rules", err, func() (int, error) { return measureAll(ctx, o) })
}

// lab is a node whose nodeproxy is asked.
type lab struct {
	*harness.World
	cluster        *measure.Cluster
	daemon         *harness.Daemon
	binary, socket string
	client         *inspect.Client // of which one keeps one connection
	changed        int             // so many changes there were
}

// newLab starts nodeproxy, and waits until it has programmed all Services. Close removes the lab.
func newLab(o options) (*lab, error) {
	binary, err := harness.Binary()
	if err != nil {
		return nil, err
	}
	w, err := harness.Build(harness.Options{Pods: []int{1}, Ports: []uint16{}})
	if err != nil {
		return nil, err
	}
	l := &lab{World: w, binary: binary, socket: filepath.Join(w.Dir, "socket")}
	l.client = inspect.NewClient(l.socket)
	if err := l.start(o); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func (l *lab) start(o options) (err error) {
	if l.cluster, err = measure.NewCluster(l.Manifests, measure.Uniform(o.services, 2)...); err != nil {
		return err
	}
	l.daemon, err = l.StartDaemon(l.Node1(), "--mode="+o.mode, "--cluster-cidr="+measure.PodRange, "--socket="+l.socket, "--log-level=info")
	if err != nil {
		return err
	}
	return l.daemon.WaitFor(measure.ColdStartTimeout, harness.InSync)
}

// measureAll measures, prints tables, and returns how many goals are missed.
func measureAll(ctx context.Context, o options) (missed int, err error) {
	fmt.Printf("# before the run: %s\n", machine.State())
	l, err := newLab(o)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	o.Progress("%d Services are programmed in mode %s", o.services, o.mode)
	load, before := machine.WatchLoad(), machine.UsageNow()
	answers, err := l.askAll(ctx, o)
	if err != nil {
		return 0, err
	}
	o.Progress("all questions asked")
	holds, err := measureHolds(l, o)
	if err != nil {
		return 0, err
	}
	changes, err := l.changeAll(ctx, o)
	if err != nil {
		return 0, err
	}
	o.Progress("done; meanwhile %s; %s", load.Stop(), machine.UsageNow().OthersSince(before))
	return printTables(os.Stdout, o, answers, holds, changes), nil
}
