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
	"slices"
	"strconv"
	"strings"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
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
// iptables-save that takes longer than saveTime, one of iptables that lists a chain, and one that is asked for its version and
// takes longer than versionTime. What they may take is many times what they need on a busy machine.
const (
	restoreTime = 30 * time.Second
	lineTime    = time.Millisecond
	saveTime    = time.Minute
	versionTime = 30 * time.Second
)

// tool runs the iptables programs of one variant and family.
type Program struct {
	Variant Variant
	Family  plan.Family
	// path, restorePath and savePath are iptables, iptables-restore and iptables-save.
	Path, RestorePath, SavePath string
	version                     programVersion
	RandomFully                 bool // whether MASQUERADE has --random-fully
	children                    children
	// restoreTime and saveTime are as the constants; tests have less.
	RestoreTime, SaveTime time.Duration
	// native is told of tables with native rules; nil for nobody.
	OnNativeRules func(NativeRules)
	// told are the chains of each table that it was told of last. Only save and restore use it.
	told map[names.Table][]string
}

// newTool finds the programs of a variant and family. Where the programs with the variant's name are missing (some
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
	if t.version, err = AskVersion(main, versionTime); err != nil {
		return nil, err
	}
	// This asks the program for its version once more, without a time limit: it has just been seen to answer.
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
	version, err := AskVersion(main, versionTime)
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

// programVersion is what iptables says of itself.
type programVersion struct {
	number  [3]int
	variant Variant
}

// versionText is such as "iptables v1.8.9 (nf_tables)".
var versionText = regexp.MustCompile(`v(\d+)\.(\d+)\.(\d+)`)

// askVersion runs a program with --version, and ends it after limit.
func AskVersion(path string, limit time.Duration) (programVersion, error) {
	out, err := output(path, limit, "--version")
	if err != nil {
		return programVersion{}, fmt.Errorf("asking %s for its version: %w", path, err)
	}
	m := versionText.FindSubmatch(out)
	if m == nil {
		return programVersion{}, fmt.Errorf("asking %s for its version: it says %q", path, OneLine(string(out)))
	}
	v := programVersion{variant: Legacy}
	for i := range v.number {
		v.number[i], _ = strconv.Atoi(string(m[i+1])) // digits, as matched
	}
	if bytes.Contains(out, []byte("nf_tables")) {
		v.variant = NFT
	}
	return v, nil
}

// output runs a program that is to end within limit, and returns what it prints.
func output(path string, limit time.Duration, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("it was ended, since it did not end by itself within %v", limit)
	}
	return out, err
}

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

// Detect says which variant to use where the configuration leaves it open: the one that holds the kubelet's hint chains,
// or else more rules, as the iptables-wrappers of Kubernetes decide; nft on a node without rules.
func Detect() Variant {
	if nftHinted() {
		return NFT
	}
	legacyText := ""
	for _, f := range plan.Families {
		// Legacy programs must not be asked for a single table: they would create it.
		legacyText += saved(BaseName(f) + "-legacy-save")
	}
	if hintChain.MatchString(legacyText) {
		return Legacy
	}
	if n := strings.Count(legacyText, "\n-"); n > 0 && n > nftRuleCount() {
		return Legacy
	}
	if _, err := lookPath("iptables-nft-restore"); err != nil {
		if v, err := AskVersion("iptables", versionTime); err == nil && v.variant == Legacy {
			return Legacy
		}
	}
	return NFT
}

// saved returns the output of a save program; nothing where it is missing or fails, as it does where the kernel lacks what
// it needs.
func saved(name string) string {
	path, err := lookPath(name)
	if err != nil {
		return ""
	}
	out, _ := output(path, saveTime) // A variant that can't be asked holds no rules of anybody.
	return string(out)
}

var hintChain = regexp.MustCompile(`(?m)^:(` + names.KubeletHint + `|` + names.KubeletCanary + `) `)

// nftHinted reports whether table mangle of the nft variant has such a chain. The kernel is asked, not iptables-save, which prints
// nothing of a table with rules that are native to nft.
func nftHinted() bool {
	for _, f := range plan.Families {
		chains, _ := NFTChains(f, names.Mangle) // A kernel without nf_tables has none.
		if slices.Contains(chains, names.KubeletHint) || slices.Contains(chains, names.KubeletCanary) {
			return true
		}
	}
	return false
}

// nftRuleCount is how many rules the tables of the nft variant hold.
func nftRuleCount() int {
	n := 0
	for _, f := range plan.Families {
		for _, t := range []names.Table{names.Filter, names.NAT, names.Mangle, "raw", "security"} {
			rules, _ := NFTRules(f, t, "") // A kernel without nf_tables has none.
			n += len(rules)
		}
	}
	return n
}

// save reads a table from the kernel. What can't be read is an error: a table is never taken for empty because a program prints
// nothing of it.
func (t *Program) Save(ctx context.Context, tbl names.Table) (Content, error) {
	var held Content
	var whole bool
	err := t.read(ctx, t.SavePath, "", func(out io.Reader) (err error) {
		held, whole, err = parseSave(out, tbl)
		return err
	}, "-t", string(tbl))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading table %s by %s: %w", tbl, t.SavePath, err)
	case whole:
		t.tellNative(tbl, nil)
		return held, nil
	case t.Variant == NFT:
		return t.saveByChain(ctx, tbl)
	}
	return nil, fmt.Errorf("reading table %s by %s: it does not print the table", tbl, t.SavePath)
}

