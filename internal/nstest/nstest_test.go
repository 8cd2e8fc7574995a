package nstest

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
)

// TestRun: f is in a namespace that is not this thread's, with nothing but a loopback that works.
func TestRun(t *testing.T) {
	t.Parallel()
	outside, err := netns.Get()
	require.NoError(t, err)
	defer outside.Close()
	Run(t, func() {
		inside, err := netns.Get()
		if err != nil {
			t.Error(err)
			return
		}
		defer inside.Close()
		if inside.Equal(outside) {
			t.Error("the namespace is the one outside")
		}
		listener, err := net.Listen("tcp", "127.0.0.1:1")
		if err != nil {
			t.Errorf("loopback: %v", err)
			return
		}
		listener.Close()
		all, err := net.Interfaces()
		assert.NoError(t, err)
		for _, i := range all {
			if up := i.Flags&net.FlagUp != 0; up != (i.Name == "lo") {
				t.Errorf("%s is up: %v", i.Name, up)
			}
		}
	})
}

// failing is a test that notes whether it has failed.
type failing struct {
	testing.TB
	failed bool
}

func (f *failing) Helper()               {}
func (f *failing) Fatalf(string, ...any) { f.failed = true }

// TestInside: a subtest is not in the namespace that its parent has entered.
func TestInside(t *testing.T) {
	Enter(t)
	parent := &failing{}
	if Inside(parent); parent.failed {
		t.Error("a test that has entered a namespace is not inside")
	}
	t.Run("subtest", func(t *testing.T) {
		child := &failing{}
		if Inside(child); !child.failed {
			t.Error("its subtest is inside")
		}
	})
}

// TestProcess: goroutines are in the namespace too.
func TestProcess(t *testing.T) {
	if !Process(t) {
		return
	}
	done := make(chan error)
	go func() {
		listener, err := net.Listen("tcp", "127.0.0.1:1")
		if err == nil {
			listener.Close()
		}
		done <- err
	}()
	assert.NoError(t, <-done)
	if all, err := net.Interfaces(); err != nil || len(all) == 0 || all[0].Name != "lo" {
		t.Errorf("interfaces %v, %v", all, err)
	}
}
