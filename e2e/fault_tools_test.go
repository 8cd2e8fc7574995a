package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// ownRun gives daemons a /run of their own, since the lock of the legacy variant is one for the whole machine. The script goes
// on after the mount.
func (f *faultScene) ownRun(script string) {
	f.Launch = func(path string, args ...string) *exec.Cmd {
		return exec.Command("unshare", append([]string{"--mount", "--propagation=private", "sh", "-e", "-c",
			"mount -t tmpfs -o size=1m,nr_inodes=20 tmpfs /run\n" + script + "\nexec \"$@\"", "sh", path}, args...)...)
	}
}

// seen is a path as the daemon sees it.
func (f *faultScene) seen(path string) string {
	return filepath.Join("/proc", fmt.Sprint(f.daemon.PID()), "root", path)
}

// TestFaultLock: another program holds the xtables lock while a change comes.
func TestFaultLock(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		const holds = 10 * time.Second
		f := newFaultScene(t, variant, "iptables lock held", fmt.Sprintf("flock on /run/xtables.lock by another program for %v", holds))
		f.ownRun("")
		f.start()
		lock, err := os.OpenFile(f.seen("/run/xtables.lock"), os.O_CREATE|os.O_RDWR, 0o600)
		if err == nil {
			defer lock.Close()
			err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
		}
		require.NoError(t, err)
		end := time.Now().Add(holds)
		line := len(f.daemon.Log())
		f.change("n2a")
		if variant == harness.NFT || mode == harness.IPVS { // neither takes the lock
			f.inForce("n2a")
			f.row.Repair = "none needed: it uses no lock"
		} else {
			f.log(line, "another program holds the xtables lock")
			for _, family := range families {
				assert.NoError(t, serversOf(f.Client, "tcp", clusterIP(changing, family), "n1a"), "while the lock is held")
			}
			time.Sleep(time.Until(end)) // how long the lock is held
		}
		require.NoError(t, lock.Close())
		if f.row.Repair == "" {
			f.repaired("n2a")
		}
		f.finish()
	})
}

// whenGiven begins a script in the place of iptables-restore, which may be started before there is anything to write: it goes on when all input
// has come, and ends if there is none.
const whenGiven = "in=$(mktemp); cat >$in; exec <$in; rm $in; [ -s /dev/stdin ] || exit 0\n"

// faultyTools puts a script in the place of each program of a variant that restores rules, and gives a file that says what the
// script does; without the file, the real program runs.
func (f *faultScene) faultyTools() (order string) {
	f.Helper()
	dir := filepath.Join(f.Dir, "tools")
	order = filepath.Join(f.Dir, "order")
	require.NoError(f, os.Mkdir(dir, 0o755))
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, kind := range []string{"", "-save", "-restore"} {
			name := f.variant.Tool(family) + kind
			path, err := exec.LookPath(name)
			if err != nil {
				path = filepath.Join("/usr/sbin", name)
			}
			script := fmt.Sprintf("#!/bin/sh\n%sreal=%s\n[ ! -e %s ] || . %s\nexec $real \"$@\"\n", whenGiven, path, order, order)
			if kind != "-restore" {
				script = fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", path)
			}
			require.NoError(f, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
		}
	}
	f.Launch = func(path string, args ...string) *exec.Cmd {
		cmd := exec.Command(path, args...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		return cmd
	}
	return order
}

// give writes an order whole.
func (f *faultScene) give(order, script string) {
	f.Helper()
	require.NoError(f, os.WriteFile(order+".new", []byte(script), 0o644))
	require.NoError(f, os.Rename(order+".new", order))
}

func (f *faultScene) withdraw(order string) {
	f.Helper()
	require.NoError(f, os.Remove(order))
}

// TestFaultRestoreRefused: iptables-restore fails for a while, whatever it is given.
func TestFaultRestoreRefused(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "restore refused", "iptables-restore exits 1 for 6 s")
		order := f.faultyTools()
		f.start()
		f.give(order, "cat >/dev/null; echo 'iptables-restore: line 3 failed' >&2; exit 1\n")
		line := len(f.daemon.Log())
		f.breakRules()
		f.change("n2a")
		f.log(line, "sync failed", "line 3 failed")
		time.Sleep(6 * time.Second) // how long the fault lasts
		f.withdraw(order)
		f.repaired("n2a")
		f.finish()
	})
}

