package metrics

import (
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/source"
)

// TestVerified: a verification that could not compare everything counts, and is not the last one.
func TestVerified(t *testing.T) {
	const last = "nodeproxy_verification_last_timestamp_seconds"
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Mode: iptables})
		v := source.Verification{Finished: true, TookSeconds: 2, Compared: []source.Compared{{What: "Services", Not: "no answer"}},
			Differences: []source.Difference{{Part: source.PartObjects}, {Part: source.PartObjects}, {Part: source.PartPlan}}}
		s.Verified(v)
		if gather(t, s)[last] != nil {
			t.Error("there is a time of the last one that could compare everything before any")
		}
		v.Compared[0].Not = ""
		s.Verified(v)
		holds(t, s, map[string]float64{
			last: timestamp(time.Now()),
			"nodeproxy_verification_differences_total part=objects": 4,
			"nodeproxy_verification_differences_total part=plan":    2,
			"nodeproxy_verification_differences_total part=kernel":  0,
			"nodeproxy_verification_duration_seconds":               2,
		})
	})
}
