package machine

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// proc is what the kernel says of the machine as a whole.
var proc, _ = procfs.NewDefaultFS()

// Slab is how much memory the kernel's slabs hold, in bytes.
func Slab() (uint64, error) {
	m, err := proc.Meminfo()
	if err != nil {
		return 0, err
	}
	return *m.SlabBytes, nil
}

// Kernel is the kernel's version.
func Kernel() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

// Processor is the model of the first processor.
func Processor() string {
	info, err := proc.CPUInfo()
	if err != nil || len(info) == 0 || info[0].ModelName == "" {
		return "unknown processor"
	}
	return info[0].ModelName
}

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
	stat, _ := proc.Stat()
	all := stat.CPUTotal
	duration := func(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }
	u.busy, u.stolen = duration(all.User+all.Nice+all.System+all.IRQ+all.SoftIRQ), duration(all.Steal)
	return u
}

// observation is for how long State looks at the other processes.
const observation = time.Second

// State says what may disturb a measurement that is about to begin.
func State() string {
	before := UsageNow()
	time.Sleep(observation)
	return fmt.Sprintf("kernel %s, %d processors, %s; within a second, %s", Kernel(), runtime.NumCPU(),
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