// breakRules changes something that the daemon keeps and no load needs. In mode ipvs, rules are not what Services change.
func (f *faultScene) breakRules() {
	f.Helper()
	addStrayRule(f.T, f.World, f.variant)
}

// TestFaultRestoreRefusesOne: iptables-restore refuses what is of one Service, for good. All others go on to change.
func TestFaultRestoreRefusesOne(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "restore refuses one Service", "iptables-restore exits 2 on anything with one Service's chain")
		f.flags = append(f.flags, "--iptables-sync-period=30s") // What is refused is tried again with a comparison.
		order := f.faultyTools()
		f.start()
		chain := regexp.MustCompile(`-A (KUBE-SVC-\S+) .*e2e/internal:a -> `).FindStringSubmatch(rules(t, f.World, variant))
		if chain == nil {
			t.Fatal("no chain of the Service internal")
		}
		f.give(order, fmt.Sprintf("t=$(mktemp -p %s); cat >$t\n"+
			"if grep -q -e '^:%s ' $t; then echo 'iptables-restore: line 2 failed' >&2; exit 2; fi\n"+
			"exec <$t\nrm $t\n", f.Dir, chain[1]))
		line := len(f.daemon.Log())
		changed := harness.Service("internal", 5, harness.ClusterOnly)
		f.Write(t, "internal.yaml", harness.Objects(changed, f.Ready("n3a")...)...)
		f.log(line, "the kernel refuses", "Service e2e/internal")
		f.healthyAll()
		begin := time.Now()
		f.change("n2a")
		f.inForce("n2a")
		t.Logf("a change of another Service took %v", time.Since(begin))
		for _, family := range families {
			if err := serversOf(f.Client, "tcp", clusterIP(5, family), "n1a", "n2a", "n3a"); err != nil {
				t.Errorf("the Service that is refused no longer does what it did: %v", err)
			}
		}
		f.healthyAll()
		if n := count(f.daemon.Log(), "sync failed"); n > 0 {
			t.Errorf("%d syncs failed", n)
		}
		if n := count(f.daemon.Log(), "the kernel refuses"); n > 2*len(families) { // a port of each protocol, at most
			t.Errorf("it is told of %d times", n)
		}
		f.withdraw(order)
		end := time.Now()
		f.inForce("n2a")
		for _, family := range families {
			eventually(t, "the Service that was refused", func() error {
				return serversOf(f.Client, "tcp", clusterIP(5, family), "n3a")
			})
		}
		f.repairs = append(f.repairs, time.Since(end))
		f.finish()
	})
}

// healthyAll holds that probes take the node for healthy.
func (f *faultScene) healthyAll() {
	f.Helper()
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		if code, body, err := f.Node1().Get(harness.HealthAddr, path); err != nil || code != http.StatusOK {
			f.Errorf("%s: %d, %s, %v", path, code, body, err)
		}
	}
}

// TestFaultRestoreHangs: iptables-restore does not end.
func TestFaultRestoreHangs(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "restore hangs", "one run of iptables-restore a family does not end; it is ended after 30 s")
		order := f.faultyTools()
		f.start()
		begin := time.Now()
		f.give(order, "exec sleep 120\n") // Longer than is waited for it; not much longer, should this test be killed.
		line := len(f.daemon.Log())
		f.breakRules()
		f.change("n2a")
		time.Sleep(5 * time.Second) // Both have begun.
		f.withdraw(order)
		f.log(line, "sync failed", "was ended")
		f.inForce("n2a")
		f.row.Repair = fmt.Sprintf("%v, from its beginning", time.Since(begin).Round(10*time.Millisecond))
		if n := count(f.daemon.Log(), "was ended"); n > 1 {
			t.Errorf("runs were ended in %d syncs", n)
		}
		f.finish()
	})
}
