package sockets

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/plan"
)

// Namespace is a network namespace other than the caller's, by a process in it. It is read through /proc, which takes no right to enter it, but for what
// Enter does.
type Namespace struct{ dir string }

// Namespaces returns the network namespaces of the visible processes, without that of the calling thread. They are fewer than there are if
// ctx ends.
func Namespaces(ctx context.Context) []Namespace {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil
	}
	seen := map[string]bool{own: true}
	var out []Namespace
	for _, pid := range PIDs() {
		if ctx.Err() != nil {
			break
		}
		if name, err := os.Readlink(filepath.Join(ProcessDir(pid), "ns", "net")); err == nil && !seen[name] {
			seen[name] = true
			out = append(out, Namespace{filepath.Join(ProcessDir(pid), "net")})
		}
	}
	return out
}

// Open opens the namespace as a file, as system calls take it.
func (n Namespace) Open() (*os.File, error) {
	return os.Open(filepath.Join(filepath.Dir(n.dir), "ns", "net"))
}

// Enter calls f in the namespace, on a thread of its own. It takes CAP_SYS_ADMIN; without that, the error is EPERM.
func (n Namespace) Enter(f func() error) error {
	file, err := n.Open()
	if err != nil {
		return err
	}
	defer file.Close()
	return onThread(func() error {
		if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

// onThread calls f on a thread that is used for nothing else, and ends then. A panic of f is an error.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()              // For good, so that the runtime ends the thread.
		if unix.Gettid() == unix.Getpid() { // But the first one it keeps.
			defer runtime.UnlockOSThread()
			done <- onThread(f)
			return
		}
		defer func() {
			if fault := recover(); fault != nil {
				done <- fmt.Errorf("panic: %v", fault)
			}
		}()
		done <- f()
	}()
	return <-done
}

// mostRead bounds how much is read of a file of a namespace.
const mostRead = 4 << 20

// each calls do with the lines of a file until that returns false.
func (n Namespace) each(file string, do func(line string) bool) error {
	f, err := os.Open(filepath.Join(n.dir, file))
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(io.LimitReader(f, mostRead))
	for lines.Scan() {
		if !do(lines.Text()) {
			return nil
		}
	}
	return lines.Err()
}

// Addresses returns which of some addresses are the namespace's own.
func (n Namespace) Addresses(among map[netip.Addr]bool) ([]netip.Addr, error) {
	found := map[netip.Addr]bool{}
	leaf := ""
	err := n.each("fib_trie", func(line string) bool { // An address is a leaf, and the kind of its route the line below.
		line = strings.TrimSpace(line)
		if text, is := strings.CutPrefix(line, "|-- "); is {
			leaf = text
		} else if line == "/32 host LOCAL" {
			if a, err := netip.ParseAddr(leaf); err == nil && among[a] {
				found[a] = true
			}
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	// Without the file, the namespace has no IPv6.
	_ = n.each("if_inet6", func(line string) bool {
		text, _, _ := strings.Cut(line, " ")
		if raw, err := hex.DecodeString(text); err == nil && len(raw) == 16 {
			if a := netip.AddrFrom16([16]byte(raw)); among[a] {
				found[a] = true
			}
		}
		return true
	})
	return slices.SortedFunc(maps.Keys(found), netip.Addr.Compare), nil
}

// Relays reports whether something in the namespace takes packets past its sockets, as a virtual machine (KubeVirt, Kata Containers) does by a tap
// device, and a network stack of its own (gVisor) by a packet socket.
func (n Namespace) Relays() (is bool, err error) {
	header := true
	err = n.each("packet", func(string) bool {
		is, header = !header, false
		return !is
	})
	if err == nil && !is {
		err = n.each("dev", func(line string) bool {
			name := strings.TrimSpace(line)
			is = strings.HasPrefix(name, "tap") || strings.HasPrefix(name, "k6t-")
			return !is
		})
	}
	return is, err
}

// Sockets returns what List returns in the namespace, without inodes; of an IPv6 socket for all addresses it is not known whether it takes IPv4
// too, and Both is set. The protocol is TCP or UDP.
func (n Namespace) Sockets(p plan.Protocol) ([]Socket, error) {
	state := fmt.Sprintf("%02X", stateOf(p))
	var out []Socket
	read := func(line string) bool {
		if s, ok := parseLine(p, state, line); ok {
			out = append(out, s)
		}
		return true
	}
	if err := n.each(p.Lower(), read); err != nil {
		return nil, err
	}
	if err := n.each(p.Lower()+"6", read); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	return out, nil
}

var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// parseLine reads a line of /proc/net/tcp and the like; false if it is not of a socket with a port in a state.
func parseLine(p plan.Protocol, state, line string) (Socket, bool) {
	f := strings.Fields(line)
	if len(f) < 5 || f[3] != state {
		return Socket{}, false
	}
	address, port, _ := strings.Cut(f[1], ":")
	number, err := strconv.ParseUint(port, 16, 16)
	raw, bad := hex.DecodeString(address)
	if err != nil || bad != nil || number == 0 || len(raw)%4 != 0 {
		return Socket{}, false
	}
	for i := 0; i < len(raw); i += 4 { // Words of 4 bytes, each as a number of this machine.
		if littleEndian {
			slices.Reverse(raw[i : i+4])
		}
	}
	addr, ok := netip.AddrFromSlice(raw)
	if !ok {
		return Socket{}, false
	}
	_, queue, _ := strings.Cut(f[4], ":")
	waiting, _ := strconv.ParseUint(queue, 16, 32) // Without it, none is known to.
	return Socket{Protocol: p, Addr: addr.Unmap(), Port: uint16(number), Both: addr.Is6() && addr.IsUnspecified(), Waiting: uint32(waiting)}, true
}
