package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// openFiles counts the open files of a daemon by kind. Netlink sockets of different protocols and groups are different kinds.
func openFiles(t *testing.T, d *harness.Daemon) map[string]int {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d", d.PID())
	list, err := os.ReadDir(filepath.Join(proc, "fd"))
	require.NoError(t, err)
	tables := map[string][]string{}
	for _, name := range []string{"netlink", "tcp", "tcp6", "udp", "udp6", "unix"} {
		text, err := os.ReadFile(filepath.Join(proc, "net", name))
		require.NoError(t, err)
		tables[name] = strings.Split(string(text), "\n")
	}
	kindOf := func(inode string) string {
		for name, lines := range tables {
			for _, line := range lines {
				switch f := strings.Fields(line); {
				case !slices.Contains(f, inode):
				case name == "netlink":
					return fmt.Sprintf("netlink socket of protocol %s, groups %s", f[1], f[3])
				default:
					return name + " socket"
				}
			}
		}
		return "other socket" // Those that are not bound are in no table.
	}
	out := map[string]int{}
	for _, f := range list {
		kind, err := os.Readlink(filepath.Join(proc, "fd", f.Name()))
		if err != nil {
			continue // It has been closed since.
		}
		kind, number, _ := strings.Cut(kind, ":[")
		if kind == "socket" {
			kind = kindOf(strings.TrimSuffix(number, "]"))
		}
		out[kind]++
	}
	return out
}

// settledFiles returns the open files of a daemon once they have stayed the same for a second.
func settledFiles(t *testing.T, d *harness.Daemon) map[string]int {
	t.Helper()
	was, since := "", time.Now()
	for limit := time.Now().Add(harness.Limit); time.Now().Before(limit); time.Sleep(50 * time.Millisecond) {
		files := openFiles(t, d)
		switch now := fmt.Sprint(files); {
		case now != was:
			was, since = now, time.Now()
		case time.Since(since) > time.Second:
			return files
		}
	}
	t.Fatalf("the open files of the daemon keep changing, the last were %s", was)
	return nil
}

// TestReloadLeaksNothing: after many new configurations, those that can't run among them, a daemon has no more open files and sockets,
// and no more goroutines, than after the first ones. All the while its metrics, which are read from the kernel in mode ipvs, can be read.
func TestReloadLeaksNothing(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := reloadWorld(t)
		busy := netip.MustParseAddrPort("127.0.0.1:7777")
		require.NoError(t, w.ServeTCP(w.Node1().Netns, "busy", busy))
		c := runConfigured(t, w, variant)
		reject := func(text, says string) {
			t.Helper()
			line := len(c.Log())
			c.write(t, text)
			require.NoError(t, c.WaitForAfter(line, harness.StartupTimeout, "the former configuration stays in force", says))
		}
		reload := func(i int) {
			t.Helper()
			reject(good()+"bindAddressHardFail: true\nmetricsBindAddress: "+busy.String()+"\n", busy.String())
			reject(configHeader+"mode: ipvs\nipvs: {scheduler: nosuch}\n", "mode ipvs can't work here")
			line := len(c.Log())
			c.write(t, fmt.Sprintf("%s%s: {masqueradeAll: %v}\n", good(), section(), i%2 == 0))
			eventually(t, "the configuration is in force", func() error {
				_, after, _ := strings.Cut(strings.Join(c.Log()[line:], "\n"), "continuing with this configuration")
				if !strings.Contains(after, "level=INFO "+harness.InSync) {
					return errors.New("it is not in sync")
				}
				return nil
			})
		}
		goroutines := func() float64 { return w.Node1().Scrape(t).Sum("go_goroutines") }
		first, running := map[string]int{}, 0.0
		const before, reloads = 2, 8
		for i := range before {
			reload(i)
			for kind, n := range settledFiles(t, c.Daemon) {
				first[kind] = max(first[kind], n)
			}
			running = max(running, goroutines())
		}
		t.Logf("at first, %v goroutines, and open files: %v", running, first)
		scrapes := probe(w, harness.MetricsAddr, "/metrics")
		for i := range reloads {
			reload(before + i)
		}
		scrapes.noFailures(t)
		eventually(t, fmt.Sprintf("%d reloads leak nothing", reloads), func() error {
			files := openFiles(t, c.Daemon)
			for kind, n := range files {
				if n > first[kind] {
					return fmt.Errorf("%s: %d are open, and %d were at first: %v", kind, n, first[kind], files)
				}
			}
			if now := goroutines(); now >= running+reloads {
				return fmt.Errorf("%v goroutines, and %v at first", now, running)
			}
			return nil
		})
		for _, line := range c.Log() {
			if strings.Contains(line, "reading the counters of virtual servers") {
				t.Fatalf("a scrape during a reload lacks counters: %s", line)
			}
		}
	})
}
