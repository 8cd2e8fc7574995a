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

// Loads collects the load average of the last minute until it is stopped.
type Loads struct {
	end    chan struct{}
	values chan []float64
}

// samplePeriod is how often the load average is looked at; the kernel computes it anew every five seconds.
const samplePeriod = 5 * time.Second

// WatchLoad begins to collect. Stop has to be called once.
func WatchLoad() *Loads {
	l := &Loads{end: make(chan struct{}), values: make(chan []float64)}
	go func() {
		tick := time.NewTicker(samplePeriod)
		defer tick.Stop()
		var values []float64
		for {
			if now, err := proc.LoadAvg(); err == nil {
				values = append(values, now.Load1)
			}
			select {
			case <-l.end:
				l.values <- values
				return
			case <-tick.C:
			}
		}
	}()
	return l
}

// Stop ends the collection and sums it up.
func (l *Loads) Stop() string {
	close(l.end)
	values := <-l.values
	if len(values) == 0 {
		return "load average unknown"
	}
	slices.Sort(values)
	return fmt.Sprintf("1-minute load average %.1f to %.1f, %.1f in the median", values[0], values[len(values)-1],
		values[len(values)/2])
}
