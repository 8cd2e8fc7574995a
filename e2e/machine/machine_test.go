package machine

import (
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

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

// TestWakeups: a thread that waits and goes on is counted.
func TestWakeups(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := Wakeups(os.Getpid())
	for range 20 {
		_ = syscall.Nanosleep(&syscall.Timespec{Nsec: 1000}, nil)
	}
	if after, again := Wakeups(os.Getpid()); err != nil || again != nil || after < before+20 {
		t.Errorf("%d before 20 waits, %d after, %v, %v", before, after, err, again)
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
	if got := WatchLoad()(); !strings.HasPrefix(got, "1-minute load average ") {
		t.Errorf("%q", got)
	}
}
