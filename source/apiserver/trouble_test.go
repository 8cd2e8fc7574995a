package apiserver

import (
	"context"
	"io"
	"net/http"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

// TestNotHeard: a server behind a load balancer that makes connections and closes them, or one that can't be reached at all, is not taken
// for one that answers.
func TestNotHeard(t *testing.T) {
	t.Parallel()
	for _, err := range []error{io.EOF, syscall.ECONNRESET, syscall.ECONNREFUSED, context.DeadlineExceeded} {
		t.Run(err.Error(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c, down := newCluster(), atomic.Bool{}
				r, got := c.followServices(t, func(r *http.Request) (*http.Response, error) {
					if down.Load() {
						return nil, err
					}
					return c.RoundTrip(r)
				})
				time.Sleep(time.Minute) // in simulated time: a watch has lasted
				got.check("before")
				c.Lock()
				down.Store(true)
				c.Servers[0].End()
				c.Unlock()
				time.Sleep(5 * time.Minute) // in simulated time
				now := r.current(time.Now())
				assert.Greater(t, now.Age, 4*time.Minute)
				assert.NotEmpty(t, now.Failure)
			})
		})
	}
}

// unlisted answers as the cluster does but, while it is ill, knows no version any more, and answers lists by what list returns.
func (c cluster) unlisted(ill *atomic.Bool, list func() (*http.Response, error)) roundTrip {
	return func(r *http.Request) (*http.Response, error) {
		switch q := r.URL.Query(); {
		case !ill.Load() || q.Get("sendInitialEvents") == "false":
			return c.RoundTrip(r)
		case q.Get("resourceVersion") != "":
			return apiservertest.Respond(apiservertest.Expired), nil
		}
		return list()
	}
}

// TestNotWhole: while everything can't be listed again, what a watch from now on brings is passed on, and is no sign that all that is known
// is current.
func TestNotWhole(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, ill := newCluster(), atomic.Bool{}
		r, got := c.followServices(t, c.unlisted(&ill, func() (*http.Response, error) {
			return apiservertest.Respond(apiservertest.InternalError), nil
		}))
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		c.Lock()
		ill.Store(true)
		c.Servers[0].End()
		c.put("between")
		c.Unlock()
		time.Sleep(5 * time.Minute) // in simulated time
		c.Lock()
		c.put("new")
		c.Unlock()
		time.Sleep(time.Minute) // in simulated time
		c.Lock()
		assert.NotZero(t, got.versions["new"])
		assert.Zero(t, got.versions["between"])
		c.Unlock()
		now := r.current(time.Now())
		assert.Greater(t, now.Age, 5*time.Minute)
		assert.NotEmpty(t, now.Failure)
		ill.Store(false)
		time.Sleep(time.Minute) // in simulated time, longer than the pauses
		got.check("in the end")
		now = r.current(time.Now())
		assert.Less(t, now.Age, 2*time.Minute)
		assert.Empty(t, now.Failure)
	})
}

// TestFewListsBesideChanges: a list that fails on the way is not requested again with each change that a watch brings.
func TestFewListsBesideChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, ill, lists := newCluster(), atomic.Bool{}, atomic.Int32{}
		_, got := c.followServices(t, c.unlisted(&ill, func() (*http.Response, error) {
			lists.Add(1)
			return nil, syscall.ECONNREFUSED
		}))
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		c.Lock()
		ill.Store(true)
		c.Servers[0].End()
		c.Unlock()
		for range 50 * 60 {
			c.Lock()
			c.put("s1")
			c.Unlock()
			time.Sleep(time.Second / 50) // in simulated time
		}
		assert.LessOrEqual(t, lists.Load(), int32(2*60))
		ill.Store(false)
		time.Sleep(time.Minute) // in simulated time, longer than the pauses
		got.check("in the end")
	})
}

// TestUnreadable: where the API server can't send what comes after a version, everything is listed again.
func TestUnreadable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		_, got := c.followServices(t, func(r *http.Request) (*http.Response, error) {
			if r.URL.Query().Get("resourceVersion") != "" {
				return apiservertest.RespondEvent(apiservertest.InternalError), nil
			}
			return c.RoundTrip(r)
		})
		time.Sleep(time.Minute) // in simulated time: a watch has lasted
		c.Lock()
		c.Servers[0].End()
		c.put("new")
		c.Unlock()
		time.Sleep(time.Minute) // in simulated time, longer than the pauses
		got.check("in the end")
	})
}

// TestListBesideWatch: of what a list and the watch beside it have of an object, the later version holds, and what the list no longer has
// is gone, whichever of the two lags behind the other.
func TestListBesideWatch(t *testing.T) {
	const listed = 50
	for _, c := range []struct {
		what                  string
		listed, watched, want string // versions; "" for none
		gone                  bool   // by the watch
	}{
		{"the watch lags", "48", "46", "48", false},
		{"so it does with a removal", "48", "46", "48", true},
		{"both have it", "48", "48", "48", false},
		{"the list lags", "48", "52", "52", false},
		{"so it does with a removal", "48", "52", "", true},
		{"it is gone, and the watch lags", "", "46", "", false},
		{"it has come back", "", "52", "52", false},
		{"only the list has it", "48", "", "48", false},
		{"neither has it", "", "", "", false},
	} {
		for _, listFirst := range []bool{true, false} {
			told := ""
			s := newStore(resources(Config{Client: &Client{}})[0], func(_ *resource, b source.Batch, _ bool) {
				for _, svc := range b.Services {
					if told = ""; svc != nil {
						told = svc.ResourceVersion
					}
				}
			})
			object := func(version string) *v1.Service {
				return &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "s", ResourceVersion: version}}
			}
			list := func() {
				if c.listed != "" {
					require.NoError(t, s.list(decoded(watch.Added, object(c.listed))))
				}
			}
			s.begin()
			require.NoError(t, s.list(decoded(watch.Added, object("40"))))
			s.complete(40)
			s.begin()
			if listFirst {
				list()
			}
			switch {
			case c.gone:
				require.NoError(t, s.change(decoded(watch.Deleted, object(c.watched))))
			case c.watched != "":
				require.NoError(t, s.change(decoded(watch.Modified, object(c.watched))))
			}
			if !listFirst {
				list()
			}
			if s.complete(listed); told != c.want {
				t.Errorf("%s, the list first: %t: in the end it is %q, want %q", c.what, listFirst, told, c.want)
			}
		}
	}
}
