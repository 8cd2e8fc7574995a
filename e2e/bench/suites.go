package main

import (
	"fmt"
	"net/netip"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/measure"
)

// The goals.
const (
	programmingGoal = 5 * time.Second
	changeGoal      = 50 * time.Millisecond
	restartGoal     = 3 * time.Second
	connectGoal     = 2.0 // times that of something else
	rateGoal        = 0.9 // of what it is without a proxy
)

// measureServices is the suite of many services with two endpoints each.
func measureServices(r *report, v harness.Variant, o options) error {
	plain, err := newLab()
	if err != nil {
		return err
	}
	defer plain.Close()
	l, err := newLab()
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := measure.NewCluster(l.Manifests, measure.Uniform(o.services, 2)...)
	if err != nil {
		return err
	}
	d, err := measureProgramming(r, l, c, v, fmt.Sprintf("%d services x 2 endpoints", o.services))
	if err != nil {
		return err
	}
	if err := compareConnects(r, plain, l, c, o); err != nil {
		return err
	}
	if err := compareRates(r, plain, l, c, o); err != nil {
		return err
	}
	if err := measureChanges(r, l, c, v, o, d); err != nil {
		return err
	}
	return measureRestart(r, l, c, v, d)
}

// measureProgramming starts nodeproxy over an empty rule set, and checks that services answer when it says so.
func measureProgramming(r *report, l *lab, c *measure.Cluster, v harness.Variant, what string) (*harness.Daemon, error) {
	d, took, err := l.start(v)
	if err != nil {
		return nil, err
	}
	if err := checkServices(l, c); err != nil {
		return nil, err
	}
	rules, err := ruleCount(l.Node1().Netns, v)
	if err != nil {
		return nil, err
	}
	cpu, err := d.CPUTime()
	if err != nil {
		return nil, err
	}
	r.atMost("first programming of "+what, programmingGoal, took,
		fmt.Sprintf("(%d nat rules; %s of CPU in nodeproxy itself)", rules, measure.Duration(cpu)))
	return d, nil
}

// checkServices asks the first, the last and some of the services between for an answer, and checks that one of
// their own endpoints gives it.
func checkServices(l *lab, c *measure.Cluster) error {
	return l.stage.Client.Do(func() error {
		step := max(1, len(c.Services)/200)
		for i := len(c.Services) - 1; i >= 0; i -= step {
			s := c.Services[i]
			from, err := measure.Ask(s.Frontend())
			if err != nil {
				return fmt.Errorf("service %s: %w", s.Name, err)
			}
			if !s.Has(from) {
				return fmt.Errorf("service %s: %s answered, which is none of its endpoints", s.Name, from)
			}
		}
		return nil
	})
}

// best returns a percentile of the values of each target.
func best[T time.Duration | float64](o options, what, format string, p float64, targets []measure.Target, values [][]T) []T {
	out := make([]T, len(targets))
	for i, v := range values {
		if o.verbose {
			fmt.Printf("#     %s, %s: "+format+"\n", what, targets[i].Name, v)
		}
		out[i] = measure.Percentile(v, p)
	}
	return out
}

// connectTimes returns each target's connect time.
func connectTimes(o options, targets ...measure.Target) ([]time.Duration, error) {
	values, err := measure.ConnectTimes(o.rounds, targets...)
	return best(o, "connect", "%v", measure.BestTime, targets, values), err
}

