package machine

import (
	"fmt"
	"slices"
	"time"
)

// LoadAverage is the load average of the last one, five and fifteen minutes.
func LoadAverage() string {
	l, err := proc.LoadAvg()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("load average %.2f %.2f %.2f", l.Load1, l.Load5, l.Load15)
}

// samplePeriod is how often WatchLoad looks at the load average; the kernel computes it anew every five seconds.
const samplePeriod = 5 * time.Second

// WatchLoad begins to collect the load average of the last minute. stop, which has to be called once, ends that and sums it up.
func WatchLoad() (stop func() string) {
	end, collected := make(chan struct{}), make(chan []float64)
	go func() {
		tick := time.NewTicker(samplePeriod)
		defer tick.Stop()
		var values []float64
		for {
			if now, err := proc.LoadAvg(); err == nil {
				values = append(values, now.Load1)
			}
			select {
			case <-end:
				collected <- values
				return
			case <-tick.C:
			}
		}
	}()
	return func() string {
		close(end)
		values := slices.Sorted(slices.Values(<-collected))
		if len(values) == 0 {
			return "load average unknown"
		}
		return fmt.Sprintf("1-minute load average %.1f to %.1f, %.1f in the median", values[0], values[len(values)-1],
			values[len(values)/2])
	}
}
