package conntrack

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Sysctls are the desired settings of the kernel's connection tracking. Zero leaves a setting unchanged.
type Sysctls struct {
	// MaxPerCore times the number of CPUs is the limit of tracked flows, but at least Min, and at most 1,048,576 unless Min is
	// more. A higher limit stays: with a lower one, new connections could fail. If MaxPerCore is zero, the limit stays, whatever
	// Min is.
	MaxPerCore, Min int
	// How long an idle connection is remembered. The kernel counts in whole seconds; fractions are rounded up.
	TCPEstablishedTimeout, TCPCloseWaitTimeout, UDPTimeout, UDPStreamTimeout time.Duration
	// TCPBeLiberal lets packets out of the TCP window pass.
	TCPBeLiberal bool
}

// mostByCores is the highest limit that depends on the number of CPUs: each flow takes some 300 bytes.
const mostByCores = 1 << 20

// flowsPerBucket is the average number of flows per bucket of the kernel's hash table.
const flowsPerBucket = 4

// limit returns the limit of tracked flows; 0 leaves it as it is.
func (s Sysctls) limit(cpus int) int {
	if s.MaxPerCore <= 0 {
		return 0
	}
	return max(min(s.MaxPerCore*cpus, mostByCores), s.Min)
}

// Unset is a setting that could not be made. Connections are tracked all the same, with the current value.
type Unset struct {
	// Key is the sysctl, such as net.netfilter.nf_conntrack_max, or the path of a module's parameter.
	Key string
	// Field is the field of KubeProxyConfiguration that asks for it.
	Field string
	// Wanted is the requested value, Actual the current one; "" if it can't be read.
	Wanted, Actual string
	// Err is the reason.
	Err error
}

func (u *Unset) Unwrap() error { return u.Err }

func (u *Unset) Error() string {
	return fmt.Sprintf("%s is %s, and can't be set to %s: %s", u.Key, cmp.Or(u.Actual, "not known"), u.Wanted, u.reason())
}

// reason explains the common errors.
func (u *Unset) reason() string {
	switch {
	case errors.Is(u.Err, fs.ErrNotExist):
		return "this kernel, or this network namespace, does not have it"
	case errors.Is(u.Err, syscall.EROFS):
		return "it is on a read-only file system, as in a container that is not privileged"
	case errors.Is(u.Err, fs.ErrPermission):
		return "permission denied; some can be set in the initial network namespace only, or need CAP_NET_ADMIN"
	case errors.Is(u.Err, syscall.EOPNOTSUPP):
		return "it can be set in the initial network namespace only"
	}
	return u.Err.Error()
}

// files are the directories of the settings.
type files struct{ proc, sys string }

// Apply makes the settings in the network namespace of the calling thread, and returns those that could not be made. Call it before
// rules are written, as some depend on nf_conntrack_tcp_be_liberal.
func (s Sysctls) Apply(sysctlDir string) []*Unset {
	f := files{filepath.Join(sysctlDir, "net/netfilter"), "/sys"}
	if _, err := os.Stat(f.max()); err != nil {
		loadModule()
	}
	return s.apply(f)
}

func (s Sysctls) apply(f files) []*Unset {
	var out []*Unset
	add := func(u *Unset) {
		if u != nil {
			out = append(out, u)
		}
	}
	if limit := s.limit(f.cpus()); limit > 0 {
		add(raise("conntrack.maxPerCore", limit, f.max()))
		add(raise("conntrack.maxPerCore", (limit+flowsPerBucket-1)/flowsPerBucket, f.hashSize()))
	}
	for _, t := range []struct {
		field, key string
		value      time.Duration
	}{
		{"conntrack.tcpEstablishedTimeout", "nf_conntrack_tcp_timeout_established", s.TCPEstablishedTimeout},
		{"conntrack.tcpCloseWaitTimeout", "nf_conntrack_tcp_timeout_close_wait", s.TCPCloseWaitTimeout},
		{"conntrack.udpTimeout", "nf_conntrack_udp_timeout", s.UDPTimeout},
		{"conntrack.udpStreamTimeout", "nf_conntrack_udp_timeout_stream", s.UDPStreamTimeout},
	} {
		if t.value > 0 {
			seconds := int((t.value + time.Second - 1) / time.Second)
			add(set(t.field, seconds, filepath.Join(f.proc, t.key)))
		}
	}
	if s.TCPBeLiberal {
		add(set("conntrack.tcpBeLiberal", 1, filepath.Join(f.proc, "nf_conntrack_tcp_be_liberal")))
	}
	return out
}