func compareConnects(r *report, plain, l *lab, c *measure.Cluster, o options) error {
	t, err := connectTimes(o,
		plain.pod("pod, no proxy"), l.target("last service", c.Last().Frontend()),
		l.target("first service", c.First().Frontend()), l.pod("pod"))
	if err != nil {
		return err
	}
	r.note("connect to a pod, no proxy", measure.Duration(t[0]))
	r.judge(fmt.Sprintf("connect to the last of %d services, by pod without proxy", len(c.Services)),
		fmt.Sprintf("<= %.0f x", connectGoal), times(t[1], t[0]), ratio(t[1], t[0]) <= connectGoal)
	r.note("connect to the first service", times(t[2], t[0]))
	r.note("connect to a pod beside the services", times(t[3], t[0]))
	return nil
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

func times(a, b time.Duration) string {
	return fmt.Sprintf("%.2f x (%s)", ratio(a, b), measure.Duration(a))
}

// compareRates compares new connections per second to a pod. What stands for "no proxy" is a node that tracks
// connections and has one MASQUERADE rule, as nodes do whose CNI plugin masquerades what leaves the cluster: the kernel's
// connection tracking costs the same with and without a proxy. How much that is, the comparison with a node without any
// rule shows.
func compareRates(r *report, plain, l *lab, c *measure.Cluster, o options) error {
	tracked, err := newLab()
	if err != nil {
		return err
	}
	defer tracked.Close()
	_, err = tracked.Node1().Output(r.variant.Tool("iptables"), "-t", "nat", "-A", "POSTROUTING",
		"-s", "192.0.2.0/24", "-j", "MASQUERADE")
	if err != nil {
		return err
	}
	rates, err := connectionRates(o, plain.pod("no rules"), tracked.pod("no proxy"), l.pod("proxy"),
		l.target("last service", c.Last().Frontend()))
	if err != nil {
		return err
	}
	by := func(i, j int) string { return fmt.Sprintf("%.2f x (%.0f/s)", rates[i]/rates[j], rates[i]) }
	r.note("new connections/s to a pod, no rule and no connection tracking", fmt.Sprintf("%.0f/s", rates[0]))
	r.note("the same, no proxy, connection tracking and one MASQUERADE rule, by no rule", by(1, 0))
	r.note(fmt.Sprintf("the same beside %d services, by no rule", len(c.Services)), by(2, 0))
	r.judge(fmt.Sprintf("the same beside %d services, by no proxy", len(c.Services)),
		fmt.Sprintf(">= %.1f x", rateGoal), by(2, 1), rates[2] >= rateGoal*rates[1])
	r.note("new connections/s to the last service, by no proxy", by(3, 1))
	return nil
}

// connectionRates returns what each target achieved in its best turns.
func connectionRates(o options, targets ...measure.Target) ([]float64, error) {
	values, err := measure.Rates(o.rounds, targets...)
	return best(o, "connections/s", "%.0f", measure.BestRate, targets, values), err
}

// measureEndpoints compares a service of many endpoints with one of two.
func measureEndpoints(r *report, v harness.Variant, o options) error {
	l, err := newLab()
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := measure.NewCluster(l.Manifests, 2, o.endpoints)
	if err != nil {
		return err
	}
	if _, _, err := l.start(v); err != nil {
		return err
	}
	if err := checkServices(l, c); err != nil {
		return err
	}
	few, many := c.Services[0], c.Services[1]
	t, err := connectTimes(o, l.target("2 endpoints", few.Frontend()), l.target("many endpoints", many.Frontend()))
	if err != nil {
		return err
	}
	r.judge(fmt.Sprintf("connect to a service of %d endpoints, by one of 2", o.endpoints),
		fmt.Sprintf("<= %.0f x", connectGoal), times(t[1], t[0]), ratio(t[1], t[0]) <= connectGoal)
	return checkSpread(r, l, many)
}

// checkSpread sends requests to a service and says how evenly its endpoints got them.
func checkSpread(r *report, l *lab, s *measure.Service) error {
	const perEndpoint = 20
	got := map[netip.Addr]int{}
	err := l.stage.Client.Do(func() error {
		for range perEndpoint * len(s.Endpoints) {
			from, err := measure.Ask(s.Frontend())
			if err != nil {
				return err
			}
			got[from]++
		}
		return nil
	})
	if err != nil {
		return err
	}
	least, most := got[s.Endpoints[0]], 0
	for _, e := range s.Endpoints {
		least, most = min(least, got[e]), max(most, got[e])
	}
	r.note(fmt.Sprintf("spread over %d endpoints, %d requests each on average", len(s.Endpoints), perEndpoint),
		fmt.Sprintf("%d to %d each", least, most))
	return nil
}

// measureWide is the suite of fewer services with many endpoints each.
func measureWide(r *report, v harness.Variant, o options) error {
	const endpoints = 50
	l, err := newLab()
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := measure.NewCluster(l.Manifests, measure.Uniform(o.wide, endpoints)...)
	if err != nil {
		return err
	}
	_, err = measureProgramming(r, l, c, v, fmt.Sprintf("%d services x %d endpoints", o.wide, endpoints))
	return err
}
