package metrics

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// TestSeldom: a counter is read as often as a thousandth of the time allows, within longestUnread in any case, and at once after an error.
func TestSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var reads uint64
		takes, fails := 20*time.Millisecond, errors.New("no such counter")
		read := seldom(func() (uint64, error) {
			time.Sleep(takes) // in simulated time
			if reads++; reads == 1 {
				return 0, fails
			}
			return reads, nil
		})
		got := func(after time.Duration, want uint64, err error) {
			t.Helper()
			time.Sleep(after) // in simulated time
			n, failed := read()
			assert.Equal(t, want, n)
			assert.Equal(t, err, failed)
		}
		got(0, 0, fails)
		got(0, 2, nil)
		got(19*time.Second, 2, nil)
		takes = time.Minute
		got(time.Second, 3, nil)
		got(longestUnread-1, 3, nil)
		got(1, 4, nil)
	})
}
