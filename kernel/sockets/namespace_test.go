package sockets

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// TestNamespace: the addresses and listeners of another namespace, in which a process lives.
func TestNamespace(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	pid := os.Getpid() // Other tests may run that have the usual addresses.
	v4, v6 := fmt.Sprintf("10.250.%d.%d", pid>>8&0xff, pid&0xff), fmt.Sprintf("fd00:%x::5", pid&0xffff)
	pod := exec.Command("unshare", "--net", "sh", "-c", "ip link set lo up && ip addr add "+v4+"/32 dev lo && ip addr add "+v6+"/128 dev lo nodad && "+
		"echo ready && exec sleep 1000")
	nstest.EndWith(t, pod)
	out := nstest.Output(t, pod)
	require.NoError(t, pod.Start())
	t.Cleanup(func() { _ = pod.Process.Kill(); _ = pod.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	among := map[netip.Addr]bool{}
	for _, a := range []string{v4, v6, "10.251.1.6", "fd00:1::6"} {
		among[netip.MustParseAddr(a)] = true
	}
	var found []Namespace
	for _, n := range Namespaces(t.Context()) {
		own, err := n.Addresses(among)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // Its process has ended.
			t.Error(err)
		}
		if len(own) > 0 {
			found = append(found, n)
			if want := []netip.Addr{netip.MustParseAddr(v4), netip.MustParseAddr(v6)}; !slices.Equal(own, want) {
				t.Errorf("addresses %v, want %v", own, want)
			}
		}
	}
	if len(found) != 1 || !strings.Contains(found[0].dir, "/proc/") {
		t.Fatalf("found %v", found)
	}
	if list, err := found[0].Sockets(plan.TCP); err != nil || len(list) > 0 {
		t.Errorf("without a listener: %v, %v", list, err)
	}
}

// TestNamespaceSockets: what /proc has of the sockets of a namespace is what sock_diag has of them.
func TestNamespaceSockets(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, address := range []string{"127.0.0.1:8080", "0.0.0.0:8081", "[::1]:8082", "[::]:8083"} {
		l, err := net.Listen("tcp", address)
		require.NoError(t, err)
		defer l.Close()
		u, err := net.ListenPacket("udp", address)
		require.NoError(t, err)
		defer u.Close()
	}
	own := Namespace{"/proc/thread-self/net"}
	for _, p := range []plan.Protocol{plan.TCP, plan.UDP} {
		got, err := own.Sockets(p)
		require.NoError(t, err)
		want, err := List(p)
		require.NoError(t, err)
		for i := range want {
			want[i].Inode, want[i].UID = 0, 0
		}
		byPort := func(a, b Socket) int { return int(a.Port) - int(b.Port) }
		slices.SortFunc(got, byPort)
		slices.SortFunc(want, byPort)
		if !slices.Equal(got, want) || len(got) != 4 {
			t.Errorf("%s: got %v, want %v", p, got, want)
		}
	}
}

// TestEnter: what is called in a namespace runs there, also when it panics, and this process stays where it is, with its first thread.
func TestEnter(t *testing.T) {
	t.Parallel()
	dir := ProcessDir(nstest.Elsewhere(t))
	n := Namespace{filepath.Join(dir, "net")}
	its, err := os.Readlink(filepath.Join(dir, "ns", "net"))
	require.NoError(t, err)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			err := n.Enter(func() error {
				if is, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || is != its {
					t.Errorf("it runs in %s, %v", is, err)
				}
				if i%4 == 0 {
					panic("a rule of a Pod")
				}
				return nil
			})
			if (err != nil) != (i%4 == 0) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if is, err := os.Readlink("/proc/self/ns/net"); err != nil || is == its {
		t.Errorf("the first thread is in %s now, %v", is, err)
	}
}
