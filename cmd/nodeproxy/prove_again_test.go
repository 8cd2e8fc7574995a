//go:build deterministic

package main

import (
	"fmt"
	"hash/fnv"
	"testing"
)

// TestProveAgain: the same seed leads to the same writes at the same times. hack/deterministic builds it: with the Go runtime
// as it is, the second time may be different. The sum that it prints is the same in each process, but in mode ipvs: where addresses have no
// order, that of their hashes depends on where the process keeps them.
func TestProveAgain(t *testing.T) {
	first, all := number(t, "NODEPROXY_SCHEDULE", 0), fnv.New64a()
	for seed := first; seed < first+min(100, number(t, "NODEPROXY_SCHEDULES", 100)); seed++ {
		_, _, sum := drawSchedule(seed).run(t)
		if _, _, again := drawSchedule(seed).run(t); again != sum {
			t.Errorf("schedule %d differs", seed)
		}
		fmt.Fprint(all, sum)
	}
	t.Logf("the sum of what was written: %x", all.Sum64())
}
