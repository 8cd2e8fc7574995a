package main

import (
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/inspect"
	"nodeproxy/internal/nstest"
)

const inspectedService = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.244.1.5], nodeName: n1}]
`

const podWithoutService = `
apiVersion: v1
kind: Service
metadata: {name: typo}
spec: {clusterIP: 10.96.0.10, selector: {app: wbe}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, labels: {app: web}}
status: {podIP: 10.244.1.5, conditions: [{type: Ready, status: "True"}]}
`

// TestInspectDaemon: commands get the state of a running nodeproxy by a socket that only root can reach and that is gone with the
// process; a change is pending until it is programmed.
func TestInspectDaemon(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	for _, line := range []string{"link set lo up", "addr add 10.244.1.5/32 dev lo", "route add 10.96.0.0/16 dev lo"} {
		nstest.Exec(t, "ip", strings.Fields(line)...)
	}
	listen(t, "10.244.1.5:8080")
	a := newAsked(t)
	a.says(1, "explain web", "no nodeproxy answers at "+a.socket)
	a.write(inspectedService)
	p := a.start()
	a.awaitProgrammed()
	before := a.service()
	if before.Usable != 1 {
		t.Errorf("%d endpoints are usable, want 1: %+v", before.Usable, before)
	}
	if age := time.Since(before.Since); age < 0 || age > time.Minute {
		t.Errorf("programmed since %s", before.Since)
	}
	a.says(0, "explain web", "Nothing is wrong with it on this node.")
	completion, err := exec.Command("nodeproxy", "__complete", "explain", "--socket="+a.socket, "w").Output()
	if err != nil || string(completion) != "web\n:4\n" {
		t.Errorf("completion: %q, %v", completion, err)
	}
	for path, want := range map[string]os.FileMode{a.socket: 0o600, filepath.Dir(a.socket): 0o700} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %s", path, info.Mode(), err, want)
		}
	}
	a.write(strings.Replace(inspectedService, "nodeName: n1", "nodeName: n1, conditions: {ready: false}", 1))
	eventually(t, "the endpoint is not ready", func() bool { sp := a.service(); return sp.Usable == 0 && sp.State == inspect.Programmed })
	if now := a.service(); !now.Since.After(before.Since) || now.Total != 1 {
		t.Errorf("after a change: %+v, before it: %+v", now, before)
	}
	a.says(1, "explain web", "No endpoint is ready")
	a.write(podWithoutService)
	eventually(t, "no Pod matches", func() bool {
		text, code := a.ask("explain", "typo")
		return code == 1 && strings.Contains(text, "app=web in place of app=wbe")
	})
	require.NoError(t, p.Process.Signal(os.Interrupt))
	<-p.ended
	if _, err := os.Stat(a.socket); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

// TestSocketInUse: a socket that another process listens on stays its own, and one that a process left behind is replaced.
func TestSocketInUse(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	first, err := inspect.Listen(path)
	require.NoError(t, err)
	if _, err := inspect.Listen(path); err == nil {
		t.Error("a socket in use was taken")
	}
	first.Close()
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	dead.Close()
	// A child that another test has just forked may have the socket until it executes its program.
	eventually(t, "a socket that nobody listens on is taken", func() bool {
		second, err := inspect.Listen(path)
		if err != nil {
			t.Log(err)
			return false
		}
		second.Close()
		return true
	})
}

// TestSocketPath: what is not a socket is never removed, and a path that is too long is named as such.
func TestSocketPath(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	writeFile(t, file, "precious")
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(file, link))
	for _, path := range []string{file, link, dir} {
		if _, err := inspect.Listen(path); err == nil || !strings.Contains(err.Error(), path+" is no socket") {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("it is gone: %v", err)
		}
	}
	if _, err := inspect.Listen(filepath.Join(dir, strings.Repeat("x", 108))); err == nil || !strings.Contains(err.Error(), "107 bytes at most") {
		t.Errorf("a long path: %v", err)
	}
	if _, err := os.Stat(link); err != nil {
		t.Error(err)
	}
}

// TestSocketClients: clients that do not read keep neither memory nor places for good, and others are answered behind them.
func TestSocketClients(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	l, err := inspect.Listen(path)
	require.NoError(t, err)
	var at atomic.Int32
	var mu sync.Mutex
	var most int32
	served := make(chan error, 1)
	go func() {
		served <- inspect.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			n := at.Add(1)
			mu.Lock()
			most = max(most, n)
			mu.Unlock()
			time.Sleep(20 * time.Millisecond) // An answer takes a while, so that others can come in between.
			at.Add(-1)
		}))
	}()
	var clients sync.WaitGroup
	for range 100 {
		clients.Go(func() {
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
				t.Error(err)
			}
			if answer, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.0 200") {
				t.Errorf("%q, %v", answer, err)
			}
		})
	}
	clients.Wait()
	if most > 16 {
		t.Errorf("%d clients were answered at once", most)
	}
	l.Close()
	assert.NoError(t, <-served)
}
