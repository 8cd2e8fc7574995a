package exclusive

import (
	"os"
	"path/filepath"
	"syscall"

	"nodeproxy/kernel/sockets"
)

// kubeProxyName is the name of a kube-proxy's process.
const kubeProxyName = "kube-proxy"

// named returns a kube-proxy among the visible processes. One in another network namespace does not count.
func (g *Guard) named() *Proxy {
	if g.process != nil && isKubeProxy(g.process.PID) {
		return g.process
	}
	g.process = nil
	for _, pid := range sockets.PIDs() {
		if isKubeProxy(pid) {
			g.process = &Proxy{Name: kubeProxyName, PID: pid}
			break
		}
	}
	return g.process
}

// isKubeProxy reports whether a process is a kube-proxy in the network namespace of this thread. It must run as root, since any
// user may give a process any name.
func isKubeProxy(pid int) bool {
	dir := sockets.ProcessDir(pid)
	if sockets.NameOf(pid) != kubeProxyName || sameProgram(dir) {
		return false
	}
	info, err := os.Stat(dir)
	if err != nil {
		return false
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || owner.Uid != 0 && int(owner.Uid) != os.Geteuid() {
		return false
	}
	theirs, err := os.Readlink(filepath.Join(dir, "ns", "net")) // A zombie has none.
	if err != nil {
		return false
	}
	ours, err := os.Readlink("/proc/thread-self/ns/net")
	return err == nil && ours == theirs
}

// sameProgram reports whether a process runs the same executable as this one, as where nodeproxy is installed in kube-proxy's
// place. The claim decides between the two then.
func sameProgram(dir string) bool {
	theirs, err := os.Stat(filepath.Join(dir, "exe"))
	if err != nil {
		return false
	}
	ours, err := os.Stat("/proc/self/exe")
	return err == nil && os.SameFile(theirs, ours)
}
