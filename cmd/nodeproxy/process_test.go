package main

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// writeFile writes a file as a whole.
func writeFile(t *testing.T, name, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(name+".new", []byte(text), 0o644))
	require.NoError(t, os.Rename(name+".new", name))
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

// has fails the test unless a text has all of these parts, and lacks if it has any.
func has(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("there is no %q in\n%.5000s", part, text)
		}
	}
}

func lacks(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if strings.Contains(text, part) {
			t.Errorf("there is %q in\n%.5000s", part, text)
		}
	}
}

// process is a nodeproxy that runs in the network namespace of the test.
type process struct {
	*exec.Cmd
	log   *logged
	ended chan struct{} // is closed when it has ended
}

// logged is what a process writes.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// startProcess starts a nodeproxy of node n1, which the end of the test ends.
func startProcess(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{log: &logged{}, ended: make(chan struct{})}
	p.Cmd = exec.Command("nodeproxy", append([]string{"run", "--node-name=n1", "--oom-score-adj=0", "--socket="}, args...)...)
	p.Env = append(append(os.Environ(), "GORACE=atexit_sleep_ms=0"), env...) // Under -race, it would take a second more to end.
	p.Stdout, p.Stderr = p.log, p.log
	nstest.EndWith(t, p.Cmd)
	require.NoError(t, p.Start())
	go func() {
		_ = p.Wait() // Its ProcessState says how it ended.
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.ended
		if t.Failed() {
			t.Logf("log of %v:\n%s", args, p.log)
		}
	})
	return p
}

// eventually waits until a condition holds, for a time that only a hang reaches.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	const limit = 3 * time.Minute
	for end := time.Now().Add(limit); !condition(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not after %v: %s", limit, what)
		}
	}
}