func (f files) max() string { return filepath.Join(f.proc, "nf_conntrack_max") }

func (f files) hashSize() string {
	return filepath.Join(f.sys, "module/nf_conntrack/parameters/hashsize")
}

// cpus returns the number of the machine's CPUs that are online. This process may be limited to fewer, but the whole machine's
// traffic is tracked.
func (f files) cpus() int {
	text, err := os.ReadFile(filepath.Join(f.sys, "devices/system/cpu/online"))
	if n := countCPUs(string(text)); err == nil && n > 0 {
		return n
	}
	return runtime.NumCPU()
}

// countCPUs counts the numbers in a list such as 0-3,8; 0 if it is none.
func countCPUs(list string) int {
	n := 0
	for _, part := range strings.Split(strings.TrimSpace(list), ",") {
		from, to, found := strings.Cut(part, "-")
		if !found {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || last < first {
			return 0
		}
		n += last - first + 1
	}
	return n
}

// raise is like set, but keeps a larger number.
func raise(field string, want int, path string) *Unset {
	if now, err := readNumber(path); err == nil && now >= want {
		return nil
	}
	return set(field, want, path)
}

// set writes a number, unless it is there already, and reads it back.
func set(field string, want int, path string) *Unset {
	now, err := readNumber(path)
	if err == nil && now == want {
		return nil
	}
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		err = os.WriteFile(path, []byte(strconv.Itoa(want)), 0)
	}
	now, readErr := readNumber(path)
	if err == nil && readErr == nil && now < want {
		err = errors.New("the kernel took another value")
	}
	if err == nil {
		return nil
	}
	u := &Unset{Key: name(path), Field: field, Wanted: strconv.Itoa(want), Err: err}
	if readErr == nil {
		u.Actual = strconv.Itoa(now)
	}
	return u
}

// name returns the usual name of the setting at a path.
func name(path string) string {
	if _, key, ok := strings.Cut(path, "/proc/sys/"); ok {
		return strings.ReplaceAll(key, "/", ".")
	}
	return path
}

func readNumber(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// Tracked returns how many flows the kernel tracks, and how many it tracks at most: the first packet of any more is dropped, if none can be
// forgotten instead. sysctlDir is as for Apply.
func Tracked(sysctlDir string) (flows, most int, err error) {
	f := files{proc: filepath.Join(sysctlDir, "net/netfilter")}
	if flows, err = readNumber(filepath.Join(f.proc, "nf_conntrack_count")); err == nil {
		most, err = readNumber(f.max())
	}
	return flows, most, err
}

// Forgets returns after how many seconds of silence the kernel forgets an established connection of TCP. sysctlDir is as for Apply.
func Forgets(sysctlDir string) (seconds int, err error) {
	return readNumber(filepath.Join(sysctlDir, "net/netfilter/nf_conntrack_tcp_timeout_established"))
}

// loadModule makes the kernel load connection tracking, by a netlink request to it. The settings exist if that has worked.
func loadModule() {
	if c, err := Dial(); err == nil {
		_, _ = c.Ask(netlink.Message{Type: msgStats, Body: appendHeader(nil, plan.IPv4)})
		_ = c.Close()
	}
}

// TCPLiberal reports whether TCP packets outside of the window of their connection are valid
// (net.netfilter.nf_conntrack_tcp_be_liberal); false where that can't be read.
func TCPLiberal() bool {
	raw, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	value := strings.TrimSpace(string(raw))
	return err == nil && value != "" && value != "0"
}
