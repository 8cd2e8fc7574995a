package e2e

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// kernelHasIPVS reports whether this kernel has IPVS, once something has asked for it.
func kernelHasIPVS() bool {
	_, err := os.Stat("/proc/net/ip_vs")
	return err == nil
}

// TestModeIPVSMissing: on a kernel without IPVS, mode ipvs ends with one line that says what is missing and what to do, and
// leaves nothing behind.
func TestModeIPVSMissing(t *testing.T) {
	t.Parallel()
	endsAtOnce(t, false, []string{"--mode=ipvs"}, "mode ipvs", "ip_vs", "modprobe")
}

// TestModeIPVSMissingBesideProxy: that is found out before another proxy is waited for, which would be made to go in vain.
func TestModeIPVSMissingBesideProxy(t *testing.T) {
	t.Parallel()
	endsAtOnce(t, true, []string{"--mode=ipvs"}, "mode ipvs", "ip_vs", "modprobe")
}

// TestIPVSSchedulerMissing: the same for a scheduler that is asked for by flag, and that no kernel has; before that, for what runs
// with more rights.
func TestIPVSSchedulerMissing(t *testing.T) {
	t.Parallel()
	endsAtOnce(t, false, []string{"--init-only", "--ipvs-scheduler=best"}, "mode ipvs", "--ipvs-scheduler", "best")
	endsAtOnce(t, false, []string{"--ipvs-scheduler=best"}, "mode ipvs", "--ipvs-scheduler", "best")
}

// TestIPVSMissingBesideProxy: the same before another proxy is waited for, and for a kernel setting that can't be made.
func TestIPVSMissingBesideProxy(t *testing.T) {
	t.Parallel()
	endsAtOnce(t, true, []string{"--ipvs-scheduler=best"}, "mode ipvs", "--ipvs-scheduler", "best")
	endsAtOnce(t, true, []string{"--sysctl-dir=/nonexistent"}, "net.ipv4.ip_forward")
}

// endsAtOnce runs a daemon that can't work, beside another one or alone.
func endsAtOnce(t *testing.T, beside bool, flags []string, parts ...string) {
	t.Helper()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
	if beside {
		w.Run(t, harness.NFT, clusterCIDR)
	}
	left := func() string {
		out := ""
		for _, variant := range harness.Variants {
			out += rules(t, w, variant)
		}
		for _, key := range []string{"net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/ipv4/conf/all/arp_ignore"} {
			value, err := w.Node1().ReadSysctl(key)
			require.NoError(t, err)
			out += key + "=" + value + "\n"
		}
		return out + output(t, w, "ip -o link") + output(t, w, "ip route show table local")
	}
	before := left()
	d, err := w.StartDaemon(w.Node1(), append(flags, clusterCIDR)...)
	require.NoError(t, err)
	eventually(t, "the end", func() error {
		if ended, _ := d.Exited(); !ended {
			return errors.New("it still runs")
		}
		return nil
	})
	if _, err := d.Exited(); err == nil {
		t.Errorf("it ended with exit code 0:\n%s", strings.Join(d.Log(), "\n"))
	}
	told := 0
	for _, line := range d.Log() {
		if strings.Contains(line, "mode ipvs can't work") {
			told++
		}
	}
	last := d.Log()[len(d.Log())-1]
	for _, part := range parts {
		if !strings.Contains(last, part) {
			t.Errorf("the last line does not say %q: %s", part, last)
		}
	}
	if told != 1 {
		t.Errorf("%d lines say what is wrong, want 1:\n%s", told, strings.Join(d.Log(), "\n"))
	}
	t.Log(last)
	if now := left(); now != before {
		t.Errorf("it left something behind:\n%s", firstDifference(before, now))
	}
}
