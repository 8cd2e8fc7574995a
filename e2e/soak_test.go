package e2e

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// The environment variables that say how long TestSoak goes on, and at how many changes a second; "make soak" sets them.
const soakVariable, soakRateVariable = "SOAK", "SOAK_RATE"

// TestSoak: Services of every sort come, change and go, under load, for as long as it is told, and for longer where samples take longer.
// Neither memory, goroutines nor file descriptors grow, no request fails, and in the end the kernel holds what a new start writes, and no rule
// more.
func TestSoak(t *testing.T) {
	length, rate := soakFor(t)
	var ran atomic.Bool
	t.Cleanup(func() {
		if !ran.Load() {
			t.Errorf("nothing ran: -run, or SOAK_VARIANT of make soak, names no variant that mode %s is soaked with", mode)
		}
	})
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "soak", fmt.Sprintf("%d random changes a second for %v", rate, length))
		f.start()
		ran.Store(true)
		seed := uint64(time.Now().UnixNano())
		t.Logf("random seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		// What is sampled begins when all Services have been there: how long that takes says nothing about growth.
		for i := range soaked {
			f.changeOne(random, i)
		}
		f.change("n3a")
		f.inForce("n3a")
		begin := time.Now()
		ended, result := f.startSampling(length)
		changes := 0
		for sampling := true; sampling; {
			f.changeOne(random, soaked+changes)
			changes++
			select {
			case <-ended:
				sampling = false
			case <-time.After(time.Until(begin.Add(time.Duration(changes) * time.Second / time.Duration(rate)))): // Where it lags behind, it catches up.
			}
		}
		samples, err := result()
		require.NoError(t, err)
		took := time.Since(begin)
		t.Logf("%d changes in %v: %.1f a second", changes, took.Round(time.Second), float64(changes)/took.Seconds())
		var grown []string
		if f.row.Repair, grown = growth(samples); len(grown) > 0 {
			t.Errorf("%s", strings.Join(grown, "\n"))
		}
		f.change("n2a")
		f.inForce("n2a")
		f.finish()
	})
}

func soakFor(t *testing.T) (length time.Duration, rate int) {
	t.Helper()
	length, rate = byMode(45*time.Second, 30*time.Second), byMode(50, 20)
	var err error
	if text := os.Getenv(soakVariable); text != "" {
		if length, err = time.ParseDuration(text); err != nil || length < 10*time.Second {
			t.Fatalf("%s=%s is no duration of 10s or more: %v", soakVariable, text, err)
		}
	}
	if text := os.Getenv(soakRateVariable); text != "" {
		if rate, err = strconv.Atoi(text); err != nil || rate < 1 {
			t.Fatalf("%s=%s is no number of changes a second: %v", soakRateVariable, text, err)
		}
	}
	return length, rate
}

// The Services that TestSoak changes have numbers from firstSoaked on. Every second one goes and comes back now and then, so
// that about as many are there at any time.
const firstSoaked, soaked = 20, 60

// changeOne makes, changes or removes one Service, or its endpoints.
func (f *faultScene) changeOne(random *rand.Rand, n int) {
	f.Helper()
	i := random.IntN(soaked)
	if n < soaked {
		i = n // each one once, first
	}
	s := harness.Service(fmt.Sprintf("soaked-%d", i), firstSoaked+i)
	file := s.Name + ".yaml"
	_, err := os.Stat(filepath.Join(f.Manifests, file))
	if err == nil && random.IntN(10) == 0 {
		f.Remove(f.T, file)
		return
	}
	policies := []string{"Cluster", "Local"}
	harness.Policies(policies[random.IntN(2)], policies[random.IntN(2)])(s)
	switch random.IntN(6) {
	case 0:
		harness.ClusterOnly(s)
		s.Spec.ExternalTrafficPolicy = "" // which only what is reached from outside may have
	case 1:
		sticky(time.Hour)(s)
	case 2:
		sourceRanges("203.0.113.0/24", "2001:db8:c::/64")(s)
	}
	pods := []string{"n1a", "n1b", "n1c", "n2a", "n2b", "n3a"}
	random.Shuffle(len(pods), func(a, b int) { pods[a], pods[b] = pods[b], pods[a] })
	ready := random.IntN(len(pods) + 1)
	endpoints := append(f.Ready(pods[:ready]...), f.Terminating(pods[ready:ready+random.IntN(len(pods)-ready+1)]...)...)
	f.Write(f.T, file, harness.Objects(s, endpoints...)...)
}

// sample is what the daemon takes up at one time.
type sample struct {
	rss, goroutines, files, rules int // rss in KiB; rules as ruleCount has them
}

