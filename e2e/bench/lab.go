package main

import (
	"errors"
	"net/netip"
	"time"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/measure"
	"nodeproxy/e2e/probe"
)

// programmingTimeout is for how long bench waits until rules are in place, far beyond any goal.
const programmingTimeout = 4 * time.Minute

// lab is a stage in a small network of its own.
type lab struct {
	*harness.World
	stage *measure.Stage
}

// newLab makes a lab. Close removes it.
func newLab() (*lab, error) {
	w, err := harness.Build(harness.Options{Pods: []int{2}, Ports: []uint16{9}})
	if err != nil {
		return nil, err
	}
	stage, err := measure.NewStage(w.Node1(), probe.Greet, measure.EndpointRange)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return &lab{w, stage}, nil
}

// Close ends everything in the lab and removes it.
func (l *lab) Close() {
	l.stage.Close()
	_ = l.World.Close()
}

// target is an address to which the lab's client makes connections.
func (l *lab) target(name string, to netip.AddrPort) measure.Target {
	return measure.Target{Name: name, From: l.stage.Client.Netns, To: to}
}

// pod is the target of an address that no service has to do with.
func (l *lab) pod(name string) measure.Target { return l.target(name, l.stage.Pod()) }

// start runs nodeproxy on the node and waits until it reports the rules to be in sync. It returns how long that took,
// from before the process existed.
func (l *lab) start(variant harness.Variant) (*harness.Daemon, time.Duration, error) {
	begun := time.Now()
	d, err := l.StartDaemon(l.Node1(), daemonFlags(variant)...)
	if err != nil {
		return nil, 0, err
	}
	err = d.WaitFor(programmingTimeout, harness.InSync)
	return d, time.Since(begun), err
}

func daemonFlags(variant harness.Variant) []string {
	return []string{"--iptables-backend=" + string(variant), "--cluster-cidr=" + measure.PodRange}
}
