// Package memory finds out how much memory this process may have, and gives back what only its start needs.
package memory

import (
	"fmt"
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Limit returns how many bytes this process may have at most, together with all else in its container or unit, and with what the kernel
// keeps for these; false if nothing limits that.
func Limit() (bytes int64, limited bool) { return limit("/proc/self/cgroup", "/sys/fs/cgroup") }

// limit is Limit for a process whose control groups a file names. They are below root, in version 1 or 2 of that file system. A limit of
// each group above counts too. Where a container sees its own group alone, what it sees as the uppermost is that.
func limit(file, root string) (bytes int64, limited bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	bytes = math.MaxInt64
	for line := range strings.Lines(string(text)) {
		_, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		controllers, group, found := strings.Cut(rest, ":")
		dir, name := root, "memory.max"
		if controllers != "" {
			dir, name = path.Join(root, "memory"), "memory.limit_in_bytes"
		}
		if !found || controllers != "" && !slices.Contains(strings.Split(controllers, ","), "memory") {
			continue
		}
		for group = path.Join("/", group); ; group = path.Dir(group) {
			text, _ := os.ReadFile(path.Join(dir, group, name))
			if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
				bytes = min(bytes, n)
			}
			if group == "/" {
				break
			}
		}
	}
	return bytes, bytes < 1<<60 // In version 1, a group without a limit has a very large one.
}

// ReleaseProgram gives back the pages of the program's file that this process has read: its instructions and constants. Those that it goes
// on to use come back from the kernel's cache of the file, 16 at a time; to give all back and read all again takes 3 ms on a busy machine
// (BenchmarkReleaseProgram). Most of what a start uses is used once: what each package does before main, and the reading of flags and
// files.
//
// Pages in which somebody has changed something stay, and with them all of their mapping: a debugger or a uprobe does so where it breaks
// in, and the dynamic linker to the tables of a program that may be loaded anywhere, before it takes the right to write from them.
func ReleaseProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return err
	}
	for _, m := range unchanged(string(text), program) {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.start, m.end-m.start, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("madvise: %w", errno)
		}
	}
	return nil
}

// mapping is a range of addresses.
type mapping struct{ start, end uintptr }

// unchanged returns the mappings of a file in smaps that can't be written to, and of which no page has been, neither one in memory nor one
// that is swapped out.
func unchanged(smaps, file string) (out []mapping) {
	var last mapping
	var of bool   // whether the last one is of the file
	var nones int // how many lines say of it that there are no such pages
	for line := range strings.Lines(smaps) {
		fields := strings.Fields(line)
		if len(fields) == 3 && (fields[0] == "Anonymous:" || fields[0] == "Swap:") && fields[1] == "0" && of {
			if nones++; nones == 2 {
				out = append(out, last)
			}
		}
		if len(fields) < 5 || strings.HasSuffix(fields[0], ":") {
			continue
		}
		_, name, _ := strings.Cut(line, " /")
		of, nones = "/"+strings.TrimSuffix(name, "\n") == file && !strings.Contains(fields[1], "w"), 0
		if !of {
			continue
		}
		start, end, _ := strings.Cut(fields[0], "-")
		a, errA := strconv.ParseUint(start, 16, 64)
		b, errB := strconv.ParseUint(end, 16, 64)
		last, of = mapping{uintptr(a), uintptr(b)}, errA == nil && errB == nil
	}
	return out
}
