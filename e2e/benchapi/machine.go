package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ticksPerSecond is the unit of times in /proc (USER_HZ), 100 on every architecture that Go runs on.
const ticksPerSecond = 100

func ticks(n int64) time.Duration { return time.Duration(n) * time.Second / ticksPerSecond }

// process is what /proc says of one. Times are in ticks; children are those that have ended and were waited for.
type process struct {
	name          string
	parent        int
	own, children int64
}

func processTimes() map[int]process {
	out := map[int]process{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // ended meanwhile
		}
		if pid, p, ok := parseStat(string(b)); ok {
			out[pid] = p
		}
	}
	return out
}

// parseStat reads a line of /proc/PID/stat. The name is in parentheses, and may have some in it.
func parseStat(line string) (pid int, p process, ok bool) {
	last := strings.LastIndex(line, ") ")
	first := strings.Index(line, " (")
	if last < first || first < 0 {
		return 0, process{}, false
	}
	fields := strings.Fields(line[last+2:])
	if len(fields) < 15 {
		return 0, process{}, false
	}
	var n [6]int64 // pid, parent, utime, stime, cutime, cstime
	for i, text := range append([]string{line[:first], fields[1]}, fields[11:15]...) {
		v, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, process{}, false
		}
		n[i] = v
	}
	return int(n[0]), process{line[first+2 : last], int(n[1]), n[2] + n[3], n[4] + n[5]}, true
}

// usage is what the processors have done so far, in ticks.
type usage struct {
	at time.Time
	// busy is all work, stolen what the hypervisor kept to itself, own what this process and those it started did.
	busy, stolen, own int64
	processes         map[int]process
}

func usageNow() usage {
	u := usage{at: time.Now(), processes: processTimes()}
	self := os.Getpid()
	for pid, p := range u.processes {
		if pid == self || p.parent == self {
			u.own += p.own + p.children
		}
	}
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return u
	}
	line, _, _ := strings.Cut(string(b), "\n")
	// user, nice, system, idle, iowait, irq, softirq, steal
	for i, text := range strings.Fields(line)[1:9] {
		v, _ := strconv.ParseInt(text, 10, 64)
		switch i {
		case 3, 4:
		case 7:
			u.stolen = v
		default:
			u.busy += v
		}
	}
	return u
}

// othersSince says how much of the machine others than this benchmark used since then, and which processes those are of
// which there is something to see: not those that came and went.
func (u usage) othersSince(was usage) string {
	all := u.at.Sub(was.at).Seconds() * ticksPerSecond * float64(runtime.NumCPU())
	share := func(n int64) float64 { return max(0, float64(n)/all*100) }
	text := fmt.Sprintf("%.0f%% of all processor time went to others", share(u.busy-was.busy-(u.own-was.own)))
	if stolen := share(u.stolen - was.stolen); stolen >= 1 {
		text += fmt.Sprintf(", %.0f%% to other machines on this host", stolen)
	}
	self := os.Getpid()
	var names []string
	for pid, p := range u.processes {
		before, known := was.processes[pid]
		if pid == self || p.parent == self || !known || before.name != p.name {
			continue
		}
		if s := share(p.own - before.own); s > 2 {
			names = append(names, fmt.Sprintf("%s[%d] %.0f%%", p.name, pid, s))
		}
	}
	slices.Sort(names)
	if len(names) > 0 {
		text += " (" + strings.Join(names, ", ") + ")"
	}
	return text
}

// loads collects the load average of the last minute until it is stopped.
type loads struct {
	mu     sync.Mutex
	values []float64
	end    chan struct{}
}

// samplePeriod is how often the load average is looked at; the kernel computes it anew every five seconds.
const samplePeriod = 5 * time.Second

func watchLoad() *loads {
	l := &loads{end: make(chan struct{})}
	l.add()
	go func() {
		tick := time.NewTicker(samplePeriod)
		defer tick.Stop()
		for {
			select {
			case <-l.end:
				return
			case <-tick.C:
				l.add()
			}
		}
	}()
	return l
}

func (l *loads) add() {
	var now float64
	if _, err := fmt.Sscan(firstLine("/proc/loadavg"), &now); err != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.values = append(l.values, now)
}

// stop ends the collection and sums it up.
func (l *loads) stop() string {
	close(l.end)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.values) == 0 {
		return "load average unknown"
	}
	return fmt.Sprintf("1-minute load average %.1f to %.1f", slices.Min(l.values), slices.Max(l.values))
}

// firstLine is the first line of a file, or why there is none.
func firstLine(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}
