package exclusive

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// kubeProxyName is what a kube-proxy's process is called.
const kubeProxyName = "kube-proxy"

// named looks for a kube-proxy among the processes that can be seen. One in another network namespace is none of ours.
func (g *Guard) named() *Proxy {
	if g.process != nil && isKubeProxy(g.process.PID) {
		return g.process
	}
	g.process = nil
	for _, pid := range processes() {
		if isKubeProxy(pid) {
			g.process = &Proxy{Name: kubeProxyName, PID: pid}
			break
		}
	}
	return g.process
}

// isKubeProxy reports whether a process is a kube-proxy in the network namespace of this thread. It has to be root's: anybody
// may give a process any name.
func isKubeProxy(pid int) bool {
	dir := processDir(pid)
	if processName(dir) != kubeProxyName || sameProgram(dir) {
		return false
	}
	info, err := os.Stat(dir)
	if err != nil {
		return false
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || owner.Uid != 0 && int(owner.Uid) != os.Geteuid() {
		return false
	}
	theirs, err := os.Readlink(filepath.Join(dir, "ns", "net")) // None while it is but waited for by its parent.
	if err != nil {
		return false
	}
	ours, err := os.Readlink("/proc/thread-self/ns/net")
	return err == nil && ours == theirs
}

// sameProgram reports whether a process runs the program that this one does, as where it is installed in kube-proxy's place: then
// the claim decides between the two.
func sameProgram(dir string) bool {
	theirs, err := os.Stat(filepath.Join(dir, "exe"))
	if err != nil {
		return false
	}
	ours, err := os.Stat("/proc/self/exe")
	return err == nil && os.SameFile(theirs, ours)
}

// ownerOf returns the process that has a socket open, and its name; 0 where it can't be seen. Of several it is the one with the
// lowest number, which most often is the one that gave it to the others.
func ownerOf(inode uint32) (pid int, name string) {
	want := fmt.Sprintf("socket:[%d]", inode)
	for _, pid := range processes() {
		if dir := processDir(pid); slices.Contains(openFiles(dir), want) {
			return pid, processName(dir)
		}
	}
	return 0, ""
}

// ownSockets are the sockets of this process, as ownerOf names them.
func ownSockets() map[string]bool {
	out := map[string]bool{}
	for _, target := range openFiles("/proc/self") {
		out[target] = true
	}
	return out
}

// openFiles says what the file descriptors of a process lead to.
func openFiles(dir string) []string {
	files, err := os.Open(filepath.Join(dir, "fd"))
	if err != nil {
		return nil // It has ended, or may not be looked at.
	}
	defer files.Close()
	names, _ := files.Readdirnames(-1)
	var out []string
	for _, name := range names {
		if target, err := os.Readlink(filepath.Join(dir, "fd", name)); err == nil {
			out = append(out, target)
		}
	}
	return out
}

// processes lists the processes that can be seen, in order of their numbers.
func processes() []int {
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

func processDir(pid int) string { return filepath.Join("/proc", strconv.Itoa(pid)) }

// processName is what a process calls itself. It may be anything: quoted, it does no harm. It is read for each process of a node
// before anything is written, so it is done with as few system calls as there can be.
func processName(dir string) string {
	fd, err := unix.Open(filepath.Join(dir, "comm"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "" // It has ended.
	}
	defer unix.Close(fd)
	name := make([]byte, 64) // The kernel keeps 15 bytes of it; workers of its own may add to that.
	n, err := unix.Read(fd, name)
	if err != nil {
		return ""
	}
	return strings.Trim(strconv.Quote(strings.TrimSpace(string(name[:n]))), `"`)
}
