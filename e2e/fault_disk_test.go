package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// The file systems of a daemon with fullDisks. The manifests are in the first, with the lock of iptables.
const (
	fullRun, fullTmp = "/run", "/tmp"
	fullManifests    = fullRun + "/manifests"
)

// fullDisks gives daemons small file systems of their own in place of /run and /tmp.
func (f *faultScene) fullDisks() {
	f.Launch = func(path string, args ...string) *exec.Cmd {
		script := "mount -t tmpfs -o size=256k,nr_inodes=40 tmpfs " + fullRun + "\n" +
			"mkdir " + fullManifests + "\n" +
			"cp " + f.Manifests + "/*.yaml " + fullManifests + "\n" +
			"exec 3<\"$1\"\nshift\n" + // The program may be in /tmp.
			"mount -t tmpfs -o size=64k,nr_inodes=10 tmpfs " + fullTmp + "\n" +
			"exec /proc/self/fd/3 \"$@\""
		return exec.Command("unshare", append([]string{"--mount", "--propagation=private", "sh", "-e", "-c", script, "sh", path}, args...)...)
	}
	f.flags = append(f.flags, "--manifests="+fullManifests)
}

// fill takes all the room there is in a file system of the daemon's: for bytes, and for files.
func (f *faultScene) fill(dir string) {
	f.Helper()
	filler, err := os.Create(f.seen(filepath.Join(dir, "filler")))
	require.NoError(f, err)
	defer filler.Close()
	for err == nil {
		_, err = filler.Write(make([]byte, 4096))
	}
	for i := 0; errors.Is(err, syscall.ENOSPC); i++ {
		if err = os.WriteFile(f.seen(filepath.Join(dir, fmt.Sprint("filler-", i))), nil, 0o644); err != nil {
			return
		}
		err = syscall.ENOSPC
	}
	f.Fatal(err)
}

// empty makes room again.
func (f *faultScene) empty(dir string) {
	f.Helper()
	files, err := filepath.Glob(f.seen(filepath.Join(dir, "filler*")))
	for _, file := range files {
		err = errors.Join(err, os.Remove(file))
	}
	require.NoError(f, err)
}

// TestFaultDiskFull: file systems have no room for a byte or a file more: /run, with the lock of iptables and the manifests, and
// /tmp. Then there is room again.
func TestFaultDiskFull(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "disk full", "no room for a byte or a file in /run, with lock and manifests, and in /tmp")
		f.fullDisks()
		f.start()
		line := len(f.daemon.Log())
		if err := os.Remove(f.seen("/run/xtables.lock")); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		f.fill(fullRun)
		f.fill(fullTmp)
		f.configNotWritten()
		// What an editor leaves that finds no room in the middle of a word: a part of a file.
		changed := harness.YAML(t, harness.Objects(harness.Service("changing", changing), f.Ready("n2a")...)...)
		internal := harness.YAML(t, harness.Objects(harness.Service("internal", 5, harness.ClusterOnly), f.Ready("n3a")...)...)
		write := func(file, text string) error {
			return os.WriteFile(f.seen(filepath.Join(fullManifests, file)), []byte(text), 0o644)
		}
		require.NoError(t, write("changing.yaml", changed[:strings.Index(changed, "addressType:")+5]))
		if err := write("more.yaml", changed); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("there is room in the directory of manifests: %v", err)
		}
		f.log(line, "level=WARN", "changing.yaml")
		// Another Service changes, and the legacy variant can't make its lock.
		require.NoError(t, write("internal.yaml", internal))
		if variant == harness.Legacy && mode == harness.IPTables {
			f.log(line, "sync failed", "xtables.lock")
		}
		time.Sleep(2 * time.Second) // The disk stays full for a while, in which nothing is to change.
		for _, family := range families {
			if err := serversOf(f.Client, "tcp", clusterIP(changing, family), "n1a"); err != nil {
				t.Errorf("the last version that could be read is no longer in force: %v", err)
			}
		}
		f.empty(fullRun)
		f.empty(fullTmp)
		require.NoError(t, write("changing.yaml", changed))
		end := time.Now()
		f.inForce("n2a")
		for _, family := range families {
			eventually(t, "the other Service", func() error { return serversOf(f.Client, "tcp", clusterIP(5, family), "n3a") })
		}
		f.repairs = append(f.repairs, time.Since(end))
		// The other node's daemon reads what this one has read.
		for file, text := range map[string]string{"changing.yaml": changed, "internal.yaml": internal} {
			f.WriteText(t, file, text)
		}
		f.flags = append(f.flags, "--manifests="+f.Manifests)
		f.finish()
	})
}

// configNotWritten: --write-config-to finds no room, says so, and leaves nothing that could be taken for a configuration.
func (f *faultScene) configNotWritten() {
	f.Helper()
	path, err := harness.Binary()
	require.NoError(f, err)
	file := f.seen(filepath.Join(fullTmp, "config.yaml"))
	out, err := exec.Command(path, "run", "--write-config-to="+file).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no space left on device") {
		f.Errorf("--write-config-to on a full disk: %v: %s", err, out)
	}
	if left, err := os.ReadFile(file); err == nil {
		f.Errorf("--write-config-to on a full disk leaves %q", left)
	}
}
