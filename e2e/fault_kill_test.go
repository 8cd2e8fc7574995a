package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// TestFaultKilled: the daemon is killed at random moments, of its start and of its syncs, some of them while iptables-restore
// runs, and each time started again, while Services change.
func TestFaultKilled(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		kills := byMode(40, 16)
		f := newFaultScene(t, variant, "killed", fmt.Sprintf("kill -9 at %d random moments of starts and syncs", kills))
		f.start()
		const seed = 5
		random := rand.New(rand.NewPCG(seed, uint64(len(variant))))
		pods := []string{"n1a", "n2a", "n3a"}
		writing := 0 // how many kills met a program that wrote rules
		for i := range kills {
			// A change of everything that no load is on, so that there is much to write.
			f.change(pods[i%3])
			f.churn(random, i)
			if i%2 == 0 || mode == harness.NFTables { // in a start, which is still at work, or in what it does first
				time.Sleep(time.Duration(random.Int64N(int64(byMode(120, 600)))) * time.Millisecond)
			} else { // as soon as a program runs, which the start that is under way needs in mode iptables
				limit := time.Second
				if mode == harness.IPTables {
					limit = harness.Limit
				}
				f.whileWriting(limit)
			}
			if f.writing() {
				writing++
			}
			require.NoError(t, f.daemon.Kill())
			var err error
			if f.daemon, err = f.StartDaemon(f.Node1(), append([]string{"--iptables-backend=" + string(variant),
				"--ipvs-vips=" + string(harness.VIPsWith(variant))}, f.flags...)...); err != nil {
				t.Fatal(err)
			}
		}
		f.repaired(pods[(kills-1)%3])
		t.Logf("%d of %d kills met iptables-restore or iptables-save at work", writing, kills)
		if mode == harness.IPTables && writing == 0 { // Half of them wait for one.
			t.Error("no kill met iptables-restore or iptables-save at work")
		}
		f.finish()
	})
}

// churn changes Services that no load is on.
func (f *faultScene) churn(random *rand.Rand, round int) {
	f.Helper()
	pods := []string{"n1a", "n1b", "n2a", "n2b", "n3a"}
	const first, count = 20, 20
	for i := range count {
		if random.IntN(3) > 0 {
			continue
		}
		s := harness.Service(fmt.Sprintf("churn-%d", i), first+i)
		file := s.Name + ".yaml"
		if _, err := os.Stat(filepath.Join(f.Manifests, file)); err == nil && random.IntN(4) == 0 {
			f.Remove(f.T, file)
			continue
		}
		if random.IntN(3) == 0 {
			harness.Policies("Cluster", []string{"Cluster", "Local"}[round%2])(s)
		}
		if random.IntN(5) == 0 {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		}
		random.Shuffle(len(pods), func(a, b int) { pods[a], pods[b] = pods[b], pods[a] })
		f.Write(f.T, file, harness.Objects(s, f.Ready(pods[:random.IntN(len(pods)+1)]...)...)...)
	}
}

// writing reports whether the daemon has a child at work, which one that waits for its input is not.
func (f *faultScene) writing() bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", f.daemon.PID()))
	for _, file := range tasks {
		children, _ := os.ReadFile(file)
		for _, pid := range strings.Fields(string(children)) {
			if waits, err := os.ReadFile("/proc/" + pid + "/wchan"); err == nil && !strings.Contains(string(waits), "pipe_read") {
				return true
			}
		}
	}
	return false
}

func (f *faultScene) whileWriting(limit time.Duration) {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		if f.writing() {
			return
		}
	}
}

// TestFaultKilledWhileWriting: the daemon is killed while iptables-restore runs, which goes on, and writes what it was given while
// the next daemon starts, after that has read what there is.
func TestFaultKilledWhileWriting(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "killed", "kill -9, and an iptables-restore that outlives it writes in the middle of the next start")
		order := f.faultyTools()
		f.start()
		reading := filepath.Join(f.Dir, "reading")
		// Not for ever, should the test end early.
		f.give(order, fmt.Sprintf("echo >>%[1]s.begun; timeout 60 sh -c 'while [ ! -e %[1]s ]; do sleep 0.01; done'; echo >>%[1]s.ended\n", reading))
		f.change("n2a")
		until(t, "iptables-restore", func() error {
			if begun, err := os.ReadFile(reading + ".begun"); err != nil || len(begun) < 2 {
				return fmt.Errorf("%d runs have begun (%v), want one a family", len(begun), err)
			}
			return nil
		})
		require.NoError(t, f.daemon.Kill())
		// The next daemon finds nothing to do for this Service, but something for another: then it has read all.
		f.change("n1a")
		f.Write(t, "internal.yaml", harness.Objects(harness.Service("internal", 5, harness.ClusterOnly), f.Ready("n3a")...)...)
		f.give(order, fmt.Sprintf("touch %[1]s; timeout 60 sh -c 'while [ \"$(wc -l <%[1]s.ended)\" -lt 2 ]; do sleep 0.01; done'; sleep 0.5\n", reading))
		f.daemon = f.World.Run(t, variant, f.flags...)
		f.repaired("n1a")
		for _, family := range families {
			eventually(t, "the other Service", func() error { return serversOf(f.Client, "tcp", clusterIP(5, family), "n3a") })
		}
		f.finish()
	})
}
