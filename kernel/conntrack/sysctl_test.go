package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

func TestLimit(t *testing.T) {
	for _, c := range []struct{ perCore, min, cpus, want int }{
		{32768, 131072, 2, 131072}, {32768, 131072, 4, 131072}, {32768, 131072, 8, 262144}, {32768, 131072, 64, 1048576},
		{32768, 0, 1, 32768}, {0, 131072, 8, 0}, {32768, 2000000, 2, 2000000},
	} {
		s := Sysctls{MaxPerCore: c.perCore, Min: c.min}
		if got := s.limit(c.cpus); got != c.want {
			t.Errorf("%d per core, at least %d, %d CPUs: %d, want %d", c.perCore, c.min, c.cpus, got, c.want)
		}
	}
}

func TestCountCPUs(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-1\n": 2, "0-3,8,10-11": 7, "": 0, "x": 0, "3-1": 0} {
		if got := countCPUs(list); got != want {
			t.Errorf("%q: %d, want %d", list, got, want)
		}
	}
}

// fakeFiles makes a tree of settings, with 4 CPUs.
func fakeFiles(t *testing.T, values map[string]string) files {
	t.Helper()
	dir := t.TempDir()
	f := files{filepath.Join(dir, "proc/sys/net/netfilter"), filepath.Join(dir, "sys")}
	values["../../../../sys/devices/system/cpu/online"] = "0-3\n"
	for key, value := range values {
		path := filepath.Join(f.proc, key)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(value), 0o644))
	}
	return f
}

const hashSizeKey = "../../../../sys/module/nf_conntrack/parameters/hashsize"

var wholeSysctls = Sysctls{MaxPerCore: 1000, Min: 100, TCPEstablishedTimeout: time.Hour, TCPCloseWaitTimeout: time.Minute,
	UDPTimeout: 1500 * time.Millisecond, UDPStreamTimeout: 3 * time.Second, TCPBeLiberal: true}

func TestSysctlsAreSet(t *testing.T) {
	f := fakeFiles(t, map[string]string{
		"nf_conntrack_max": "3999\n", hashSizeKey: "999", "nf_conntrack_tcp_timeout_established": "432000\n",
		"nf_conntrack_tcp_timeout_close_wait": "60\n", "nf_conntrack_udp_timeout": "30\n",
		"nf_conntrack_udp_timeout_stream": "1\n", "nf_conntrack_tcp_be_liberal": "0\n",
	})
	for _, u := range wholeSysctls.apply(f) {
		t.Error(u)
	}
	for key, want := range map[string]int{
		"nf_conntrack_max": 4000, hashSizeKey: 1000, "nf_conntrack_tcp_timeout_established": 3600,
		"nf_conntrack_tcp_timeout_close_wait": 60, "nf_conntrack_udp_timeout": 2,
		"nf_conntrack_udp_timeout_stream": 3, "nf_conntrack_tcp_be_liberal": 1,
	} {
		if got, err := readNumber(filepath.Join(f.proc, key)); err != nil || got != want {
			t.Errorf("%s is %d (%v), want %d", key, got, err, want)
		}
	}
}

func TestSysctlsAreLeft(t *testing.T) {
	f := fakeFiles(t, map[string]string{"nf_conntrack_max": "4001\n", hashSizeKey: "1001"})
	for _, u := range (Sysctls{MaxPerCore: 1000}).apply(f) {
		t.Error(u)
	}
	for _, u := range (Sysctls{Min: 1 << 30}).apply(files{"/nowhere", "/nowhere"}) {
		t.Errorf("nothing was asked for: %v", u)
	}
	for key, want := range map[string]int{"nf_conntrack_max": 4001, hashSizeKey: 1001} {
		if got, err := readNumber(filepath.Join(f.proc, key)); err != nil || got != want {
			t.Errorf("%s is %d (%v), want %d: a limit is raised only", key, got, err, want)
		}
	}
}

