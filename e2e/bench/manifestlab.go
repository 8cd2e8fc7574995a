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
func newManifestLab(flags []string, sizes ...int) *manifestLab {
	w := must(harness.Build(harness.Options{Pods: []int{2}, Ports: []uint16{9}}))
	l := &manifestLab{World: w, flags: append(flags, "--cluster-cidr="+podRange)}
	if err := attempt(func() {
		l.stage = newStage(w.Node1(), endpointRange)
		l.manifests = writeManifests(w.Manifests, sizes...)
	}); err != nil {
		check(errors.Join(err, w.Close()))
	}
	return l
}

// close is deferred. It fails with what was recovered, if that was a failure.
func (l *manifestLab) close(recovered any) {
	l.stage.close()
	check(errors.Join(caught(recovered), l.World.Close()))
}

// start runs nodeproxy on the node and waits until it reports the rules to be in sync. It returns how long that took, from before the
// process existed.
func (l *manifestLab) start() time.Duration {
	begun := time.Now()
	l.daemon = must(l.StartDaemon(l.Node1(), l.flags...))
	check(l.daemon.WaitFor(10*time.Minute, harness.InSync))
	return time.Since(begun)
}
