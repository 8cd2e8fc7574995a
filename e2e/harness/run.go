package harness

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"nodeproxy/e2e/kernel/inkernel"
)

// runDirPrefix starts the name of the directory in which a test process keeps all of its files.
const runDirPrefix = "nodeproxy-e2e-"

// worldsAtOnce is the number of tests that run in parallel, unless -parallel says another: more than there are
// processors, since most of the time a test waits for silence. The kernel with IPVS has but one, and is slow.
func worldsAtOnce() int {
	if ModeUnderTest() == IPVS {
		return 3
	}
	return 5
}

var live = struct {
	sync.Mutex
	worlds map[*World]bool
	atEnd  []func() error
	dir    string
	lock   *os.File
}{worlds: map[*World]bool{}}

// Main runs a package's tests and removes what they left, also when they are interrupted. A TestMain ends with
// os.Exit(harness.Main(m)).
func Main(m *testing.M) int {
	if !flag.Parsed() { // Another time, it would take back what TestMain has made of a flag.
		flag.Parse()
	}
	parallelGiven := false
	flag.Visit(func(f *flag.Flag) { parallelGiven = parallelGiven || f.Name == "test.parallel" })
	if !parallelGiven {
		if err := flag.Set("test.parallel", strconv.Itoa(worldsAtOnce())); err != nil {
			panic(err)
		}
	}
	return Supervise(m.Run)
}

// Supervise is Main for a program that is not a test: it calls run, removes what it left, also when it is interrupted,
// and returns the exit code.
func Supervise(run func() int) int {
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	go func() {
		sig := <-interrupted
		fmt.Fprintf(os.Stderr, "harness: %v: cleaning up\n", sig)
		_ = Sweep()
		os.Exit(130)
	}()
	code := run()
	if err := Sweep(); err != nil {
		fmt.Fprintf(os.Stderr, "harness: %v\n", err)
		code = max(code, 1)
	}
	return code
}

// AtEnd has Sweep call a function, unless the function that it returns has been called, which calls it too.
func AtEnd(do func() error) (now func() error) {
	once := sync.OnceValue(do)
	live.Lock()
	defer live.Unlock()
	live.atEnd = append(live.atEnd, once)
	return once
}

// Sweep ends and removes everything that this process has made and not yet removed.
func Sweep() error {
	live.Lock()
	worlds, atEnd := slices.Collect(maps.Keys(live.worlds)), slices.Clone(live.atEnd)
	live.Unlock()
	var errs []error
	for _, do := range atEnd {
		errs = append(errs, do())
	}
	for _, w := range worlds {
		errs = append(errs, w.Close())
	}
	live.Lock()
	defer live.Unlock()
	if live.dir != "" {
		errs = append(errs, os.RemoveAll(live.dir))
		live.dir = ""
	}
	return errors.Join(errs...)
}

func register(w *World) {
	live.Lock()
	defer live.Unlock()
	live.worlds[w] = true
}

func unregister(w *World) {
	live.Lock()
	defer live.Unlock()
	delete(live.worlds, w)
}

func worldDir() (string, error) {
	dir, err := runDir()
	if err != nil {
		return "", err
	}
	return os.MkdirTemp(dir, "world-")
}

// runDir returns this process's directory. A process that is killed can't remove its own, so that each one removes
// those whose owner no longer holds the lock on them.
func runDir() (string, error) {
	live.Lock()
	defer live.Unlock()
	if live.dir != "" {
		return live.dir, nil
	}
	removeAbandoned()
	dir, err := os.MkdirTemp("", runDirPrefix)
	if err != nil {
		return "", err
	}
	// The lock file gets its name once it is locked, so that no one else finds it free.
	unnamed := filepath.Join(dir, "lock.new")
	lock, err := os.OpenFile(unnamed, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return "", fmt.Errorf("lock %s: %w", dir, err)
	}
	if err := os.Rename(unnamed, filepath.Join(dir, "lock")); err != nil {
		return "", err
	}
	live.dir, live.lock = dir, lock
	return dir, nil
}

func removeAbandoned() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), runDirPrefix+"*"))
	for _, dir := range dirs {
		lock, err := os.Open(filepath.Join(dir, "lock"))
		if err != nil {
			continue // just being made, or just being removed, by its owner
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.RemoveAll(dir)
		}
		lock.Close()
	}
}

// ProjectDir is the root of this module.
var ProjectDir = sync.OnceValues(inkernel.ModuleRoot)

// Made runs a program of the project that makes something, unless that is there, and returns what it prints: where that is.
func Made(program string, args ...string) (string, error) {
	root, err := ProjectDir()
	if err != nil {
		return "", err
	}
	cmd := exec.Command(filepath.Join(root, program), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", program, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Binary returns the path of the nodeproxy binary: $NODEPROXY_BIN, or one built once per process from this module.
var Binary = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("NODEPROXY_BIN"); path != "" {
		return filepath.Abs(path)
	}
	root, err := ProjectDir()
	if err != nil {
		return "", err
	}
	dir, err := runDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "nodeproxy")
	build := exec.Command("go", "build", "-o", path, "./cmd/nodeproxy")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build nodeproxy: %w\n%s", err, out)
	}
	return path, nil
})

// BinaryElsewhere is Binary for a process on another kernel that sees this one's files. What was built for this process gets
// another name, in dir: to the harness over there, the directory of this process's own looks like one that was left behind, and
// it removes those.
func BinaryElsewhere(dir string) (string, error) {
	path, err := Binary()
	if err != nil || os.Getenv("NODEPROXY_BIN") != "" {
		return path, err
	}
	link := filepath.Join(dir, filepath.Base(path))
	return link, os.Link(path, link)
}

// InGuest reports whether this is the test kernel, whose clock is its own and whose system calls are slow. See e2e/kernel.
func InGuest() bool {
	line, err := os.ReadFile("/proc/cmdline")
	return err == nil && bytes.Contains(line, []byte("nodeproxy.shared="))
}

// RunElsewhere runs the test t alone in the test kernel, and returns its output. It fails the test if that fails. The environment is this
// process's and what is given.
func RunElsewhere(t *testing.T, environment ...string) string {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("there is no test kernel for this processor")
	}
	path, err := BinaryElsewhere(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$", "-test.timeout=10m")
	cmd.Env = append(append(os.Environ(), "NODEPROXY_BIN="+path), environment...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := inkernel.Exec(cmd); err != nil || !strings.Contains(stdout.String(), "--- PASS: "+t.Name()) {
		t.Fatalf("on the test kernel: %v\n%s%s", err, stdout.String(), stderr.String())
	}
	return stdout.String()
}
