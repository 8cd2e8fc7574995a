package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// observation is for how long machineState looks at the other processes.
const observation = time.Second

// machineState says what may disturb a measurement: the processors, the load average, and the processes that use a
// processor for more than a twentieth of the time, leaving out this one.
func machineState(self int) string {
	before := processTimes()
	time.Sleep(observation)
	var busy []string
	for pid, p := range processTimes() {
		share := float64(p.ticks-before[pid].ticks) / ticksPerSecond / observation.Seconds()
		if pid != self && before[pid].name == p.name && share > 0.05 {
			busy = append(busy, fmt.Sprintf("%s[%d] %.0f%%", p.name, pid, share*100))
		}
	}
	slices.Sort(busy)
	others := "no other process busy"
	if len(busy) > 0 {
		others = "other busy processes: " + strings.Join(busy, ", ")
	}
	return fmt.Sprintf("%d processors, %s, %s, %s", runtime.NumCPU(), kernel(), loadAverage(), others)
}

// ticksPerSecond is the unit of times in /proc (USER_HZ), 100 on every architecture that Go runs on.
const ticksPerSecond = 100

type process struct {
	name  string
	ticks int64
}

func processTimes() map[int]process {
	out := map[int]process{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // ended meanwhile
		}
		head, tail, _ := strings.Cut(string(b), ") ")
		pid, name, _ := strings.Cut(head, " (")
		fields := strings.Fields(tail)
		n, err := strconv.Atoi(pid)
		if err != nil || len(fields) < 13 {
			continue
		}
		user, _ := strconv.ParseInt(fields[11], 10, 64)
		system, _ := strconv.ParseInt(fields[12], 10, 64)
		out[n] = process{name, user + system}
	}
	return out
}

func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "load average unknown"
	}
	return "load average " + strings.Join(strings.Fields(string(b))[:3], " ")
}

func kernel() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "kernel unknown"
	}
	return "kernel " + strings.TrimSpace(string(b))
}
