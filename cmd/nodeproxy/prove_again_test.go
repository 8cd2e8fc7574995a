//go:build deterministic

package main

import (
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestProveAgain: the same seed leads to the same writes at the same times, in this process and in another one. hack/deterministic builds it: with
// the Go runtime as it is, the second time may be different. Of mode ipvs, the other process says nothing: where addresses have no order, that of
// their hashes depends on where a process keeps them.
func TestProveAgain(t *testing.T) {
	const variable = "NODEPROXY_AGAIN" // set in the other process
	isOther := os.Getenv(variable) != ""
	first, all, compared := number(t, "NODEPROXY_SCHEDULE", 0), fnv.New64a(), 0
	for seed := first; seed < first+min(100, number(t, "NODEPROXY_SCHEDULES", 100)); seed++ {
		s := drawSchedule(seed)
		if isOther && s.mode == "ipvs" {
			continue
		}
		_, _, sum := s.run(t)
		if s.mode != "ipvs" {
			fmt.Fprintln(all, sum)
			compared++
		}
		if isOther {
			continue
		}
		if _, _, again := s.run(t); again != sum {
			t.Errorf("schedule %d differs", seed)
		}
	}
	sum := fmt.Sprintf("the sum of what was written: %x", all.Sum64())
	t.Log(sum)
	if isOther || compared == 0 {
		return
	}
	other := exec.Command(os.Args[0], "-test.v", "-test.timeout", "0", "-test.run", "^TestProveAgain$")
	other.Env = append(os.Environ(), variable+"=1")
	out, err := other.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, sum, regexp.MustCompile("the sum of what was written: .*").FindString(string(out)), "in another process")
}
