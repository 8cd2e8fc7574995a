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

// Process is one that can be seen in /proc.
type Process struct {
	PID  int
	Name string // as NameOf has it
}

func (p Process) String() string { return fmt.Sprintf("process %d (%s)", p.PID, p.Name) }

// PIDs lists the processes that can be seen, in order of their numbers.
func PIDs() []int {
	entries, _ := os.ReadDir("/proc") // Without it, no process can be seen.
	var out []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out
}

// ProcessDir is the directory of a process.
func ProcessDir(pid int) string { return filepath.Join("/proc", strconv.Itoa(pid)) }

// NameOf is what a process calls itself; empty if it has ended. It may be anything: quoted, it does no harm. It may be asked for of
// each process of a node, so it takes as few system calls as there can be.
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

// Owners finds who has sockets open, by inode: of each, the process with the lowest number, which most often is the one that gave it to
// the others. Sockets of processes that can't be seen are left out. It reads /proc of all processes, so it is for those
// sockets only that matter.
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

// Own are the inodes of this process's sockets.
func Own() map[uint32]bool { return openBy("/proc/self") }

// openBy are the inodes of the sockets that the process with this directory has open.
func openBy(dir string) map[uint32]bool {
	files, err := os.Open(filepath.Join(dir, "fd"))
	if err != nil {
		return nil // It has ended, or may not be looked at.
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