func TestMissingSysctls(t *testing.T) {
	f := fakeFiles(t, map[string]string{"nf_conntrack_max": "1"})
	var keys []string
	for _, u := range wholeSysctls.apply(f) {
		if !errors.Is(u, fs.ErrNotExist) || u.Actual != "" || !strings.Contains(u.Error(), "does not have it") {
			t.Errorf("%v (actual %q)", u, u.Actual)
		}
		keys = append(keys, filepath.Base(u.Key)+" "+u.Wanted+" "+u.Field)
	}
	want := []string{
		"hashsize 1000 conntrack.maxPerCore",
		"net.netfilter.nf_conntrack_tcp_timeout_established 3600 conntrack.tcpEstablishedTimeout",
		"net.netfilter.nf_conntrack_tcp_timeout_close_wait 60 conntrack.tcpCloseWaitTimeout",
		"net.netfilter.nf_conntrack_udp_timeout 2 conntrack.udpTimeout",
		"net.netfilter.nf_conntrack_udp_timeout_stream 3 conntrack.udpStreamTimeout",
		"net.netfilter.nf_conntrack_tcp_be_liberal 1 conntrack.tcpBeLiberal",
	}
	if got := strings.Join(keys, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
	if _, err := os.Stat(filepath.Join(f.proc, "nf_conntrack_udp_timeout")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a key that the kernel does not have was made: %v", err)
	}
}

// TestSysctlsOfNamespace: in a network namespace of its own, the timeouts can be set; the limit is the machine's, and that
// it can't be set there is said.
func TestSysctlsOfNamespace(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		f := files{"/proc/sys/net/netfilter", "/sys"} // which shows the settings of the reader's namespace
		machine, err := readNumber(f.max())
		require.NoError(t, err)
		s := wholeSysctls
		s.MaxPerCore, s.Min = 1, machine+1
		found := s.Apply("/proc/sys")
		if len(found) == 0 || found[0].Key != "net.netfilter.nf_conntrack_max" {
			t.Fatalf("the limit is not said to be unset: %v", found)
		}
		u := found[0]
		if u.Wanted != strconv.Itoa(machine+1) || u.Actual != strconv.Itoa(machine) || !errors.Is(u, fs.ErrPermission) {
			t.Errorf("%#v", u)
		}
		for _, u := range found[1:] {
			if u.Field != "conntrack.maxPerCore" {
				t.Error(u)
			}
		}
		for key, want := range map[string]int{"nf_conntrack_tcp_timeout_established": 3600, "nf_conntrack_udp_timeout": 2,
			"nf_conntrack_udp_timeout_stream": 3, "nf_conntrack_tcp_timeout_close_wait": 60, "nf_conntrack_tcp_be_liberal": 1} {
			if got, err := readNumber(filepath.Join(f.proc, key)); err != nil || got != want {
				t.Errorf("%s is %d (%v), want %d", key, got, err, want)
			}
		}
		s.MaxPerCore, s.Min = 1, machine
		if found := s.Apply("/proc/sys"); len(found) != 0 {
			t.Errorf("everything is as wanted, but: %v", found)
		}
	})
}

// TestReadOnlySysctls: a read-only /proc/sys, as containers have it, is named as the reason.
func TestReadOnlySysctls(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		require.NoError(t, syscall.Unshare(syscall.CLONE_NEWNS|syscall.CLONE_FS))
		const bind, remount = syscall.MS_BIND, syscall.MS_BIND | syscall.MS_REMOUNT | syscall.MS_RDONLY
		for _, m := range []struct {
			source, target string
			flags          uintptr
		}{{"", "/", syscall.MS_REC | syscall.MS_PRIVATE}, {"/proc/sys", "/proc/sys", bind}, {"", "/proc/sys", remount}} {
			require.NoError(t, syscall.Mount(m.source, m.target, "", m.flags, ""), "mount %+v", m)
		}
		found := Sysctls{UDPTimeout: 7 * time.Second}.Apply("/proc/sys")
		if len(found) != 1 || !errors.Is(found[0], syscall.EROFS) || found[0].Actual == "" || found[0].Wanted != "7" ||
			found[0].Field != "conntrack.udpTimeout" || !strings.Contains(found[0].Error(), "read-only file system") {
			t.Errorf("%v", found)
		}
	})
}

func TestUnsetReasons(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{syscall.EOPNOTSUPP, "k is 1, and can't be set to 2: it can be set in the initial network namespace only"},
		{syscall.EIO, "k is 1, and can't be set to 2: input/output error"},
	} {
		u := &Unset{Key: "k", Wanted: "2", Actual: "1", Err: fmt.Errorf("%w", c.err)}
		if got := u.Error(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	if n := (files{"", "/nowhere"}).cpus(); n != runtime.NumCPU() {
		t.Errorf("%d CPUs where the list can't be read, want %d", n, runtime.NumCPU())
	}
}
