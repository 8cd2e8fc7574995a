package xtables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Variant is one of the two implementations of iptables: over nf_tables, or over the kernel's original interface.
type Variant string

// The variants, named as in --iptables-backend.
const (
	NFT    Variant = "nft"
	Legacy Variant = "legacy"
)

// lockWait is how long, in seconds, the legacy variant waits for another program to release the xtables lock. The nft
// variant has no lock.
const lockWait = 5

// A run of iptables-restore that takes longer than restoreTime, and lineTime for each line, hangs, and is ended; so is one of
// iptables-save that takes longer than saveTime, one of iptables that lists a chain, and one that is asked for its version and
// takes longer than versionTime. What they may take is many times what they need on a busy machine.
const (
	restoreTime = 30 * time.Second
	lineTime    = time.Millisecond
	saveTime    = time.Minute
	versionTime = 30 * time.Second
)

// Program runs the programs of iptables, of one variant and family, in the network namespace of the calling thread. It implements
// Kernel. Restore, Prepare and Close must not be called while one of them runs; all else may be called at any time.
type Program struct {
	Variant Variant
	Family  plan.Family
	// Path, RestorePath and SavePath are iptables, iptables-restore and iptables-save.
	Path, RestorePath, SavePath string
	version                     version
	// RandomFully is set where MASQUERADE has --random-fully.
	RandomFully bool
	children    children
	ahead       *restoring  // by Prepare; nil for none
	written     atomic.Bool // since a Watch has looked last
	// RestoreTime and SaveTime end a run of iptables-restore, besides a millisecond for each line of its input, and one that reads.
	// Find sets them to 30 seconds and a minute.
	RestoreTime, SaveTime time.Duration
	// OnNativeRules, if not nil, is called when a table comes to hold rules that iptables can't read, other ones, or none any more.
	OnNativeRules func(NativeRules)
	nativeMu      sync.Mutex
	// native are the chains with such rules of each table, as last reported.
	native map[names.Table][]string
}

// Find finds the programs of a variant and family. Where the programs with the variant's name are missing (some
// distributions have only one variant, under the plain name), the plain ones serve if they are of that variant.
func Find(v Variant, f plan.Family) (*Program, error) {
	base := BaseName(f)
	t := &Program{Variant: v, Family: f, RestoreTime: restoreTime, SaveTime: saveTime}
	main, err := lookPath(base + "-" + string(v))
	if err == nil {
		t.RestorePath, err = lookPath(base + "-" + string(v) + "-restore")
		if err == nil {
			t.SavePath, err = lookPath(base + "-" + string(v) + "-save")
		}
	}
	if err != nil {
		if main, err = plainTool(t, base); err != nil {
			return nil, err
		}
	}
	t.Path = main
	if t.version, err = askVersion(main, versionTime); err != nil {
		return nil, err
	}
	// go-iptables is here for one thing that it knows: since which version iptables has --random-fully. Rules are read and written by the
	// restore and save programs, with time limits, which it has not: it asks for the version once more, of a program that has just answered.
	ipt, err := goiptables.New(goiptables.IPFamily(protocol(f)), goiptables.Path(main), goiptables.Timeout(lockWait))
	if err != nil {
		return nil, fmt.Errorf("asking %s for its version: %w", main, err)
	}
	t.RandomFully = ipt.HasRandomFully()
	return t, nil
}

func protocol(f plan.Family) goiptables.Protocol {
	if f == plan.IPv6 {
		return goiptables.ProtocolIPv6
	}
	return goiptables.ProtocolIPv4
}

// plainTool finds the programs under their plain names, if they are of the tool's variant.
func plainTool(t *Program, base string) (string, error) {
	main, err := lookPath(base)
	if err != nil {
		return "", fmt.Errorf("neither %s-%s nor %s is installed (Debian package iptables)", base, t.Variant, base)
	}
	version, err := askVersion(main, versionTime)
	if err != nil {
		return "", err
	}
	if version.variant != t.Variant {
		return "", fmt.Errorf("%s is of the %s variant, and %s-%s is not installed", main, version.variant, base, t.Variant)
	}
	if t.RestorePath, err = lookPath(base + "-restore"); err != nil {
		return "", err
	}
	t.SavePath, err = lookPath(base + "-save")
	return main, err
}

// version is what a program of iptables says that it is.
type version struct {
	number  [3]int
	variant Variant
}

// versionText is such as "iptables v1.8.9 (nf_tables)".
var versionText = regexp.MustCompile(`v(\d+)\.(\d+)\.(\d+)`)

// askVersion runs a program with --version, and ends it after limit.
func askVersion(path string, limit time.Duration) (version, error) {
	out, err := output(path, limit, "--version")
	if err != nil {
		return version{}, fmt.Errorf("asking %s for its version: %w", path, err)
	}
	m := versionText.FindSubmatch(out)
	if m == nil {
		return version{}, fmt.Errorf("asking %s for its version: it says %q", path, oneLine(string(out)))
	}
	v := version{variant: Legacy}
	for i := range v.number {
		v.number[i], _ = strconv.Atoi(string(m[i+1])) // digits, as matched
	}
	if bytes.Contains(out, []byte("nf_tables")) {
		v.variant = NFT
	}
	return v, nil
}

// outputTime is how long the output of a program may go on after its end. What it has started may hold it open; and where processors are busy or
// limited, this program may take seconds to read what is there.
const outputTime = 10 * time.Second

// output runs a program that is to end within limit, and returns what it prints.
func output(path string, limit time.Duration, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = outputTime
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("it was ended, since it did not end by itself within %v", limit)
	}
	return out, err
}

// BaseName is the name of the program iptables for a family.
func BaseName(f plan.Family) string {
	if f == plan.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// lookPath finds a program in PATH or in the directories for administrators, which PATH may lack.
func lookPath(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not installed", name)
}

// Usable reports why the kernel can't do what this family needs, if so.
func (t *Program) Usable() error {
	args := []string{"-t", string(names.NAT), "-S", "POSTROUTING", "1"}
	if t.Variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	err := t.read(context.Background(), t.Path, "", discard, args...)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == 1 {
		return nil // The table is there; the chain may not be, or hold rules that are native to nft.
	}
	if isLocked(err) {
		return nil // The lock says nothing about the kernel, and what is written later waits for it.
	}
	if err != nil {
		return fmt.Errorf("%s can't use table nat: %w", BaseName(t.Family), err)
	}
	return nil
}

func discard(out io.Reader) error {
	_, err := io.Copy(io.Discard, out)
	return err
}

// Describe names the program for a log line.
func (t *Program) Describe() string {
	n := t.version.number
	return fmt.Sprintf("%s %d.%d.%d (%s)", BaseName(t.Family), n[0], n[1], n[2], t.Variant)
}