var (
	residentSize   = regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB$`)
	goroutineCount = regexp.MustCompile(`(?m)^go_goroutines (\d+)$`)
)

// fewestSamples is how many samples growth needs: several in each quarter.
const fewestSamples = 24

// startSampling takes 60 samples in so long or, where that takes longer, fewestSamples at least. It returns what is closed then, and what
// returns them.
func (f *faultScene) startSampling(length time.Duration) (<-chan struct{}, func() ([]sample, error)) {
	var samples []sample
	var err error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for begin := time.Now(); err == nil && (time.Since(begin) < length || len(samples) < fewestSamples); {
			next := time.Now().Add(length / 60)
			var s sample
			if s, err = f.sample(); err == nil {
				if len(samples)%rulesEvery() == 0 {
					s.rules, err = f.ruleCount()
				} else {
					s.rules = samples[len(samples)-1].rules
				}
			}
			samples = append(samples, s)
			time.Sleep(time.Until(next)) // the interval of the samples
		}
	}()
	return ended, func() ([]sample, error) {
		<-ended
		return samples, err
	}
}

func (f *faultScene) sample() (s sample, err error) {
	number := func(from *regexp.Regexp, text string) (n int) {
		if m := from.FindStringSubmatch(text); m != nil {
			n, err = strconv.Atoi(m[1])
		} else {
			err = fmt.Errorf("no %s in:\n%s", from, text)
		}
		return n
	}
	process := fmt.Sprintf("/proc/%d", f.daemon.PID())
	status, err := os.ReadFile(process + "/status")
	if err != nil {
		return s, err
	}
	s.rss = number(residentSize, string(status))
	files, err := os.ReadDir(process + "/fd")
	if err != nil {
		return s, err
	}
	s.files = len(files)
	text, err := scraped(f.World)
	if err != nil {
		return s, err
	}
	s.goroutines = number(goroutineCount, text)
	return s, err
}

// rulesEvery returns how many samples have one count of rules, which takes long where there are many. Chance changes the number of rules by
// a tenth within seconds, so the median of few counts is no measure.
func rulesEvery() int { return byMode(2, 3) }

// ruleCount counts rules, chains, sets and whatever else node1 holds.
func (f *faultScene) ruleCount() (n int, err error) {
	programs := []string{f.variant.Tool("iptables") + "-save", f.variant.Tool("ip6tables") + "-save"}
	switch mode {
	case harness.IPVS:
		programs = append(programs, "ipset save", "ipvsadm --save --numeric", "ip addr show", "ip route show table local")
	case harness.NFTables:
		programs = append(programs, "nft list table ip nodeproxy", "nft list table ip6 nodeproxy")
	}
	for _, p := range programs {
		words := strings.Fields(p)
		text, err := f.Node1().Output(words[0], words[1:]...)
		if err != nil {
			return 0, err
		}
		n += strings.Count(text, "\n")
	}
	return n, nil
}

// growth compares the medians of the second and the last quarter, says what they are, and lists what has grown. Of the rules it says only how
// many there are: how many there should be depends on which Services chance has left, and is compared in the end.
func growth(samples []sample) (text string, grown []string) {
	quarter := len(samples) / 4
	var out []string
	for _, m := range []struct {
		name  string
		of    func(sample) int
		share float64 // by which it may grow, beside so many
		most  int
	}{
		{"KiB resident", func(s sample) int { return s.rss }, 0.25, 16384}, // as much as garbage that is not collected yet
		{"goroutines", func(s sample) int { return s.goroutines }, 0.20, 10},
		{"file descriptors", func(s sample) int { return s.files }, 0.20, 10},
		{"rules", func(s sample) int { return s.rules }, math.Inf(1), 0},
	} {
		median := func(of []sample) int {
			var values []int
			for _, s := range of {
				values = append(values, m.of(s))
			}
			slices.Sort(values)
			return values[len(values)/2]
		}
		before, after := median(samples[quarter:2*quarter]), median(samples[len(samples)-quarter:])
		if limit := float64(before)*(1+m.share) + float64(m.most); float64(after) > limit {
			grown = append(grown, fmt.Sprintf("%d %s in the second quarter, %d in the last; more than %.0f are growth",
				before, m.name, after, limit))
		}
		out = append(out, fmt.Sprintf("%d → %d %s", before, after, m.name))
	}
	return strings.Join(out, ", "), grown
}

// TestGrowth: what grows without end is told from what goes up and down.
func TestGrowth(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		at   func(i int) sample
		want int
	}{
		{"steady", func(i int) sample { return sample{36000 + i%7*400, 50 + i%5, 40 + i%5, 6000 + i%9*80} }, 0},
		{"warming up", func(i int) sample { return sample{36000 + min(i, 15)*1000, 50, 40, 6000} }, 0},
		{"memory", func(i int) sample { return sample{36000 + i*1200, 50, 40, 6000} }, 1},
		{"goroutines and file descriptors", func(i int) sample { return sample{36000, 50 + i, 40 + i, 6000} }, 2},
		{"more Services", func(i int) sample { return sample{36000, 50, 40, 6000 + 60*i} }, 0},
	} {
		var samples []sample
		for i := range 60 {
			samples = append(samples, c.at(i))
		}
		if text, grown := growth(samples); len(grown) != c.want {
			t.Errorf("%s: %s: %q", c.name, text, grown)
		}
	}
}
