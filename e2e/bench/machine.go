package main

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"nodeproxy/e2e/machine"
)

// observation is for how long machineState looks at the other processes.
const observation = time.Second

// machineState says what may disturb a measurement: the processors, the load average, and the processes that use a
// processor for more than a twentieth of the time, leaving out this one.
func machineState(self int) string {
	before := machine.Processes()
	time.Sleep(observation)
	var busy []string
	for pid, p := range machine.Processes() {
		share := (p.Own - before[pid].Own).Seconds() / observation.Seconds()
		if pid != self && before[pid].Name == p.Name && share > 0.05 {
			busy = append(busy, fmt.Sprintf("%s[%d] %.0f%%", p.Name, pid, share*100))
		}
	}
	slices.Sort(busy)
	others := "no other process busy"
	if len(busy) > 0 {
		others = "other busy processes: " + strings.Join(busy, ", ")
	}
	return fmt.Sprintf("%d processors, kernel %s, %s, %s", runtime.NumCPU(),
		machine.FirstLine("/proc/sys/kernel/osrelease"), loadAverage(), others)
}

func loadAverage() string {
	fields := strings.Fields(machine.FirstLine("/proc/loadavg"))
	return "load average " + strings.Join(fields[:min(3, len(fields))], " ")
}
