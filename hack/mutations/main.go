// Command mutations plants the faults of mutations.txt in the daemon, one at a time, and prints after how many schedules of faults TestProve
// finds each, and by what. It fails if it does not find one. Nothing in the work tree changes: the compiler gets the changed file in place of
// the one there (go build -overlay).
package main

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

//go:embed mutations.txt
var list string

// mutation is one fault.
type mutation struct {
	name, file, why string
	from, to        string // text of the file, and what takes its place
}

func main() {
	schedules := flag.Int("schedules", 10000, "how many schedules of faults each mutation has to be found in")
	only := flag.String("only", "", "regular expression for the names of the mutations to plant; all if empty")
	flag.Parse()
	if err := run(*schedules, *only); err != nil {
		fmt.Fprintf(os.Stderr, "mutations: %v\n", err)
		os.Exit(1)
	}
}

func run(schedules int, only string) error {
	chosen, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	all, err := parse(list)
	if err != nil {
		return err
	}
	fmt.Println("| planted fault | in | found after | by |\n|---|---|---|---|")
	var missed []string
	for _, m := range all {
		if !chosen.MatchString(m.name) {
			continue
		}
		n, by, err := m.find(schedules)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if by == "" {
			missed, by = append(missed, m.name), "not found"
		}
		fmt.Printf("| %s: %s | `%s` | %d | %s |\n", m.name, strings.TrimSuffix(m.why, "."), m.file, n, by)
	}
	if len(missed) > 0 {
		return fmt.Errorf("not found within %d schedules: %s", schedules, strings.Join(missed, ", "))
	}
	return nil
}

// parse reads mutations. Lines with # before the first one are comments, and an empty line ends a mutation.
func parse(text string) ([]mutation, error) {
	var out []mutation
	for block := range strings.SplitSeq(text, "\n\n") {
		lines := strings.Split(strings.TrimSpace(block), "\n")
		if strings.HasPrefix(lines[0], "#") {
			continue
		}
		words := strings.Fields(lines[0])
		if len(words) != 2 || len(lines) < 4 {
			return nil, fmt.Errorf("%q: want a name, a file, a line that says why, and lines with - and +", block)
		}
		m := mutation{name: words[0], file: words[1], why: lines[1]}
		var from, to []string
		for _, line := range lines[2:] {
			switch {
			case strings.HasPrefix(line, "-"):
				from = append(from, line[1:])
			case strings.HasPrefix(line, "+"):
				to = append(to, line[1:])
			default:
				return nil, fmt.Errorf("%s: %q begins neither with - nor with +", m.name, line)
			}
		}
		m.from, m.to = strings.Join(from, "\n"), strings.Join(to, "\n")
		out = append(out, m)
	}
	return out, nil
}

// apply returns the text of the file with the fault.
func (m mutation) apply(text string) (string, error) {
	if n := strings.Count(text, m.from); n != 1 {
		return "", fmt.Errorf("the text to replace is in %s %d times, not once", m.file, n)
	}
	return strings.Replace(text, m.from, m.to, 1), nil
}

// find plants the fault, and returns after how many schedules it was found, and by what; "" if it was not.
func (m mutation) find(schedules int) (after int, by string, err error) {
	dir, err := os.MkdirTemp("", "mutations")
	if err != nil {
		return 0, "", err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "nodeproxy.test")
	if err := m.build(dir, program); err != nil {
		return 0, "", err
	}
	test := exec.Command(program, "-test.run=^TestProve$", "-test.v", "-test.timeout=1h")
	test.Dir = filepath.Join("cmd", "nodeproxy")
	test.Env = append(os.Environ(), "GOMAXPROCS=1", "NODEPROXY_SCHEDULE=0", "NODEPROXY_SCHEDULES="+strconv.Itoa(schedules), "NODEPROXY_SHRINK=no")
	out, err := test.StdoutPipe()
	if err != nil {
		return 0, "", err
	}
	test.Stderr = test.Stdout
	if err := test.Start(); err != nil {
		return 0, "", err
	}
	after, by = read(bufio.NewScanner(out))
	if err := test.Wait(); err == nil {
		return after, "", nil
	} else if by == "" || after == 0 {
		return 0, "", fmt.Errorf("the test ends for another reason, after %d schedules: %w", after, err)
	}
	return after, by, nil
}

// build compiles the test with the fault.
func (m mutation) build(dir, program string) error {
	file, err := filepath.Abs(m.file)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	changed, err := m.apply(string(text))
	if err != nil {
		return err
	}
	replaced, overlay := filepath.Join(dir, "changed.go"), filepath.Join(dir, "overlay.json")
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {file: replaced}})
	if err := errors.Join(err, os.WriteFile(replaced, []byte(changed), 0o644), os.WriteFile(overlay, replace, 0o644)); err != nil {
		return err
	}
	build := exec.Command("go", "test", "-c", "-ldflags=-s -w", "-overlay="+overlay, "-o", program, "./cmd/nodeproxy") // It is linked in half the time.
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// What TestProve prints: for each schedule that begins, for one that fails, and when something in it ends the program or waits for ever.
var (
	begins = regexp.MustCompile(`schedule (\d+)$`)
	fails  = regexp.MustCompile(`schedule \d+ fails: (?:after \S+: )?(.*)`)
	ends   = regexp.MustCompile(`^(?:panic|fatal error): (.*)`)
)

// mostWords is how much of what TestProve says is printed.
const mostWords = 100

// read reads what a test prints, to the end: how many schedules have begun, and the first line of why it has failed.
func read(lines *bufio.Scanner) (schedules int, by string) {
	say := func(text string) {
		if by != "" {
			return
		}
		if by = strings.ReplaceAll(text, "|", "\\|"); len(by) > mostWords {
			by = by[:mostWords] + "…"
		}
	}
	for lines.Buffer(nil, 1<<24); lines.Scan(); {
		line := lines.Text()
		if found := begins.FindStringSubmatch(line); found != nil {
			n, _ := strconv.Atoi(found[1])
			schedules = n + 1
		} else if found := fails.FindStringSubmatch(line); found != nil {
			say(found[1])
		} else if found := ends.FindStringSubmatch(line); found != nil && !strings.HasPrefix(found[1], "test timed out") {
			say("the test ends: " + found[1])
		}
	}
	return schedules, by
}
