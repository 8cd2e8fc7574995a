package iptables

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
	"strings"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"nodeproxy/proxier/plan"
)

// Variant is one of the two implementations of iptables: over nf_tables, or over the kernel's original interface.
type Variant string

// The variants, named as in --iptables-backend. Auto is the one whose tables hold rules already.
const (
	Auto   Variant = "auto"
	NFT    Variant = "nft"
	Legacy Variant = "legacy"
)

// lockWait is how long, in seconds, the legacy variant waits for another program to release the xtables lock. The nft
// variant has no lock.
const lockWait = 5

// A run of iptables-restore that takes longer than restoreTime, and lineTime for each line, hangs, and is ended; so is one of
// iptables-save that takes longer than saveTime, and one of iptables that lists a chain. What they may take is many times what
// they need on a busy machine.
const (
	restoreTime = 30 * time.Second
	lineTime    = time.Millisecond
	saveTime    = time.Minute
)

// tool runs the iptables programs of one variant and family.
type tool struct {
	variant Variant
	family  plan.Family
	// path, restorePath and savePath are iptables, iptables-restore and iptables-save.
	path, restorePath, savePath string
	ipt                         *goiptables.IPTables
	children                    children
	// restoreTime and saveTime are as the constants; tests have less.
	restoreTime, saveTime time.Duration
}

// newTool finds the programs of a variant and family. Where the programs with the variant's name are missing (some
// distributions have only one variant, under the plain name), the plain ones serve if they are of that variant.
func newTool(v Variant, f plan.Family) (*tool, error) {
	base := baseName(f)
	t := &tool{variant: v, family: f, restoreTime: restoreTime, saveTime: saveTime}
	main, err := lookPath(base + "-" + string(v))
	if err == nil {
		t.restorePath, err = lookPath(base + "-" + string(v) + "-restore")
		if err == nil {
			t.savePath, err = lookPath(base + "-" + string(v) + "-save")
		}
	}
	if err != nil {
		if main, err = plainTool(t, base); err != nil {
			return nil, err
		}
	}
	t.path = main
	protocol := goiptables.ProtocolIPv4
	if f == plan.IPv6 {
		protocol = goiptables.ProtocolIPv6
	}
	t.ipt, err = goiptables.New(goiptables.IPFamily(protocol), goiptables.Path(main), goiptables.Timeout(lockWait))
	if err != nil {
		return nil, fmt.Errorf("asking %s for its version: %w", main, err)
	}
	return t, nil
}

func plainTool(t *tool, base string) (string, error) {
	main, err := lookPath(base)
	if err != nil {
		return "", fmt.Errorf("neither %s-%s nor %s is installed (Debian package iptables)", base, t.variant, base)
	}
	version, err := exec.Command(main, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("asking %s for its version: %w", main, err)
	}
	is := Legacy
	if bytes.Contains(version, []byte("nf_tables")) {
		is = NFT
	}
	if is != t.variant {
		return "", fmt.Errorf("%s is of the %s variant, and %s-%s is not installed", main, is, base, t.variant)
	}
	if t.restorePath, err = lookPath(base + "-restore"); err != nil {
		return "", err
	}
	t.savePath, err = lookPath(base + "-save")
	return main, err
}

