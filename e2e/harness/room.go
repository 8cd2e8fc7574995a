package harness

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Room is a root file system of its own for programs that run in a namespace: they find their files at the places where their
// packages put them, what they write is gone with the Room, and so are the processes that they leave behind.
type Room struct {
	n   *Netns
	pid string // of the first process in the Room
}

// NeighbourRoot returns the root file system that e2e/neighbours/build makes.
var NeighbourRoot = sync.OnceValues(func() (string, error) { return Made("e2e/neighbours/build") })

// enterRoom makes the Room: a writable layer in memory over the root file system $1, in $2, with the variant $3 of iptables.
// It says when it is done, and stays.
const enterRoom = `set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" overlay "$2/root"
cd "$2/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs var/lib/docker
for tool in iptables ip6tables; do
	for part in "" -save -restore; do
		ln -sf "/usr/sbin/$tool-$3$part" "etc/alternatives/$tool$part"
	done
done
exec chroot "$2/root" sh -c 'echo ready; exec sleep infinity'
`

// NewRoom makes a Room in a namespace for as long as the test lasts. iptables is the given variant there.
func (w *World) NewRoom(t testing.TB, n *Netns, variant Variant) *Room {
	t.Helper()
	r, err := w.newRoom(n, variant)
	if err != nil {
		t.Fatalf("harness: room in %s: %v", n.Name, err)
	}
	return r
}

func (w *World) newRoom(n *Netns, variant Variant) (*Room, error) {
	root, err := NeighbourRoot()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(w.Dir, "room-")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child",
		"sh", "-c", enterRoom, "sh", root, dir, string(variant))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = out.(*os.File).SetReadDeadline(time.Now().Add(Limit))
	}
	if err != nil {
		return nil, err
	}
	if err := n.Start(cmd); err != nil {
		return nil, err
	}
	w.AtEnd(func() { // The room ends with its first process.
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		return nil, fmt.Errorf("no room: %q, %w", line, err)
	}
	return RoomOf(n, cmd)
}

// RoomOf is the Room whose first process is the child of a process in a namespace, such as unshare.
func RoomOf(n *Netns, cmd *exec.Cmd) (*Room, error) {
	pid, err := Child(cmd)
	return &Room{n, pid}, err
}

// Child is the process ID of the only child of a process.
func Child(cmd *exec.Cmd) (string, error) {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
	if err != nil {
		return "", err
	}
	pid := strings.TrimSpace(string(children))
	if _, err := strconv.Atoi(pid); err != nil {
		return "", fmt.Errorf("%s has the children %q", cmd.Path, pid)
	}
	return pid, nil
}

// Output runs a shell script in the Room and returns what it printed on stdout.
func (r *Room) Output(script string) (string, error) {
	return r.n.Output("nsenter", "--target="+r.pid, "--mount", "--pid", "--ipc", "--uts", "--root", "--wd=/",
		"/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C", "sh", "-ec", script)
}
