package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/drift"
)

// sysctl is a kernel setting of this network namespace.
type sysctl struct {
	name, value string
	// required is set if forwarding can't work without it.
	required bool
}

// sysctls returns the settings for a kernel version.
func sysctls(strictARP bool, major, minor int) []sysctl {
	out := []sysctl{
		// Without it, what IPVS translates can't be masqueraded.
		{"net/ipv4/vs/conntrack", "1", true},
		{"net/ipv4/ip_forward", "1", true},
		// A connection to a removed real server is dropped at its next packet, so that its client notices.
		{"net/ipv4/vs/expire_nodest_conn", "1", false},
		// A client with affinity to a draining real server gets another one.
		{"net/ipv4/vs/expire_quiescent_template", "1", false},
	}
	// From Linux 4.1 to 5.8, a client that reuses a port waits for a second if this is 1; from 5.9 on, 1 makes such a connection be
	// scheduled again (kubernetes issue 93297).
	if before59 := major < 5 || major == 5 && minor < 9; before59 && (major > 4 || major == 4 && minor >= 1) {
		out = append(out, sysctl{"net/ipv4/vs/conn_reuse_mode", "0", false})
	}
	if strictARP {
		out = append(out, sysctl{"net/ipv4/conf/all/arp_ignore", "1", false}, sysctl{"net/ipv4/conf/all/arp_announce", "2", false})
	}
	return out
}

// sysctlsHere returns the settings for this kernel.
func sysctlsHere(cfg Config) ([]sysctl, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("asking for the kernel's version: %w", err)
	}
	var major, minor int
	release := unix.ByteSliceToString(name.Release[:])
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return nil, fmt.Errorf("the kernel's version %q can't be parsed: %w", release, err)
	}
	return sysctls(cfg.StrictARP, major, minor), nil
}

// setSysctls sets them, and returns those that are set; with dry, it only finds out whether it could. A setting that can't be written
// and has the wrong value is an error if nothing works without it, else a warning.
func setSysctls(cfg Config, dry bool) (done []sysctl, err error) {
	list, err := sysctlsHere(cfg)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, s := range list {
		switch err := s.set(cfg.sysctlDir(), dry); {
		case err == nil:
			done = append(done, s)
		case s.required:
			errs = append(errs, err)
		default:
			cfg.Log.Warn("a kernel setting for mode ipvs can't be set", "error", err)
		}
	}
	return done, errors.Join(errs...)
}

func (cfg *Config) sysctlDir() string { return cmp.Or(cfg.SysctlDir, "/proc/sys") }

// sysctlKeeper restores settings that another program has changed. The zero value keeps none.
type sysctlKeeper struct {
	list   []sysctl
	dir    string
	log    *slog.Logger
	warned map[string]bool // the settings whose failure was logged; they are retried
}

// differs returns the name of a setting with another value; "" for none.
func (k *sysctlKeeper) differs() string {
	for _, s := range k.list {
		if _, is := s.read(k.dir); !is && !k.warned[s.name] {
			return s.dotted()
		}
	}
	return ""
}

// repair restores settings, and adds the changed ones to found. A failure is logged once, until the setting is right again: no
// Service benefits from a sync that fails.
func (k *sysctlKeeper) repair() drift.Found {
	var found drift.Found
	for _, s := range k.list {
		have, is := s.read(k.dir)
		if is {
			delete(k.warned, s.name)
			continue
		}
		err := s.set(k.dir, false)
		if err == nil {
			found = append(found, drift.Difference{Kind: drift.Sysctl, State: drift.Changed, Object: s.dotted(), Want: s.value, Have: have})
		} else if !k.warned[s.name] {
			k.warned[s.name] = true
			k.log.Error("another program has changed a kernel setting that mode ipvs needs, and it can't be set back; Services may not work",
				"error", err)
		}
	}
	return found
}

// dotted returns the name in its usual form.
func (s sysctl) dotted() string { return strings.ReplaceAll(s.name, "/", ".") }

// read returns the current value, if it can be read, and whether it is right.
func (s sysctl) read(dir string) (have string, is bool) {
	text, err := os.ReadFile(filepath.Join(dir, s.name))
	have = strings.TrimSpace(string(text))
	return have, err == nil && have == s.value
}

func (s sysctl) set(dir string, dry bool) error {
	have, is := s.read(dir)
	if is {
		return nil
	}
	file, err := os.OpenFile(filepath.Join(dir, s.name), os.O_WRONLY, 0)
	if err == nil {
		if !dry {
			_, err = file.WriteString(s.value + "\n")
		}
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		return fmt.Errorf("setting %s to %s (it is %q): %w", s.dotted(), s.value, have, err)
	}
	return nil
}
