package main

import (
	"errors"
	"time"

	"nodeproxy/e2e/harness"
)

// manifestLab is a stage in a small network of its own, with Services in manifests.
type manifestLab struct {
	*harness.World
	*manifests
	stage  *stage
	daemon *harness.Daemon
	flags  []string
}

// newManifestLab makes a lab with Services of as many endpoints as sizes tells, without starting nodeproxy. close removes it.
func newManifestLab(flags []string, sizes ...int) (*manifestLab, error) {
	w, err := harness.Build(harness.Options{Pods: []int{2}, Ports: []uint16{9}})
	if err != nil {
		return nil, err
	}
	l := &manifestLab{World: w, flags: append(flags, "--cluster-cidr="+podRange)}
	if l.stage, err = newStage(w.Node1(), endpointRange); err == nil {
		l.manifests, err = writeManifests(w.Manifests, sizes...)
	}
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return l, nil
}

func (l *manifestLab) close() error {
	l.stage.close()
	return l.World.Close()
}

// start runs nodeproxy on the node and waits until it reports the rules to be in sync. It returns how long that took, from before the
// process existed.
func (l *manifestLab) start() (took time.Duration, err error) {
	begun := time.Now()
	if l.daemon, err = l.StartDaemon(l.Node1(), l.flags...); err == nil {
		err = l.daemon.WaitFor(10*time.Minute, harness.InSync)
	}
	return time.Since(begun), err
}
