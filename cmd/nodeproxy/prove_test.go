package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"nodeproxy/config"
)

// event is something that happens at a time. seed is of all that it draws.
type event struct {
	at   time.Duration
	what int // of the mode's happenings
	seed uint64
}

// schedule is what happens in a world with a seed and a mode.
type schedule struct {
	seed   uint64
	mode   string
	events []event
}

// provenMode is a mode that schedules have.
type provenMode struct {
	modes []string // that nodeproxy may be in, the first one at first
	rules func(*world) nodeRules
	own   []happening
}

var provenModes = map[string]provenMode{
	"iptables": {[]string{"iptables"}, newXtablesRules, toXtables},
	"ipvs":     {[]string{"ipvs", "iptables"}, newIPVSRules, slices.Concat(toIPVS, toXtables)},
	"nftables": {[]string{"nftables", "iptables"}, newNFTRules, toNFT},
}

// happeningsIn are all happenings in a mode.
func happeningsIn(mode string) []happening {
	return slices.Concat(beforeRules, provenModes[mode].own, afterRules)
}

// modeOf returns the mode of a schedule: that of an environment variable, or one after the other.
func modeOf(seed uint64) string {
	if mode := os.Getenv("NODEPROXY_MODE"); mode != "" {
		return mode
	}
	return slices.Sorted(maps.Keys(provenModes))[seed%uint64(len(provenModes))]
}

// drawSchedule draws a schedule. No two things happen in the same nanosecond.
func drawSchedule(seed uint64) schedule {
	r := rand.New(rand.NewPCG(seed, 2))
	var weighted []int
	s := schedule{seed: seed, mode: modeOf(seed)}
	for i, h := range happeningsIn(s.mode) {
		weighted = append(weighted, slices.Repeat([]int{i}, h.weight)...)
	}
	at := time.Duration(r.Int64N(int64(3 * time.Second)))
	for range 5 + r.IntN(40) {
		pause := time.Duration(r.Int64N(int64(time.Second)))
		switch r.IntN(8) {
		case 0:
			pause *= 10
		case 1, 2, 3, 4:
			pause /= 100
		}
		at += pause
		s.events = append(s.events, event{at, weighted[r.IntN(len(weighted))], r.Uint64()})
	}
	return s
}

// run lets a schedule happen. It returns why it failed, "" if it did not, what happened, and the sum of all that was written and when.
func (s schedule) run(t *testing.T) (failure string, story []string, sum uint64) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // A collection stops what runs, anywhere.
	settings, err := os.MkdirTemp("", "prove")
	require.NoError(t, err)
	defer os.RemoveAll(settings)
	synctest.Test(t, func(t *testing.T) {
		w, happenings := newWorld(t, s.seed, s.mode, settings), happeningsIn(s.mode)
		r := rand.New(rand.NewPCG(s.seed, 3))
		story = append(story, "# "+w.changeNode(r))
		for range 6 {
			story = append(story, "# "+w.changeService(r), "# "+w.changeSlice(r))
		}
		w.cluster.Backup()
		w.start()
		for _, e := range s.events {
			time.Sleep(max(e.at-time.Since(w.began), w.draw("event", time.Millisecond))) // in simulated time
			synctest.Wait()
			words := happenings[e.what].do(w, rand.New(rand.NewPCG(e.seed, 4)))
			w.note("%s %s", happenings[e.what].name, words)
			story = append(story, fmt.Sprintf("%v %s %#x # %s", e.at, happenings[e.what].name, e.seed, words))
			synctest.Wait()
			w.rules.Lock()
			w.look()
			w.rules.Unlock()
			w.talkAll()
		}
		w.end()
		failure, sum = w.failure, w.trace.Sum64()
	})
	return failure, story, sum
}

// shrink returns a schedule with as few of the events as fail, too.
func (s schedule) shrink(t *testing.T) schedule {
	for size := len(s.events); size > 0; size /= 2 {
		for i := 0; i+size <= len(s.events); {
			less := schedule{s.seed, s.mode, slices.Delete(slices.Clone(s.events), i, i+size)}
			if failure, _, _ := less.run(t); failure != "" {
				s = less
			} else {
				i += size
			}
		}
	}
	return s
}

// text is a schedule as testdata/prove has it.
func (s schedule) text(story []string) string {
	return fmt.Sprintf("seed %d mode %s\n%s\n", s.seed, s.mode, strings.Join(story, "\n"))
}

