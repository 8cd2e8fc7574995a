package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/e2e/harness"
)

// TestFaultClock: the clock jumps, forward by a day and back by a year. The machine's own is left alone: the test runs in the
// test kernel.
func TestFaultClock(t *testing.T) {
	if !harness.InGuest() {
		t.Parallel()
		elsewhere(t)
		return
	}
	// One by one: they have one clock, and no other test is to see it jump.
	for _, variant := range byMode(harness.Variants, []harness.Variant{harness.NFT}) {
		t.Run(string(variant), func(t *testing.T) { clockJumps(t, variant) })
	}
}

// elsewhere runs the test in the test kernel, and takes over its rows of the table.
func elsewhere(t *testing.T) {
	t.Helper()
	lines := bufio.NewScanner(strings.NewReader(harness.RunElsewhere(t, "NODEPROXY_KERNEL_GUEST=1", rowsVariable+"=1")))
	for lines.Scan() {
		if text, is := strings.CutPrefix(lines.Text(), rowPrefix); is {
			var r faultRow
			require.NoError(t, json.Unmarshal([]byte(text), &r))
			addFault(r)
			t.Logf("%s, %s: %d requests, %d failed, time to repair %s", r.Fault, r.Injected, r.Requests, r.Failed, r.Repair)
		}
	}
}

func clockJumps(t *testing.T, variant harness.Variant) {
	f := newFaultScene(t, variant, "clock jumps", "forward by a day, back by a year")
	f.start()
	// Affinity of an hour, which a day must not end.
	pod := f.sticks("")
	pods := []string{"n2a", "n3a"}
	jumps := []time.Duration{24 * time.Hour, -365 * 24 * time.Hour}
	var total time.Duration
	defer func() { jump(t, -total) }()
	for i, by := range jumps {
		// A connection to an endpoint that goes: mode ipvs has it drain, for a time that must not get longer.
		c, err := f.Client.Converse(clusterIP(changing, 4))
		require.NoError(t, err)
		defer c.Close()
		f.change(pods[i])
		f.inForce(pods[i])
		jump(t, by)
		total += by
		f.repairs = append(f.repairs, f.sound(t))
		if now := f.sticks(pod); now != pod {
			t.Errorf("after %v, a client is sent to %s and no longer to %s", by, now, pod)
		}
		f.change("n1a")
		f.repaired("n1a")
	}
	f.finish() // Nothing drains any more.
}

// jump sets the clock of the test kernel.
func jump(t *testing.T, by time.Duration) {
	t.Helper()
	if !harness.InGuest() {
		t.Fatal("the clock of this machine is not to be set")
	}
	to := unix.NsecToTimespec(time.Now().Add(by).UnixNano())
	require.NoError(t, unix.ClockSettime(unix.CLOCK_REALTIME, &to))
}

// sticks returns the one endpoint that the Service with affinity sends the client to.
func (f *faultScene) sticks(want string) string {
	f.Helper()
	server := want
	for range 10 {
		a := f.Client.Ask("tcp", clusterIP(2, 4), harness.Patient)
		if a.Outcome != harness.Answered {
			f.Fatalf("the Service with affinity: %v", a)
		}
		if server == "" {
			server = a.Server
		}
		if a.Server != server {
			return a.Server
		}
	}
	return server
}

// sound waits until the daemon is healthy and ready, and has repaired what another program breaks, and returns how long that took.
func (f *faultScene) sound(t *testing.T) time.Duration {
	t.Helper()
	begin := time.Now()
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		eventually(t, path, func() error {
			c, err := f.Client.Dial("tcp", netip.AddrPortFrom(f.Node1().IP4, 10256), time.Now().Add(harness.Patient))
			if err != nil {
				return err
			}
			defer c.Close()
			fmt.Fprintf(c, "GET %s HTTP/1.0\r\n\r\n", path)
			status, err := bufio.NewReader(c).ReadString('\n')
			if err == nil && !strings.Contains(status, " 200 ") {
				err = fmt.Errorf("%s: %s", path, status)
			}
			return err
		})
	}
	f.breakRules()
	eventually(t, "a rule of ours is repaired", func() error {
		if strings.Contains(rules(t, f.World, f.variant), "-A KUBE-MARK-MASQ -j RETURN") {
			return fmt.Errorf("a rule of others is still in KUBE-MARK-MASQ")
		}
		return nil
	})
	return time.Since(begin)
}