func baseName(f plan.Family) string {
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

// Detect says which variant to use where the configuration leaves it open: the one that holds the kubelet's hint chains,
// or else more rules, as the iptables-wrappers of Kubernetes decide; nft on a node without rules.
func Detect() Variant {
	nftHint, legacyText := "", ""
	for _, f := range plan.Families {
		nftHint += saved(baseName(f)+"-nft-save", "-t", "mangle")
		// Legacy programs must not be asked for a single table: they would create it.
		legacyText += saved(baseName(f) + "-legacy-save")
	}
	if hinted(nftHint) {
		return NFT
	}
	if hinted(legacyText) {
		return Legacy
	}
	if n := countRules(legacyText); n > 0 {
		nftText := ""
		for _, f := range plan.Families {
			nftText += saved(baseName(f) + "-nft-save")
		}
		if n > countRules(nftText) {
			return Legacy
		}
	}
	if _, err := lookPath("iptables-nft-restore"); err != nil {
		if version, err := exec.Command("iptables", "--version").Output(); err == nil &&
			!bytes.Contains(version, []byte("nf_tables")) {
			return Legacy
		}
	}
	return NFT
}

// saved returns the output of a save program; nothing where it is missing or fails, as it does where the kernel lacks what
// it needs.
func saved(name string, args ...string) string {
	path, err := lookPath(name)
	if err != nil {
		return ""
	}
	out, _ := exec.Command(path, args...).Output() // A variant that can't be asked holds no rules of anybody.
	return string(out)
}

var hintChain = regexp.MustCompile(`(?m)^:(KUBE-IPTABLES-HINT|KUBE-KUBELET-CANARY) `)

func hinted(saved string) bool { return hintChain.MatchString(saved) }

func countRules(saved string) int { return strings.Count(saved, "\n-") }

// save reads a table from the kernel.
func (t *tool) save(ctx context.Context, tbl table) (kernelTable, error) {
	limited, cancel := context.WithTimeout(ctx, t.saveTime)
	defer cancel()
	cmd := exec.CommandContext(limited, t.savePath, "-t", string(tbl))
	cmd.WaitDelay = time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("running %s: %w", t.savePath, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("running %s: %w", t.savePath, err)
	}
	parsed, parseErr := parseSave(out)
	if parseErr != nil {
		io.Copy(io.Discard, out) // lets the program end
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() == nil && limited.Err() != nil {
			return nil, fmt.Errorf("reading table %s by %s: it was ended, since it did not end by itself within %v",
				tbl, t.savePath, t.saveTime)
		}
		return nil, fmt.Errorf("reading table %s by %s: %w: %s", tbl, t.savePath, err, oneLine(stderr.String()))
	}
	return parsed, parseErr
}

// restore applies text. The end of the daemon does not interrupt it once it has begun: a table changes as a whole or not at
// all, but a program that is killed between two tables helps nobody. Only one that hangs is ended; then what the kernel holds
// is not known, as after any error.
func (t *tool) restore(text string) error {
	args := []string{"--noflush", "--counters"}
	if t.variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	limit := t.restoreTime + time.Duration(strings.Count(text, "\n"))*lineTime
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, t.restorePath, args...)
	cmd.WaitDelay = time.Second // for what it has started, which may hold its output open
	cmd.Stdin = strings.NewReader(text)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := t.children.run(cmd)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil { // This tells nothing about the input, so it is no RestoreError.
		return fmt.Errorf("%s was ended, since it did not end by itself within %v: %s", t.restorePath, limit, oneLine(out.String()))
	}
	return &RestoreError{Program: t.restorePath, Message: oneLine(out.String()), Excerpt: excerpt(text, out.String()), Err: err}
}

// RestoreError tells of input that iptables-restore refused.
type RestoreError struct {
	Program string
	// Message is what the program said.
	Message string
	// Excerpt is the refused line with those around it, numbered; empty where the program did not name one.
	Excerpt string
	Err     error
}

func (e *RestoreError) Error() string {
	s := fmt.Sprintf("%s: %v: %s", e.Program, e.Err, e.Message)
	if e.Excerpt != "" {
		s += "\n" + e.Excerpt
	}
	return s
}

func (e *RestoreError) Unwrap() error { return e.Err }

// The ways in which the variants name the line.
var failedLine = regexp.MustCompile(`(?m)(?:Error occurred at line: |^line |: line )(\d+)`)

// excerpt cuts the line that a message names out of the input, with three lines before and after it.
func excerpt(input, message string) string {
	m := failedLine.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	n, err := strconv.Atoi(m[1])
	lines := strings.Split(input, "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	var b strings.Builder
	for i := max(1, n-3); i <= min(len(lines), n+3); i++ {
		mark := "  "
		if i == n {
			mark = "> "
		}
		fmt.Fprintf(&b, "%s%d: %s\n", mark, i, lines[i-1])
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// oneLine makes a program's message fit into a log line. Hints about --help help nobody here.
func oneLine(s string) string {
	var out []string
	for _, line := range strings.Split(s, "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "Try `") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "; ")
}

// usable reports why the kernel can't do what this family needs, if so.
func (t *tool) usable() error {
	if _, err := t.ipt.ChainExists(string(tableNAT), "POSTROUTING"); err != nil {
		return fmt.Errorf("%s can't use table nat: %w", baseName(t.family), err)
	}
	return nil
}

// describe names the program for a log line.
func (t *tool) describe() string {
	v1, v2, v3 := t.ipt.GetIptablesVersion()
	return fmt.Sprintf("%s %d.%d.%d (%s)", baseName(t.family), v1, v2, v3, t.variant)
}

// errRefused recognises that iptables-restore, or the kernel, does not take some input, whenever it is tried.
func errRefused(err error) bool {
	var refused *RestoreError
	return errors.As(err, &refused) && !errLocked(err)
}

// errLocked recognises a lock that another program did not release in time, after which a retry soon makes sense.
func errLocked(err error) bool {
	var re *RestoreError
	return errors.As(err, &re) && strings.Contains(re.Message, "xtables lock")
}
