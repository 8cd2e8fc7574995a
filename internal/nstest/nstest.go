// Package nstest runs tests in network namespaces of their own. They need root.
package nstest

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Run runs f on a thread of its own in a new network namespace, whose loopback is up. The namespace has no name and goes with
// the thread. Programs that f starts, and sockets that it makes, are in it; those of goroutines that it starts are not.
func Run(t testing.TB, f func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		defer close(done)
		// Never unlocked: the thread ends with the goroutine, and the namespace with the thread.
		runtime.LockOSThread()
		ns, err := netns.New()
		if err != nil {
			done <- fmt.Errorf("making a network namespace (these tests need root): %w", err)
			return
		}
		defer ns.Close()
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			done <- fmt.Errorf("loopback of a network namespace: %w", err)
			return
		}
		f()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
