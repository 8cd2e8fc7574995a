package sockets

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is a process that is visible in /proc.
type Process struct {
	PID  int
	Name string // as NameOf has it
}

func (p Process) String() string { return fmt.Sprintf("process %d (%s)", p.PID, p.Name) }

// PIDs returns the visible processes, in order of their numbers.
func PIDs() []int {
	entries, _ := os.ReadDir("/proc") // Without it, no process is visible.
	var out []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out
}

// ProcessDir returns the directory of a process.
func ProcessDir(pid int) string { return filepath.Join("/proc", strconv.Itoa(pid)) }

// NameOf returns the name that a process has given itself; "" if it has ended. It may be any text, so quote it. As it may be called
// for each process of a node, it makes as few system calls as possible.
func NameOf(pid int) string {
	fd, err := unix.Open(filepath.Join(ProcessDir(pid), "comm"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	name := make([]byte, 64) // The kernel keeps 15 bytes of it; workers of its own may add to that.
	n, err := unix.Read(fd, name)
	if err != nil {
		return ""
	}
	return strings.Trim(strconv.Quote(strings.TrimSpace(string(name[:n]))), `"`)
}

// Owners returns the processes that own sockets, by inode: for each, the one with the lowest number, which is usually the one that
// passed it to others. It omits sockets of processes that are not visible. It reads /proc of all processes, so call it only for the
// sockets that matter.
func Owners(inodes map[uint32]bool) map[uint32]Process {
	out := map[uint32]Process{}
	for _, pid := range PIDs() {
		for inode := range openBy(ProcessDir(pid)) {
			if _, known := out[inode]; !known && inodes[inode] {
				out[inode] = Process{pid, NameOf(pid)}
			}
		}
		if len(out) == len(inodes) {
			break
		}
	}
	return out
}

// Own returns the inodes of this process's sockets.
func Own() map[uint32]bool { return openBy("/proc/self") }

// openBy returns the inodes of the sockets that the process with this directory has open.
func openBy(dir string) map[uint32]bool {
	files, err := os.Open(filepath.Join(dir, "fd"))
	if err != nil {
		return nil // It has ended, or access is denied.
	}
	defer files.Close()
	names, _ := files.Readdirnames(-1)
	out := map[uint32]bool{}
	for _, name := range names {
		target, err := os.Readlink(filepath.Join(dir, "fd", name))
		if err != nil {
			continue
		}
		if text, ok := strings.CutPrefix(target, "socket:["); ok {
			if inode, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 32); err == nil {
				out[uint32(inode)] = true
			}
		}
	}
	return out
}
