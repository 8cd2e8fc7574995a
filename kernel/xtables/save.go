package xtables

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"io"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"time"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// Save reads a table from the kernel. What can't be read is an error: a table is never taken for empty because a program prints
// nothing of it.
func (t *Program) Save(ctx context.Context, tbl names.Table, known ...Content) (Content, error) {
	r := reader{content: Content{}, known: known}
	whole, late, err := t.saveInto(ctx, &r, tbl)
	switch {
	case late:
		return t.saveByChain(ctx, tbl)
	case err != nil:
		return nil, err
	case whole:
		t.reportNative(tbl, nil)
		return r.content, nil
	case t.Variant == NFT:
		content, err := t.saveByChain(ctx, tbl)
		if err != nil {
			return nil, fmt.Errorf("table %s holds rules that iptables can't read (nft list table %s %s shows them; they belong in a table "+
				"of their own); nothing is changed: %w", tbl, nft.FamilyName(t.Family), tbl, err)
		}
		return content, nil
	}
	return nil, t.notPrinted(tbl)
}

// saveInto reads a table into r, and reports whether all of it was printed. late is as that of save.
func (t *Program) saveInto(ctx context.Context, r *reader, tbl names.Table) (whole, late bool, err error) {
	late, err = t.save(ctx, func(out io.Reader) (err error) {
		whole, err = r.read(out, tbl)
		return err
	}, "-t", string(tbl))
	if err != nil {
		err = fmt.Errorf("reading table %s by %s: %w", tbl, t.SavePath, err)
	}
	return whole, late, err
}

func (t *Program) notPrinted(tbl names.Table) error {
	return fmt.Errorf("reading table %s by %s: it does not print the table", tbl, t.SavePath)
}

// wholeTime is how long iptables-nft-save may take while others change something.
const wholeTime = 5 * time.Second

// save runs iptables-save. late says that its output has to be read in parts.
func (t *Program) save(ctx context.Context, parse func(io.Reader) error, args ...string) (late bool, err error) {
	run := func(ctx context.Context) error { return t.read(ctx, t.SavePath, "", parse, args...) }
	if t.Variant == Legacy {
		return false, run(ctx)
	}
	return inTime(ctx, wholeTime, run)
}

// inTime calls a function that runs a program of the nft variant. Such a program begins anew whenever anything in nf_tables has changed
// while it read, and so does not end while changes come faster than it reads. Once it has taken longer than limit, and something has
// changed meanwhile, its context ends, and late is true. Where nothing changes, it is only slow, and to give up would be of no use.
func inTime(ctx context.Context, limit time.Duration, run func(context.Context) error) (late bool, err error) {
	limited, cancel := context.WithCancel(ctx)
	changed, end := changes()
	var watching sync.WaitGroup
	watching.Go(func() {
		for limited.Err() == nil {
			select {
			case <-limited.Done():
			case <-time.After(limit):
				if changed() {
					cancel()
				}
			}
		}
	})
	err = run(limited)
	late = err != nil && limited.Err() != nil && ctx.Err() == nil
	cancel()
	watching.Wait()
	end()
	return late, err
}

// changes returns what reports whether anything in nf_tables of the calling thread's network namespace has changed since; true where that
// is not known. end is to be called after that.
func changes() (since func() bool, end func()) {
	c, err := nft.Dial()
	if err != nil {
		return func() bool { return true }, func() {}
	}
	before, err := c.Generation()
	return func() bool {
		now, failed := c.Generation()
		return err != nil || failed != nil || now != before
	}, func() { _ = c.Close() }
}

// Generation returns a number that changes whenever anything in nf_tables changes, whoever changes it; 0 for the legacy variant, and where
// it is not known.
func (t *Program) Generation() uint32 {
	if t.Variant == Legacy {
		return 0
	}
	c, err := nft.Dial()
	if err != nil {
		return 0
	}
	defer c.Close()
	generation, err := c.Generation()
	if err != nil {
		return 0
	}
	return generation
}

// read runs a program that reads from the kernel, and passes on what it prints. The program is ended with ctx, and after saveTime.
func (t *Program) read(ctx context.Context, path, input string, parse func(io.Reader) error, args ...string) error {
	limited, cancel := context.WithTimeout(ctx, t.SaveTime)
	defer cancel()
	cmd := exec.CommandContext(limited, path, args...)
	cmd.WaitDelay = outputTime
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
		return &ReadError{err, oneLine(stderr.String())}
	}
	return parseErr
}

// ReadError is the error of a program that failed to read from the kernel.
type ReadError struct {
	err     error
	message string // what it said
}

func (e *ReadError) Error() string { return fmt.Sprintf("%v: %s", e.err, e.message) }
func (e *ReadError) Unwrap() error { return e.err }

// Content is the content of a table: the rules of each chain, as iptables-save prints them without the name of the chain.
type Content map[string][]string

// read reads the output of iptables-save for one table, and reports whether the table is in it, from its first line to its last. Lines that it
// does not know are passed over: they are not ours.
func (r *reader) read(in io.Reader, t names.Table) (whole bool, err error) {
	begun, first := false, "*"+string(t)
	err = eachLine(in, func(line []byte) {
		switch string(line) {
		case first:
			begun = true
		case "COMMIT":
			whole = begun
		default:
			r.add(line)
		}
	})
	return whole, err
}

