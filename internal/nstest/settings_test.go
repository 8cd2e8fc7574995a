package nstest

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
)

// inGuest is set for the copy of this test program that runs on the test kernel.
const inGuest = "NODEPROXY_TEST_IN_GUEST"

// TestNothingIsInherited: whatever the settings of the first namespace are, a namespace for tests has those that it has on a
// machine with the kernel's defaults. It runs on the test kernel, whose first namespace is its own to change.
func TestNothingIsInherited(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the test kernel is for x86-64")
	}
	NeedKernel(t)
	if os.Getenv(inGuest) == "" {
		program, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.Command("../../e2e/kernel/run", program, "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inGuest+"=1", "NODEPROXY_KERNEL_GUEST=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("on the test kernel: %v\n%s", err, out)
		}
		return
	}
	fresh := newNamespace(t, func() error { return nil })
	reset := func() error {
		all, err := inherited()
		if err != nil {
			return err
		}
		return write(all, setting.toNormal)
	}
	if reset := newNamespace(t, reset); !maps.Equal(fresh, reset) {
		t.Errorf("a reset changes what the kernel has by default:\n%s", difference(fresh, reset))
	}
	most := 0
	// 0: IPv4 settings come from the first namespace. 1: those of IPv6 too. 2: none. 3: both from the maker's namespace.
	for _, inherit := range []string{"0", "1", "3"} {
		changeAll(t)
		require.NoError(t, os.WriteFile("/proc/sys/net/core/devconf_inherit_init_net", []byte(inherit), 0o644))
		dirty := newNamespace(t, func() error { return nil })
		most = max(most, len(strings.Split(difference(fresh, dirty), "\n")))
		if got := newNamespace(t, reset); !maps.Equal(fresh, got) {
			t.Errorf("with devconf_inherit_init_net=%s, a namespace for tests takes over:\n%s", inherit, difference(fresh, got))
		}
	}
	if most < 200 {
		t.Errorf("only %d settings were inherited without a reset, so this test has shown nothing", most)
	}
}

// TestHostileSettings: with hostile settings too, a namespace for tests has the kernel's defaults, and it did have others.
func TestHostileSettings(t *testing.T) {
	NeedKernel(t)
	if os.Getenv(Variable) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), Variable+"=hostile")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	worst := newNamespace(t, func() error { return write(settings, func(s setting) string { return cmp.Or(s.hostile, s.normal) }) })
	got := newNamespace(t, Reset)
	for _, s := range settings {
		value, there := got[s.path]
		if there && value != s.normal {
			t.Errorf("%s is %s, want %s", s.path, value, s.normal)
		}
		if there && s.hostile != "" && worst[s.path] == s.normal {
			t.Errorf("%s can't be made %s", s.path, s.hostile)
		}
	}
}

// exempt are settings that package nstest leaves as they are (see settings), and those of interfaces other than the loopback.
var exempt = regexp.MustCompile(`^core/|^ipv[46]/neigh/|^ipv[46]/conf/(tunl0|ip6tnl0|sit0|gre0)/` +
	`|^ipv4/tcp_([rw]mem|congestion_control|allowed_congestion_control)$|^netfilter/nf_conntrack_(max|buckets|expect_max|count)$` +
	`|^nf_conntrack_max$|^ipv6/conf/[^/]*/(mtu|mc_forwarding|stable_secret)$|^ipv4/(tcp|udp)_(child_)?e?hash_entries$`)

// newNamespace returns the settings of a new namespace after prepare.
func newNamespace(t *testing.T, prepare func() error) map[string]string {
	t.Helper()
	var out map[string]string
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, as in enter
		ns, err := netns.New()
		if err == nil {
			ns.Close()
			err = prepare()
		}
		if err == nil {
			out = read(t)
		}
		done <- err
	}()
	require.NoError(t, <-done)
	return out
}

// changeAll changes every setting of the first namespace that it can, and that package nstest does not leave alone.
func changeAll(t *testing.T) {
	t.Helper()
	changed := 0
	for path, value := range read(t) {
		n, err := strconv.Atoi(value)
		if err != nil {
			continue
		}
		for _, other := range []int{1 - n, n + 1, n - 1, n / 2} {
			if os.WriteFile(filepath.Join("/proc/sys/net", path), []byte(strconv.Itoa(other)), 0o644) == nil {
				changed++
				break
			}
		}
	}
	if changed < 300 {
		t.Fatalf("only %d settings could be changed", changed)
	}
}

// read returns the settings of the calling thread's namespace.
func read(t *testing.T) map[string]string {
	const dir = "/proc/sys/net"
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name := strings.TrimPrefix(path, dir+"/")
		if text, err := os.ReadFile(path); err == nil && !exempt.MatchString(name) {
			out[name] = strings.TrimSpace(string(text))
		}
		return nil
	})
	assert.NoError(t, err)
	return out
}

func difference(a, b map[string]string) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(a)) {
		if a[name] != b[name] {
			out = append(out, fmt.Sprintf("%s is %q, want %q", name, b[name], a[name]))
		}
	}
	return strings.Join(out, "\n")
}
