package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/measure"
)

const (
	// changeTimeout is how long a change may take before bench gives up.
	changeTimeout = 30 * time.Second
	// pauseBetweenProbes keeps the probing from taking a processor away from what is measured.
	pauseBetweenProbes = 300 * time.Microsecond
	// spare is the offset in measure.EndpointRange of the last address that no service has; a change takes one from there down.
	spare = 1<<22 - 2
	// maxChanges leaves those addresses to the endpoints that clusters of the largest sizes have.
	maxChanges = 10000
	// settle is the pause between two changes, so that each finds nodeproxy at rest.
	settle = 150 * time.Millisecond
)

// measureChanges replaces one endpoint of a service by a new one, again and again, each time of another service in
// another file, and takes the time from the moment the manifest is in place until the new endpoint answers a new
// connection. From then on the old one must not answer any more.
func measureChanges(r *report, l *lab, c *measure.Cluster, v harness.Variant, o options, d *harness.Daemon) error {
	before, err := generation(l.Node1().Netns)
	if err != nil {
		return err
	}
	cpuBefore, err := d.CPUTime()
	if err != nil {
		return err
	}
	var took []time.Duration
	for n := range o.changes {
		// measure.Stride is prime: the services are scattered over the files and over the address range.
		t, err := changeOne(l, c, n*measure.Stride%len(c.Services), n)
		if err != nil {
			return err
		}
		took = append(took, t)
		time.Sleep(settle)
	}
	after, err := generation(l.Node1().Netns)
	if err != nil {
		return err
	}
	cpu, err := d.CPUTime()
	if err != nil {
		return err
	}
	if o.verbose {
		fmt.Printf("#     changes: %v\n", took)
	}
	r.atMost(fmt.Sprintf("one endpoint of %d services changed, effective: p50", len(c.Services)), changeGoal,
		measure.Percentile(took, 0.5), fmt.Sprintf("(p90 %s, max %s; of %d)", measure.Duration(measure.Percentile(took, 0.9)),
			measure.Duration(measure.Percentile(took, 1)), len(took)))
	cost := fmt.Sprintf("%s of CPU in nodeproxy itself", measure.Duration((cpu-cpuBefore)/time.Duration(o.changes)))
	if v == harness.NFT {
		if after == before {
			return fmt.Errorf("the endpoints changed, but the generation of nf_tables did not")
		}
		cost += fmt.Sprintf(", %.1f transactions", float64(after-before)/float64(o.changes))
	}
	r.note("each such change", cost)
	return nil
}

// changeOne replaces an endpoint of service i by the n'th spare address.
func changeOne(l *lab, c *measure.Cluster, i, n int) (time.Duration, error) {
	s := c.Services[i]
	was, is := s.Endpoints[0], measure.Nth(measure.EndpointRange, spare-n)
	s.Endpoints[0] = is
	replace, err := c.Prepare(i)
	if err != nil {
		return 0, err
	}
	var took time.Duration
	err = l.stage.Client.Do(func() error {
		begun := time.Now()
		if err := replace(); err != nil {
			return err
		}
		if err := awaitEndpoint(s.Frontend(), is); err != nil {
			return fmt.Errorf("service %s: %w", s.Name, err)
		}
		took = time.Since(begun)
		return neverAgain(s.Frontend(), was)
	})
	return took, err
}

// awaitEndpoint makes connections until an endpoint answers one.
func awaitEndpoint(to netip.AddrPort, endpoint netip.Addr) error {
	for begun := time.Now(); time.Since(begun) < changeTimeout; time.Sleep(pauseBetweenProbes) {
		from, err := measure.Ask(to)
		if err != nil {
			return err
		}
		if from == endpoint {
			return nil
		}
	}
	return fmt.Errorf("%s did not answer within %s", endpoint, changeTimeout)
}

func neverAgain(to netip.AddrPort, endpoint netip.Addr) error {
	for range 20 {
		from, err := measure.Ask(to)
		if err != nil {
			return err
		}
		if from == endpoint {
			return fmt.Errorf("%s still answers at %s, beside the endpoint that replaces it", from, to)
		}
	}
	return nil
}

// measureRestart stops nodeproxy and starts it again over the rules that are in place. Then it does so once more, with an
// endpoint changed while nothing watched.
func measureRestart(r *report, l *lab, c *measure.Cluster, v harness.Variant, d *harness.Daemon) error {
	node := l.Node1().Netns
	if err := d.Stop(); err != nil {
		return err
	}
	before, err := fingerprint(node, v)
	if err != nil {
		return err
	}
	genBefore, err := generation(node)
	if err != nil {
		return err
	}
	d, took, err := l.start(v)
	if err != nil {
		return err
	}
	genAfter, err := generation(node)
	if err != nil {
		return err
	}
	after, err := fingerprint(node, v)
	if err != nil {
		return err
	}
	if err := checkServices(l, c); err != nil {
		return err
	}
	what := fmt.Sprintf("restart over %d unchanged services", len(c.Services))
	r.atMost(what+", in sync", restartGoal, took, "")
	written := "no rule rewritten"
	if before != after {
		written = "rules rewritten"
	}
	if v == harness.NFT {
		written += fmt.Sprintf(" (%d transactions)", genAfter-genBefore)
	}
	r.judge(what+", rules written", "none", written, before == after)
	if err := measureRestartAfterChange(r, l, c, v, d); err != nil {
		return err
	}
	changed, err := fingerprint(node, v)
	if err == nil && changed == after {
		err = errors.New("an endpoint changed, and the fingerprint of the rules did not: it proves nothing")
	}
	return err
}

func measureRestartAfterChange(r *report, l *lab, c *measure.Cluster, v harness.Variant, d *harness.Daemon) error {
	if err := d.Stop(); err != nil {
		return err
	}
	s := c.Services[len(c.Services)/2]
	s.Endpoints[1] = measure.Nth(measure.EndpointRange, spare-maxChanges)
	if err := c.Write(len(c.Services) / 2); err != nil {
		return err
	}
	begun := time.Now()
	if _, err := l.StartDaemon(l.Node1(), daemonFlags(v)...); err != nil {
		return err
	}
	var took time.Duration
	err := l.stage.Client.Do(func() error {
		err := awaitEndpoint(s.Frontend(), s.Endpoints[1])
		took = time.Since(begun)
		return err
	})
	if err != nil {
		return err
	}
	r.atMost("restart, an endpoint changed meanwhile, effective", restartGoal, took, "")
	return nil
}