// EachLine calls do for each line that a program prints.
func EachLine(in io.Reader, do func(line string)) error {
	return eachLine(in, func(line []byte) { do(string(line)) })
}

// eachLine is EachLine for lines that are not kept: each is overwritten by the next one.
func eachLine(in io.Reader, do func(line []byte)) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		do(lines.Bytes())
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading its output: %w", err)
	}
	return nil
}

// Add adds a chain or rule, as iptables-save or iptables -S prints it.
func (t Content) Add(line string) {
	r := reader{content: t}
	r.add([]byte(line))
}

// A reader makes Content of lines. The rules of a table are nearly always known, so that what a line says is copied only where it is
// not what known has at the same place: a chain that is as known has the rules of known, not copies of them.
type reader struct {
	content Content
	known   []Content
	chain   string   // of the latest rule
	want    []string // its rules, as known
	same    bool     // its rules so far are those with which want begins
	// hashes, if not nil, takes the place of content for chains that are not to be read as text.
	hashes map[string]uint64
	asText func(chain string) bool
}

// add adds a chain or rule.
func (r *reader) add(line []byte) {
	word, rest, _ := bytes.Cut(line, space)
	switch {
	case string(word) == "-A":
		name, body, _ := bytes.Cut(rest, space)
		if string(name) != r.chain {
			r.begin(string(name))
		}
		r.rule(body)
		return
	case bytes.HasPrefix(word, colon):
		rest = word[1:]
	case string(word) != "-N" && string(word) != "-P":
		return
	}
	name, _, _ := bytes.Cut(rest, space)
	_, seen := r.content[string(name)]
	if _, too := r.hashes[string(name)]; seen || too {
		return
	}
	if name := string(name); r.hashes != nil && !r.asText(name) {
		r.hashes[name] = 0
	} else {
		r.content[name] = nil
	}
}

var space, colon = []byte(" "), []byte(":")

// begin makes a chain the one that rules are added to.
func (r *reader) begin(chain string) {
	r.chain, r.want, r.same = chain, nil, len(r.content[chain]) == 0
	for _, k := range r.known {
		if len(r.want) == 0 {
			r.want = k[chain]
		}
	}
}

// rule adds a rule to the chain.
func (r *reader) rule(body []byte) {
	if hash, is := r.hashes[r.chain]; is {
		if mayHaveDotted(body) {
			body = []byte(withAddresses(body))
		}
		r.hashes[r.chain] = hashed(hash, maphash.Bytes(hashSeed, body))
		return
	}
	rules := r.content[r.chain]
	n := len(rules)
	switch known := n < len(r.want) && r.want[n] == string(body); {
	case known && r.same:
		rules = r.want[: n+1 : n+1] // What is appended later goes elsewhere.
	case known:
		rules = append(rules, r.want[n])
	default:
		r.same = false
		rules = append(rules, withAddresses(body))
	}
	r.content[r.chain] = rules
}

// withAddresses is a rule with its IPv6 addresses as Go prints them. The C library of the GNU project prints those of which
// only the last 32 bits are set, ::/96 but ::/111, with these as an IPv4 address: ::1.2.3.4.
func withAddresses(rule []byte) string {
	if !mayHaveDotted(rule) {
		return string(rule)
	}
	return dotted.ReplaceAllStringFunc(string(rule), func(match string) string {
		m := dotted.FindStringSubmatch(match)
		addr, err := netip.ParseAddr(m[2])
		if err != nil {
			return match
		}
		return m[1] + addr.String()
	})
}

// dotted finds such addresses behind the options that take one.
var dotted = regexp.MustCompile(`((?:^| )(?:-[sd]|--ctorigdst|--to-destination) \[?)(::[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+)`)

// mayHaveDotted is false, at little cost, for nearly every rule that has none.
func mayHaveDotted(rule []byte) bool {
	for {
		_, after, found := bytes.Cut(rule, []byte("::"))
		if !found {
			return false
		}
		rest := bytes.TrimLeft(after, "0123456789")
		if len(rest) < len(after) && bytes.HasPrefix(rest, []byte(".")) {
			return true
		}
		rule = after
	}
}

// MaxNesting is how many chains deep below a built-in one nf_tables lets rules lead, whether they jump or go to
// (NFT_JUMP_STACK_SIZE is 16, the built-in chain included). It refuses a rule that leads deeper with EMLINK.
const MaxNesting = 15

// Depths returns, for each chain that packets can get to, how many chains deep below a built-in one it lies at most.
func Depths(content Content) map[string]int {
	out := map[string]int{}
	var visit func(name string, depth int)
	visit = func(name string, depth int) {
		if was, seen := out[name]; seen && was >= depth {
			return
		}
		out[name] = depth
		for _, r := range content[name] {
			if to := Target(r); to != "" {
				if _, is := content[to]; is {
					visit(to, depth+1)
				}
			}
		}
	}
	for name := range content {
		if names.Builtin(name) {
			visit(name, 0)
		}
	}
	return out
}