// readSchedule reads what text has written.
func readSchedule(text string) (s schedule, err error) {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if _, err := fmt.Sscanf(lines[0], "seed %d mode %s", &s.seed, &s.mode); err != nil {
		return s, err
	}
	for _, line := range lines[1:] {
		if strings.HasPrefix(line, "#") { // the objects in the beginning, which are drawn from the seed
			continue
		}
		words := strings.Fields(line)
		at, err := time.ParseDuration(words[0])
		if err != nil {
			return s, err
		}
		what := slices.IndexFunc(happeningsIn(s.mode), func(h happening) bool { return h.name == words[1] })
		seed, err := strconv.ParseUint(words[2], 0, 64)
		if what < 0 || err != nil {
			return s, fmt.Errorf("%q: %w", line, err)
		}
		s.events = append(s.events, event{at, what, seed})
	}
	return s, nil
}

func newRunFlags(t *testing.T, args ...string) *config.Flags {
	flags, set := &config.Flags{}, pflag.NewFlagSet("run", pflag.ContinueOnError)
	flags.Add(set)
	require.NoError(t, set.Parse(args))
	return flags
}

// number returns that of an environment variable.
func number(t *testing.T, variable string, otherwise uint64) uint64 {
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err)
	return n
}

// kindOf returns what an event of a story is counted as: by what is wrong, too, but not where or for how long.
func kindOf(line string) string {
	before, words, _ := strings.Cut(line, " # ")
	name := strings.Fields(before)[1]
	if strings.HasSuffix(name, "-trouble") || name == "api-ill" {
		words, _, _ = strings.Cut(words, " for ")
		return name + ": " + onServerWords.ReplaceAllString(words, "")
	}
	return name
}

var onServerWords = regexp.MustCompile("^server [0-9]+ ")

// TestProve: whatever happens to the API server, to the tables and to this program, the tables hold in the end what the objects ask for. No
// packet gets to an address that is no endpoint, whoever had one throughout is never without, nothing of others' changes, and
// what the program says of itself is true. NODEPROXY_SCHEDULES says how many schedules there are to be, NODEPROXY_SCHEDULE which is the
// first, and NODEPROXY_MODE in which mode all of them are. One that fails is shrunk, and becomes a scenario. With NODEPROXY_SHRINK=no, it does
// not, and the log has each that begins: what another program reads. NODEPROXY_COUNTS is a file to write to what happened how often.
func TestProve(t *testing.T) {
	first, n := number(t, "NODEPROXY_SCHEDULE", 0), number(t, "NODEPROXY_SCHEDULES", 30)
	asItIs := os.Getenv("NODEPROXY_SHRINK") == "no"
	began, happened, done := time.Now(), map[string]int{}, 0
	defer func() {
		t.Logf("schedules %d from %d on, %.0f a minute", done, first, float64(done)/time.Since(began).Minutes())
		writeCounts(t, happened, done)
	}()
	for seed := first; seed < first+n; seed++ {
		s := drawSchedule(seed)
		if asItIs {
			t.Logf("schedule %d", seed)
		}
		failure, story, _ := s.run(t)
		done++
		for _, line := range story {
			if !strings.HasPrefix(line, "#") {
				happened[kindOf(line)]++
			}
		}
		if failure != "" {
			t.Logf("schedule %d fails: %s", seed, failure)
			if asItIs {
				t.FailNow()
			}
			s.keep(t, done)
		}
	}
}

// keep shrinks a schedule that has failed, and makes a scenario of it if it fails again.
func (s schedule) keep(t *testing.T, after int) {
	s = s.shrink(t)
	failure, story, _ := s.run(t)
	if failure == "" {
		t.Fatalf("after %d schedules; it does not fail again: try its seed with make prove", after)
	}
	t.Logf("%s\n%s\nafter %d schedules", failure, s.text(story), after)
	file := fmt.Sprintf("testdata/prove/%s-%d.txt", s.mode, s.seed)
	if err := os.WriteFile(file, []byte(s.text(story)), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Fatalf("it is kept in %s", file)
}

// writeCounts writes how many schedules there were, and what happened in them how often, to the file that an environment variable names.
func writeCounts(t *testing.T, happened map[string]int, schedules int) {
	file := os.Getenv("NODEPROXY_COUNTS")
	if file == "" {
		return
	}
	text := fmt.Sprintf("%d schedules\n", schedules)
	for _, kind := range slices.Sorted(maps.Keys(happened)) {
		text += fmt.Sprintf("%d %s\n", happened[kind], kind)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Error(err)
	}
}

// TestProveScenarios: what once failed never fails again.
func TestProveScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/prove/*.txt")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		s, err := readSchedule(string(text))
		require.NoError(t, err)
		if failure, _, _ := s.run(t); failure != "" {
			t.Errorf("%s: %s", file, failure)
		}
	}
}
