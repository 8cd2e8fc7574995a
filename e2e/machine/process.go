// Package machine says, by what the kernel tells in /proc, what a process uses of the machine that benchmarks run on, and
// what else that machine does meanwhile.
package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ticksPerSecond is the unit of times in /proc (USER_HZ), 100 on every architecture that Go runs on.
const ticksPerSecond = 100

func ticks(n int64) time.Duration { return time.Duration(n) * time.Second / ticksPerSecond }

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
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // ended meanwhile
		}
		if pid, p, err := parseStat(string(b)); err == nil {
			out[pid] = p
		}
	}
	return out
}

// ProcessOf is the process with that id.
func ProcessOf(pid int) (Process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, fmt.Errorf("processor time: %w", err)
	}
	_, p, err := parseStat(string(b))
	return p, err
}

// parseStat reads a line of /proc/PID/stat. The name is in parentheses, and may have some in it.
func parseStat(line string) (pid int, p Process, err error) {
	last := strings.LastIndex(line, ") ")
	first := strings.Index(line, " (")
	if last < first || first < 0 {
		return 0, Process{}, fmt.Errorf("%q has no name in parentheses", line)
	}
	fields := strings.Fields(line[last+2:])
	if len(fields) < 15 {
		return 0, Process{}, fmt.Errorf("%q has no processor times", line)
	}
	var n [6]int64 // pid, parent, utime, stime, cutime, cstime
	for i, text := range append([]string{line[:first], fields[1]}, fields[11:15]...) {
		if n[i], err = strconv.ParseInt(text, 10, 64); err != nil {
			return 0, Process{}, fmt.Errorf("%q: %w", line, err)
		}
	}
	return int(n[0]), Process{line[first+2 : last], int(n[1]), ticks(n[2] + n[3]), ticks(n[4] + n[5])}, nil
}

// Memory is the resident memory of a process, in bytes, now and at its highest.
func Memory(pid int) (now, peak int64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, fmt.Errorf("memory: %w", err)
	}
	if now, err = Kilobytes(string(b), "VmRSS"); err == nil {
		peak, err = Kilobytes(string(b), "VmHWM")
	}
	return now, peak, err
}

// Kilobytes is a value in a file of /proc with lines such as "Slab:  1024 kB", in bytes.
func Kilobytes(text, key string) (int64, error) {
	for line := range strings.Lines(text) {
		if name, value, _ := strings.Cut(line, ":"); name == key {
			var n int64
			if _, err := fmt.Sscanf(value, "%d kB", &n); err != nil {
				return 0, fmt.Errorf("%q: %w", line, err)
			}
			return n * 1024, nil
		}
	}
	return 0, fmt.Errorf("no %s", key)
}

// FirstLine is the first line of a file, or why there is none.
func FirstLine(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}
