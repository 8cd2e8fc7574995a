package harness

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// endVariable, if set, makes this test binary make a World with a process in it, print what it made, and end in the way
// that the variable says.
const endVariable = "HARNESS_TEST_END"

// markVariable is in the environment of that process and of all that it starts, by which they are told from those of others.
const markVariable = "HARNESS_TEST_MARK"

func makeWorldAndEnd(end string) int {
	w, err := Build(Options{})
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	process := exec.Command("sleep", "600")
	if err := w.Node1().Start(process); err != nil {
		fmt.Println("error", err)
		return 1
	}
	for _, n := range w.all {
		var st syscall.Stat_t
		if err := syscall.Fstat(int(n.handle), &st); err != nil {
			fmt.Println("error", err)
			return 1
		}
		fmt.Println("netns", st.Ino)
	}
	fmt.Println("pid", process.Process.Pid)
	fmt.Println("dir", filepath.Dir(w.Dir))
	fmt.Println("ready")
	switch end {
	case "panic":
		go panic("as told")
	case "return":
		if err := process.Process.Kill(); err != nil {
			return 1
		}
		_ = process.Wait()
		return 0
	}
	time.Sleep(time.Minute) // until the signal comes
	return 1
}

// TestNothingIsLeft: however a test process ends, its processes, namespaces and files go away.
func TestNothingIsLeft(t *testing.T) {
	for _, end := range []string{"return", "panic", "SIGTERM", "SIGINT", "SIGKILL"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0])
			mark := fmt.Sprintf("%s=%s-%d-%d", markVariable, end, os.Getpid(), time.Now().UnixNano())
			cmd.Env = append(os.Environ(), endVariable+"="+end, mark)
			stdout := nstest.Output(t, cmd)
			require.NoError(t, cmd.Start())
			late := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
			defer late.Stop()
			made := map[string][]string{}
			for lines := bufio.NewScanner(stdout); lines.Scan(); {
				kind, value, _ := strings.Cut(lines.Text(), " ")
				made[kind] = append(made[kind], value)
				if kind == "ready" {
					break
				}
			}
			if len(made["netns"]) != 11 || len(made["pid"]) != 1 || len(made["dir"]) != 1 {
				t.Fatalf("made %v", made)
			}
			used, err := namespacesInUse(mark)
			require.NoError(t, err)
			for _, inode := range made["netns"] {
				if used[inode] == "" && end != "panic" && end != "return" { // These may have ended.
					t.Fatalf("network namespace %s is not among those in use, %v: the search is no good", inode, used)
				}
			}
			signals := map[string]syscall.Signal{"SIGTERM": syscall.SIGTERM, "SIGINT": syscall.SIGINT, "SIGKILL": syscall.SIGKILL}
			if sig, ok := signals[end]; ok {
				require.NoError(t, cmd.Process.Signal(sig))
			}
			err = cmd.Wait()
			if (err == nil) != (end == "return") {
				t.Errorf("ended with %v", err)
			}
			gone := func() error {
				if end == "panic" || end == "SIGKILL" {
					removeAbandoned() // what the next test process does first
				}
				if _, err := os.Stat(made["dir"][0]); !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("%s is left: %v", made["dir"][0], err)
				}
				if _, err := os.Stat("/proc/" + made["pid"][0] + "/exe"); err == nil {
					return fmt.Errorf("process %s still runs", made["pid"][0])
				}
				used, err := namespacesInUse(mark)
				if err != nil {
					return err
				}
				for _, inode := range made["netns"] {
					if by := used[inode]; by != "" {
						return fmt.Errorf("network namespace %s is still in use: %s", inode, by)
					}
				}
				return nil
			}
			for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
				err := gone()
				if err == nil {
					return
				}
				if time.Now().After(deadline) {
					t.Fatal(err)
				}
			}
		})
	}
}

// namespacesInUse returns, by inode, a thread or file descriptor that refers to each network namespace, of the processes whose environment has
// mark. Of others it returns none: the kernel gives the number of a namespace that is gone to the next one that anybody makes.
func namespacesInUse(mark string) (map[string]string, error) {
	used := map[string]string{}
	environments, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		return nil, err
	}
	for _, path := range environments {
		environment, err := os.ReadFile(path)
		if err != nil || !slices.Contains(strings.Split(string(environment), "\x00"), mark) {
			continue // It may have ended meanwhile.
		}
		process := filepath.Dir(path)
		for _, pattern := range []string{process + "/task/[0-9]*/ns/net", process + "/fd/*"} {
			links, err := filepath.Glob(pattern)
			if err != nil {
				return nil, err
			}
			for _, l := range links {
				target, err := os.Readlink(l)
				if err != nil {
					continue // ended meanwhile
				}
				if inode, ok := strings.CutPrefix(target, "net:["); ok {
					used[strings.TrimSuffix(inode, "]")] = l
				}
			}
		}
	}
	return used, nil
}
