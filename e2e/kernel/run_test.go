package kernel_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// result is what a command under run came to.
type result struct {
	stdout, stderr string
	status         int
}

func run(t *testing.T, environment []string, args ...string) result {
	t.Helper()
	cmd := exec.Command("./run", args...)
	cmd.Env = append(os.Environ(), environment...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// ownKernel says whether run uses this machine's own kernel, so that there is no guest.
func ownKernel() bool { return exec.Command("./probe").Run() == nil }

func TestRunPassesEverythingOn(t *testing.T) {
	t.Parallel()
	directory, err := os.Getwd()
	require.NoError(t, err)
	odd := "two\nlines, 'quotes\", $HOME and a \\"
	script := `printf '%s|' "$PWD" "$ODD" "$#" "$@"; cat; [ -t 1 ] && echo terminal; echo complaint >&2; exit 7`
	got := run(t, []string{"ODD=" + odd}, "sh", "-c", script, "sh", "", odd, "x=y")
	want := result{strings.Join([]string{directory, odd, "3", "", odd, "x=y", ""}, "|"), "complaint\n", 7}
	if got != want {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestRunPassesStatusOn(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]int{"exit 0": 0, "exit 1": 1, "exit 200": 200} {
		if got := run(t, nil, "sh", "-c", script); got != (result{status: want}) {
			t.Errorf("%s: got %+v, want status %d and no output", script, got, want)
		}
	}
}

func TestRunPassesBinaryOutputOn(t *testing.T) {
	t.Parallel()
	var all []byte
	for i := range 256 {
		all = append(all, byte(i))
	}
	file := filepath.Join(t.TempDir(), "bytes")
	require.NoError(t, os.WriteFile(file, bytes.Repeat(all, 4096), 0o600))
	got := run(t, nil, "cat", file)
	if got.stdout != string(bytes.Repeat(all, 4096)) || got.stderr != "" || got.status != 0 {
		t.Errorf("a megabyte came out as %d bytes; stderr %q, status %d", len(got.stdout), got.stderr, got.status)
	}
}

// TestRunWrites holds that a command can write anywhere, and that only what it writes to the directories named as
// writable is there afterwards.
func TestRunWrites(t *testing.T) {
	t.Parallel()
	lost, kept, also := t.TempDir(), t.TempDir(), t.TempDir()
	got := run(t, []string{"NODEPROXY_KERNEL_WRITABLE=" + kept + ":" + also},
		"sh", "-c", `for d; do echo text >"$d/file" && cat "$d/file"; done; cat /proc/mounts >&2`, "sh", lost, kept, also)
	if got.status != 0 || got.stdout != "text\ntext\ntext\n" {
		t.Errorf("got %+v", got)
	}
	for _, directory := range []string{kept, also} {
		if b, err := os.ReadFile(filepath.Join(directory, "file")); string(b) != "text\n" {
			t.Errorf("a file in a writable directory has %q, %v; mounted was\n%s", b, err, got.stderr)
		}
	}
	if _, err := os.Stat(filepath.Join(lost, "file")); err == nil && !ownKernel() {
		t.Error("a file in a directory that is not writable is there afterwards")
	}
}

// TestRunLimitsTime is about the guest; a machine's own kernel sets no limit.
func TestRunLimitsTime(t *testing.T) {
	t.Parallel()
	want := 124
	if ownKernel() {
		want = 0
	}
	got := run(t, []string{"NODEPROXY_KERNEL_TIMEOUT=2"}, "sleep", "4")
	if got.status != want {
		t.Errorf("got %+v, want status %d", got, want)
	}
}

// TestRunReportsAnEarlyEnd is about the guest: what ends it would end this machine.
func TestRunReportsAnEarlyEnd(t *testing.T) {
	t.Parallel()
	command, want := "kill -KILL $$", 137
	if !ownKernel() {
		command, want = "perl -e 'syscall(169, 0xfee1dead, 0x28121969, 0x4321fedc, 0)'", 125 // reboot(2)
	}
	if got := run(t, nil, "sh", "-c", command); got.status != want {
		t.Errorf("got %+v, want status %d", got, want)
	}
}

// TestRunEndsWithItsGuest ends run in every way there is while a command runs, and looks for what is left.
func TestRunEndsWithItsGuest(t *testing.T) {
	t.Parallel()
	// Whoever starts the tests may ignore a hangup, as nohup does. What they start then would do so too, and could not help it.
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	signals := []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGKILL}
	for _, sig := range signals {
		t.Run(sig.String(), func(t *testing.T) {
			temporary := t.TempDir()
			cmd := exec.Command("./run", "sh", "-c", "echo begun; exec sleep 1000")
			cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
			out := nstest.Output(t, cmd)
			require.NoError(t, cmd.Start())
			defer func() { _ = cmd.Process.Kill() }()
			if line, err := bufio.NewReader(out).ReadString('\n'); line != "begun\n" {
				t.Fatalf("got %q, %v", line, err)
			}
			processes := family(t, cmd.Process.Pid)
			require.NoError(t, cmd.Process.Signal(sig))
			if err := cmd.Wait(); err == nil {
				t.Error("run ended with status 0")
			}
			for deadline := time.Now().Add(time.Minute); len(alive(processes)) > 0; time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("of the processes %v, %v are still there", processes, alive(processes))
				}
			}
			if left, err := os.ReadDir(temporary); len(left) > 0 || err != nil {
				t.Errorf("left in the temporary directory: %v, %v", left, err)
			}
		})
	}
	if left, err := os.ReadDir("../../.cache/kernel/shared"); len(left) > 0 || err != nil && !ownKernel() {
		t.Errorf("left in the directory that is shared with guests: %v, %v", left, err)
	}
}

// parents are the processes of this machine, each with its parent.
func parents(t *testing.T) map[int]int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	found := map[int]int{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended meanwhile
		}
		// The name, in parentheses, may have any character in it.
		text := string(b)
		var state string
		var process, parent int
		if _, err := fmt.Sscan(text[:strings.Index(text, " ")], &process); err != nil {
			t.Fatalf("%s: %q: %v", file, text, err)
		}
		if _, err := fmt.Sscan(text[strings.LastIndex(text, ")")+1:], &state, &parent); err != nil {
			t.Fatalf("%s: %q: %v", file, text, err)
		}
		found[process] = parent
	}
	return found
}

// family is a process and all that descend from it.
func family(t *testing.T, process int) []int {
	t.Helper()
	all, found := parents(t), []int{process}
	for i := 0; i < len(found); i++ {
		for child, parent := range all {
			if parent == found[i] {
				found = append(found, child)
			}
		}
	}
	return found
}

// alive are those of the processes that are still there.
func alive(processes []int) (found []int) {
	for _, process := range processes {
		if syscall.Kill(process, 0) == nil {
			found = append(found, process)
		}
	}
	return found
}
