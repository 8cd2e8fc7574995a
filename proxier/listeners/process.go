package listeners

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// process is one that has a socket open.
type process struct {
	pid  int
	name string
}

func (p process) String() string { return fmt.Sprintf("process %d (%s)", p.pid, p.name) }

// processes finds who has sockets open: of each, the process with the lowest number, which most often is the one that gave
// it to the others. Sockets of processes that can't be seen are left out. It reads /proc of all processes, so it is for
// those sockets only that are to be told of.
func processes(inodes map[uint32]bool) map[uint32]process {
	var pids []int
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	out := map[uint32]process{}
	for _, pid := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		for inode := range socketsOf(dir) {
			if _, known := out[inode]; known || !inodes[inode] {
				continue
			}
			// The name is whatever the process wants it to be: quoted, it does no harm.
			name, _ := os.ReadFile(filepath.Join(dir, "comm"))
			out[inode] = process{pid, strings.Trim(strconv.Quote(strings.TrimSpace(string(name))), `"`)}
		}
		if len(out) == len(inodes) {
			break
		}
	}
	return out
}

// socketsOf returns the inodes of the sockets that the process with this directory of /proc has open.
func socketsOf(dir string) map[uint32]bool {
	out := map[uint32]bool{}
	files, err := os.Open(filepath.Join(dir, "fd"))
	if err != nil {
		return nil // It has ended, or is none of our business.
	}
	defer files.Close()
	names, _ := files.Readdirnames(-1)
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

// ownSockets returns the inodes of this process's sockets.
func ownSockets() map[uint32]bool { return socketsOf("/proc/self") }
