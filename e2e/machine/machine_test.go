package machine

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	t.Parallel()
	pid, p, err := parseStat("42 (a (b) c) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 400 20 0 1 0 5")
	if want := (Process{"a (b) c", 7, 1200 * time.Millisecond, 34 * time.Second}); err != nil || pid != 42 || p != want {
		t.Errorf("%d %+v %v, want 42 %+v", pid, p, err, want)
	}
	for _, line := range []string{
		"", "42", "42 (x) S 1 2", "x (x) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 400 20 0",
		"42 (x) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3000 x 20 0",
	} {
		if _, p, err := parseStat(line); err == nil {
			t.Errorf("%q is read as %+v", line, p)
		}
	}
}

// TestOwnProcess: this process is one of all, and what it says of itself is right.
func TestOwnProcess(t *testing.T) {
	t.Parallel()
	pid := os.Getpid()
	all := Processes()
	p, err := ProcessOf(pid)
	if err != nil || p.Parent != os.Getppid() || all[pid].Name != p.Name || p.Own < all[pid].Own {
		t.Errorf("%+v, %v, but of all processes: %+v", p, err, all[pid])
	}
	if now, peak, err := Memory(pid); err != nil || now < 1<<20 || peak < now {
		t.Errorf("memory: %d, at most %d, %v", now, peak, err)
	}
}

func TestKilobytes(t *testing.T) {
	t.Parallel()
	if got, err := Kilobytes("VmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n", "VmRSS"); got != 1<<20 || err != nil {
		t.Errorf("%d, %v, want 1 MiB", got, err)
	}
	for _, text := range []string{"", "VmHWM:\t1024 kB\n", "VmRSS:\tmuch\n"} {
		if _, err := Kilobytes(text, "VmRSS"); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// TestOthersSince: what this process did is told from what others did.
func TestOthersSince(t *testing.T) {
	t.Parallel()
	begun := time.Now()
	was := Usage{at: begun, processes: map[int]Process{1: {Name: "busy"}, 2: {Name: "idle"}}}
	now := Usage{at: begun.Add(1000 * time.Hour), busy: time.Hour, own: time.Hour,
		processes: map[int]Process{1: {Name: "busy", Own: 500 * time.Hour * 64}, 2: {Name: "idle"}}}
	got := now.OthersSince(was)
	if !strings.HasPrefix(got, "0% of all processor time went to others (busy[1] ") || strings.Contains(got, "idle") {
		t.Errorf("%s", got)
	}
}

func TestLoads(t *testing.T) {
	t.Parallel()
	if got := WatchLoad().Stop(); !strings.HasPrefix(got, "1-minute load average ") {
		t.Errorf("%q", got)
	}
}
