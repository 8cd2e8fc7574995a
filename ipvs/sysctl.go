package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctl is a kernel setting of this network namespace.
type sysctl struct {
	name, value string
	// required is set where forwarding can't work without it.
	required bool
}

// sysctls are the settings for a kernel version.
func sysctls(strictARP bool, major, minor int) []sysctl {
	out := []sysctl{
		// Without it, what IPVS translates can't be masqueraded.
		{"net/ipv4/vs/conntrack", "1", true},
		{"net/ipv4/ip_forward", "1", true},
		// A connection to a real server that is gone is forgotten at its next packet, so that its client learns of it.
		{"net/ipv4/vs/expire_nodest_conn", "1", false},
		// A client with affinity to a real server that drains gets another one.
		{"net/ipv4/vs/expire_quiescent_template", "1", false},
	}
	// From 4.1 to 5.8, a client that uses a port again waits for a second if this is 1; from 5.9 on, it is what lets such a
	// connection be balanced anew (kubernetes issue 93297).
	if before59 := major < 5 || major == 5 && minor < 9; before59 && (major > 4 || major == 4 && minor >= 1) {
		out = append(out, sysctl{"net/ipv4/vs/conn_reuse_mode", "0", false})
	}
	if strictARP {
		out = append(out, sysctl{"net/ipv4/conf/all/arp_ignore", "1", false}, sysctl{"net/ipv4/conf/all/arp_announce", "2", false})
	}
	return out
}

// setSysctls makes the settings; with dry, it only finds out whether it could. One that can't be written, and is not as it should
// be, is an error if nothing works without it, else a warning.
func setSysctls(cfg Config, dry bool) error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("asking for the kernel's version: %w", err)
	}
	var major, minor int
	release := unix.ByteSliceToString(name.Release[:])
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("the kernel's version %q is not understood: %w", release, err)
	}
	var errs []error
	for _, s := range sysctls(cfg.StrictARP, major, minor) {
		switch err := s.set(cmp.Or(cfg.SysctlDir, "/proc/sys"), dry); {
		case err != nil && s.required:
			errs = append(errs, err)
		case err != nil:
			cfg.Log.Warn("a kernel setting for mode ipvs can't be made", "error", err)
		}
	}
	return errors.Join(errs...)
}

// tcpLiberal reports whether conntrack lets TCP packets outside of the window pass (net.netfilter.nf_conntrack_tcp_be_liberal).
func tcpLiberal() bool {
	value, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	return err == nil && strings.TrimSpace(string(value)) != "0"
}

func (s sysctl) set(dir string, dry bool) error {
	path := filepath.Join(dir, s.name)
	have, err := os.ReadFile(path)
	if err == nil && strings.TrimSpace(string(have)) == s.value {
		return nil
	}
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		if !dry {
			_, err = file.WriteString(s.value + "\n")
		}
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		return fmt.Errorf("setting %s to %s (it is %q): %w", strings.ReplaceAll(s.name, "/", "."), s.value,
			strings.TrimSpace(string(have)), err)
	}
	return nil
}
