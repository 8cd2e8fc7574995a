package machine

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Usage is what the processors have done so far.
type Usage struct {
	at time.Time
	// busy is all work, stolen what the hypervisor kept to itself, own what this process and those it started did.
	busy, stolen, own time.Duration
	processes         map[int]Process
}

// UsageNow looks at all processes. What can not be read counts as nothing.
func UsageNow() Usage {
	u := Usage{at: time.Now(), processes: Processes()}
	self := os.Getpid()
	for pid, p := range u.processes {
		if pid == self || p.Parent == self {
			u.own += p.Own + p.Children
		}
	}
	fields := strings.Fields(FirstLine("/proc/stat"))
	if len(fields) < 9 || fields[0] != "cpu" {
		return u
	}
	// user, nice, system, idle, iowait, irq, softirq, steal
	for i, text := range fields[1:9] {
		v, _ := strconv.ParseInt(text, 10, 64)
		switch i {
		case 3, 4:
		case 7:
			u.stolen = ticks(v)
		default:
			u.busy += ticks(v)
		}
	}
	return u
}

// observation is for how long State looks at the other processes.
const observation = time.Second

// State says what may disturb a measurement that is about to begin.
func State() string {
	before := UsageNow()
	time.Sleep(observation)
	return fmt.Sprintf("kernel %s, %d processors, %s; within a second, %s", FirstLine("/proc/sys/kernel/osrelease"), runtime.NumCPU(),
		LoadAverage(), UsageNow().OthersSince(before))
}

// OthersSince says how much of the machine others than this benchmark used since then, and which processes those are of
// which there is something to see: not those that came and went.
func (u Usage) OthersSince(was Usage) string {
	all := u.at.Sub(was.at).Seconds() * float64(runtime.NumCPU())
	share := func(d time.Duration) float64 { return max(0, d.Seconds()/all*100) }
	text := fmt.Sprintf("%.0f%% of all processor time went to others", share(u.busy-was.busy-(u.own-was.own)))
	if stolen := share(u.stolen - was.stolen); stolen >= 1 {
		text += fmt.Sprintf(", %.0f%% to other machines on this host", stolen)
	}
	self := os.Getpid()
	var names []string
	for pid, p := range u.processes {
		before, known := was.processes[pid]
		if pid == self || p.Parent == self || !known || before.Name != p.Name {
			continue
		}
		if s := share(p.Own - before.Own); s > 2 {
			names = append(names, fmt.Sprintf("%s[%d] %.0f%%", p.Name, pid, s))
		}
	}
	slices.Sort(names)
	if len(names) > 0 {
		text += " (" + strings.Join(names, ", ") + ")"
	}
	return text
}