// read runs a program that reads from the kernel, and passes on what it prints. The program is ended with ctx, and after saveTime.
func (t *Program) read(ctx context.Context, path, input string, parse func(io.Reader) error, args ...string) error {
	limited, cancel := context.WithTimeout(ctx, t.SaveTime)
	defer cancel()
	cmd := exec.CommandContext(limited, path, args...)
	cmd.WaitDelay = time.Second
	cmd.Stdin = strings.NewReader(input)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	parseErr := parse(out)
	if parseErr != nil {
		_, _ = io.Copy(io.Discard, out) // lets the program end
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() == nil && limited.Err() != nil {
			return fmt.Errorf("it was ended, since it did not end by itself within %v", t.SaveTime)
		}
		return &ReadError{err, OneLine(stderr.String())}
	}
	return parseErr
}

// readError tells of a program that failed to read from the kernel.
type ReadError struct {
	err     error
	message string // what it said
}

func (e *ReadError) Error() string { return fmt.Sprintf("%v: %s", e.err, e.message) }
func (e *ReadError) Unwrap() error { return e.err }

// restore applies text. The end of the daemon does not interrupt it once it has begun: a table changes as a whole or not at
// all, but a program that is killed between two tables helps nobody. Only one that hangs is ended; then what the kernel holds
// is not known, as after any error.
func (t *Program) Restore(text string) error {
	text, deletions := t.deletions(text)
	if err := t.restoreText(text); err != nil {
		return err
	}
	return t.delete(deletions)
}

func (t *Program) restoreText(text string) error {
	args := []string{"--noflush", "--counters"}
	if t.Variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	limit := t.RestoreTime + time.Duration(strings.Count(text, "\n"))*lineTime
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, t.RestorePath, args...)
	cmd.WaitDelay = time.Second // for what it has started, which may hold its output open
	cmd.Stdin = strings.NewReader(text)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := t.children.run(cmd)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil { // This tells nothing about the input, so it is no RestoreError.
		return fmt.Errorf("%s was ended, since it did not end by itself within %v: %s", t.RestorePath, limit, OneLine(out.String()))
	}
	return &RestoreError{Program: t.RestorePath, Message: OneLine(out.String()), Excerpt: Excerpt(text, out.String()), Err: err}
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
func Excerpt(input, message string) string {
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
func OneLine(s string) string {
	var out []string
	for _, line := range strings.Split(s, "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "Try `") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "; ")
}

// usable reports why the kernel can't do what this family needs, if so.
func (t *Program) Usable() error {
	args := []string{"-t", string(names.NAT), "-S", "POSTROUTING", "1"}
	if t.Variant == Legacy {
		args = append(args, "-w", strconv.Itoa(lockWait))
	}
	err := t.read(context.Background(), t.Path, "", discard, args...)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == 1 {
		return nil // The table is there; the chain may not be, or hold rules that are native to nft.
	}
	if IsLocked(err) {
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

// describe names the program for a log line.
func (t *Program) Describe() string {
	n := t.version.number
	return fmt.Sprintf("%s %d.%d.%d (%s)", BaseName(t.Family), n[0], n[1], n[2], t.Variant)
}

// errRefused recognises that iptables-restore, or the kernel, does not take some input, whenever it is tried.
func IsRefused(err error) bool {
	var refused *RestoreError
	return errors.As(err, &refused) && !IsLocked(err)
}

// IsLocked recognises a lock that another program did not release in time, after which a retry soon makes sense.
func IsLocked(err error) bool {
	const said = "xtables lock"
	var write *RestoreError
	var read *ReadError
	return errors.As(err, &write) && strings.Contains(write.Message, said) || errors.As(err, &read) && strings.Contains(read.message, said)
}

// maxNames is how many different chain names one run of iptables-nft-restore should see. Its cost grows with their square
// (it keeps them in a list that it searches linearly), and below this size with the number of runs. The legacy variant
// copies the whole table for every run, so there everything is written in one.
const MaxNames = 300

// presentTables are those that the kernel has. A legacy program that is asked for another one makes it, and an nft program fails
// where the kernel has no nf_tables.
func PresentTables(v Variant, f plan.Family) ([]names.Table, error) {
	var present []string
	var err error
	if v == NFT {
		present, err = NFTTables(f)
	} else {
		present = LegacyTables(f)
	}
	return slices.DeleteFunc(slices.Clone(names.Tables), func(t names.Table) bool { return !slices.Contains(present, string(t)) }), err
}

func LegacyTables(f plan.Family) []string {
	name := "/proc/net/ip_tables_names"
	if f == plan.IPv6 {
		name = "/proc/net/ip6_tables_names"
	}
	raw, _ := os.ReadFile(name) // Where it can't be read, there are none.
	return strings.Fields(string(raw))
}

func NFTTables(f plan.Family) ([]string, error) {
	var list []*nftables.Table
	c, err := nftables.New()
	if err == nil {
		list, err = c.ListTablesOfFamily(nftables.TableFamily(nfProtocol(f)))
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return nil, nil // The kernel has no netfilter sockets, or nothing behind them that knows of tables.
	}
	if err != nil {
		return nil, fmt.Errorf("listing the tables of nf_tables for %s: %w", f, err)
	}
	var names []string
	for _, t := range list {
		names = append(names, t.Name)
	}
	return names, nil
}
