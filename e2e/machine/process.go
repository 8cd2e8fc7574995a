// Package machine says, by what the kernel tells in /proc, what a process uses of the machine that benchmarks run on, and
// what else that machine does meanwhile.
package machine

import (
	"fmt"
	"time"

	"github.com/prometheus/procfs"
)

// ticksPerSecond is the unit of times in /proc (USER_HZ), 100 on every architecture that Go runs on.
const ticksPerSecond = 100

func ticks[T int | uint](n T) time.Duration { return time.Duration(n) * time.Second / ticksPerSecond }

// Process is what /proc says of one: its name, its parent, and the processor time that it has used, in user mode and in
// the kernel. Children are those that have ended and were waited for.
type Process struct {
	Name          string
	Parent        int
	Own, Children time.Duration
}

// Processes are all that there are, by their ids.
func Processes() map[int]Process {
	out := map[int]Process{}
	all, _ := procfs.AllProcs()
	for _, proc := range all {
		if p, err := ProcessOf(proc.PID); err == nil { // Otherwise it has ended meanwhile.
			out[proc.PID] = p
		}
	}
	return out
}

// ProcessOf is the process with that id.
func ProcessOf(pid int) (Process, error) {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return Process{}, fmt.Errorf("processor time: %w", err)
	}
	s, err := proc.Stat()
	if err != nil {
		return Process{}, fmt.Errorf("processor time: %w", err)
	}
	return Process{s.Comm, s.PPID, ticks(s.UTime + s.STime), ticks(s.CUTime + s.CSTime)}, nil
}

// Memory is the resident memory of a process, in bytes, now and at its highest.
func Memory(pid int) (now, peak uint64, err error) {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return 0, 0, fmt.Errorf("memory: %w", err)
	}
	s, err := proc.NewStatus()
	return s.VmRSS, s.VmHWM, err
}

// Wakeups is how often the threads that a process has now have begun to run after they had waited for something, in all: the kernel's
// count of voluntary context switches. Threads that have ended are not in it.
func Wakeups(pid int) (sum uint64, err error) {
	threads, err := procfs.AllThreads(pid)
	if err != nil {
		return 0, fmt.Errorf("wake-ups: %w", err)
	}
	for _, thread := range threads {
		if s, err := thread.NewStatus(); err == nil { // Otherwise it has ended meanwhile.
			sum += s.VoluntaryCtxtSwitches
		}
	}
	return sum, nil
}
