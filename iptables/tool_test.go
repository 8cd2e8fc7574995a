package iptables

import (
	"context"
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

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// sh runs a shell command in the namespace of this thread.
func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
}

// TestRestoreErrorShowsTheLine: what the programs of either variant refuse is shown with the lines around it.
func TestRestoreErrorShowsTheLine(t *testing.T) {
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		t.Run(string(v), func(t *testing.T) {
			nstest.Run(t, func() {
				e := realEngine(t, v, plan.IPv4)
				err := e.Kernel.Restore("*nat\n:KUBE-A - [0:0]\n-A KUBE-A -j RETURN\n-A KUBE-A -j KUBE-MISSING\nCOMMIT\n")
				if err == nil {
					t.Fatal("a jump to a chain that does not exist was accepted")
				}
				// The nft variant looks chains up at the end, and blames COMMIT for what it does not find.
				if !strings.Contains(err.Error(), " 4: -A KUBE-A -j KUBE-MISSING") || !strings.Contains(err.Error(), "\n> ") {
					t.Errorf("the error does not show the line: %v", err)
				}
				if strings.Contains(ours(t, e.Kernel), "KUBE-A") {
					t.Error("half of it was applied")
				}
			})
		})
	}
}

// TestProgramsThatHang: a program that does not end by itself is ended, also where something that it has started stays.
func TestProgramsThatHang(t *testing.T) {
	hangs := filepath.Join(t.TempDir(), "hangs")
	if err := os.WriteFile(hangs, []byte("#!/bin/sh\nsleep 5 &\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	const limit = 100 * time.Millisecond
	u := &xtables.Program{Variant: xtables.NFT, Path: hangs, RestorePath: hangs, SavePath: hangs, RestoreTime: limit, SaveTime: limit}
	var refused *xtables.RestoreError
	if err := u.Restore("*nat\nCOMMIT\n"); err == nil || errors.As(err, &refused) || !strings.Contains(err.Error(), "was ended") {
		t.Errorf("restore: %v", err)
	}
	b := &Backend{engines: []*engine{{Writer: u.Writer(nil), family: plan.IPv4}}}
	for name, read := range map[string]func() (uint64, error){"dropped": b.InvalidDropped, "node ports": b.LocalhostNodePorts()} {
		if _, err := read(); err == nil || !strings.Contains(err.Error(), "was ended") {
			t.Errorf("counters of %s: %v", name, err)
		}
	}
	u.SavePath = filepath.Join(t.TempDir(), "save")
	if err := os.WriteFile(u.SavePath, []byte("#!/bin/sh\necho '*nat'\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Save(t.Context(), names.NAT); err == nil || !strings.Contains(err.Error(), "was ended") {
		t.Errorf("save: %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := u.Save(cancelled, names.NAT); !errors.Is(err, context.Canceled) {
		t.Errorf("save, cancelled: %v", err)
	}
}

// TestDetect: which variant is in use already.
func TestDetect(t *testing.T) {
	for _, c := range []struct {
		name, setUp string
		want        xtables.Variant
	}{
		{"nothing there", "true", xtables.NFT},
		{"the kubelet's hint in nft", "iptables-nft -t mangle -N KUBE-IPTABLES-HINT; iptables-legacy -A INPUT -j ACCEPT", xtables.NFT},
		{"the kubelet's hint in legacy", "iptables-legacy -t mangle -N KUBE-IPTABLES-HINT; iptables-nft -A INPUT -j ACCEPT", xtables.Legacy},
		{"an old kubelet's canary in legacy, in IPv6", "ip6tables-legacy -t mangle -N KUBE-KUBELET-CANARY", xtables.Legacy},
		{"more rules in legacy", "iptables-legacy -A INPUT -j ACCEPT; iptables-legacy -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT", xtables.Legacy},
		{"hints in both", "iptables-nft -t mangle -N KUBE-IPTABLES-HINT; iptables-legacy -t mangle -N KUBE-IPTABLES-HINT", xtables.NFT},
		{"chains without rules in legacy", "iptables-legacy -N A; iptables-legacy -N B", xtables.NFT},
		{"a chain that only begins like a hint", "iptables-legacy -t mangle -N KUBE-IPTABLES-HINTS", xtables.NFT},
		{"rules of IPv6 count too", "ip6tables-legacy -A INPUT -j ACCEPT", xtables.Legacy},
		{"as many rules in both", "iptables-legacy -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT", xtables.NFT},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func() {
				sh(t, c.setUp)
				if got := xtables.Detect(); got != c.want {
					t.Errorf("got %s, want %s", got, c.want)
				}
			})
		})
	}
}

// TestGuard: the guard of localhost node ports is put next to what the kubelet keeps in KUBE-FIREWALL, once.
func TestGuard(t *testing.T) {
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		t.Run(string(v), func(t *testing.T) {
			nstest.Run(t, func() {
				sh(t, "iptables-"+string(v)+" -N KUBE-FIREWALL; iptables-"+string(v)+" -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP")
				p := plantest.Large(1, 1)
				p.Settings.LocalhostNodePorts = true
				for range 2 {
					e := realEngine(t, v, plan.IPv4)
					if err := e.sync(context.Background(), p, plan.Everything()); err != nil {
						t.Fatal(err)
					}
					held, err := e.Kernel.Save(context.Background(), names.Filter)
					if err != nil {
						t.Fatal(err)
					}
					want := []string{"-m mark --mark 0x8000/0x8000 -j DROP", localnetGuard()}
					if !slices.Equal(held[names.KubeletFirewall], want) {
						t.Errorf("KUBE-FIREWALL holds %q", held[names.KubeletFirewall])
					}
				}
				if readSysctl("net/ipv4/conf/all/route_localnet") != "1" {
					t.Error("route_localnet is not set")
				}
			})
		})
	}
}

// TestRestoreErrorOfBadRule: a rule that can't be read is blamed itself, by either variant, and what the program said is kept
// without its hints about --help.
func TestRestoreErrorOfBadRule(t *testing.T) {
	t.Parallel()
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				var input strings.Builder
				input.WriteString("*nat\n:KUBE-A - [0:0]\n")
				for i := range 7 {
					mask := 32
					if i == 3 {
						mask = 33
					}
					fmt.Fprintf(&input, "-A KUBE-A -s 10.0.0.%d/%d -j RETURN\n", i, mask)
				}
				input.WriteString("COMMIT\n")
				err := realEngine(t, v, plan.IPv4).Kernel.Restore(input.String())
				var refused *xtables.RestoreError
				if !errors.As(err, &refused) {
					t.Errorf("a mask of 33 bits gives %v", err)
					return
				}
				want := strings.Join([]string{
					"  3: -A KUBE-A -s 10.0.0.0/32 -j RETURN", "  4: -A KUBE-A -s 10.0.0.1/32 -j RETURN",
					"  5: -A KUBE-A -s 10.0.0.2/32 -j RETURN", "> 6: -A KUBE-A -s 10.0.0.3/33 -j RETURN",
					"  7: -A KUBE-A -s 10.0.0.4/32 -j RETURN", "  8: -A KUBE-A -s 10.0.0.5/32 -j RETURN",
					"  9: -A KUBE-A -s 10.0.0.6/32 -j RETURN",
				}, "\n")
				if refused.Excerpt != want {
					t.Errorf("the excerpt is\n%s\nwant\n%s", refused.Excerpt, want)
				}
				if !strings.Contains(refused.Message, "invalid mask `33' specified; Error occurred at line: 6") ||
					strings.Contains(refused.Message, "--help") || xtables.IsLocked(err) {
					t.Errorf("the message is %q", refused.Message)
				}
			})
		})
	}
}

func TestExcerpt(t *testing.T) {
	t.Parallel()
	const input = "a\nb\nc\nd\ne"
	for _, tc := range []struct{ message, want string }{
		{"Error occurred at line: 1", "> 1: a\n  2: b\n  3: c\n  4: d"},
		{"line 5: RULE_REPLACE failed (No such file or directory): rule in chain PREROUTING", "  2: b\n  3: c\n  4: d\n> 5: e"},
		{"iptables-restore: line 3 failed", "  1: a\n  2: b\n> 3: c\n  4: d\n  5: e"},
		{"Error occurred at line: 6", ""},
		{"Error occurred at line: 0", ""},
		{"Error occurred at line: 99999999999999999999", ""},
		{"out of memory", ""},
		{"", ""},
	} {
		if got := xtables.Excerpt(input, tc.message); got != tc.want {
			t.Errorf("%q: got\n%s\nwant\n%s", tc.message, got, tc.want)
		}
	}
	bare := &xtables.RestoreError{Program: "p", Message: "m", Err: errors.New("exit status 1")}
	if got := bare.Error(); got != "p: exit status 1: m" {
		t.Errorf("without an excerpt it is %q", got)
	}
}

// TestLockIsNoLack: a lock that another program holds says nothing about what the kernel can do. A family that were left out for it
// would stay so until the next start.
func TestLockIsNoLack(t *testing.T) {
	lock, err := os.Create(filepath.Join(t.TempDir(), "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XTABLES_LOCKFILE", lock.Name())
	nstest.Run(t, func() {
		for _, f := range plan.Families {
			tool, err := xtables.Find(xtables.Legacy, f)
			if err == nil {
				err = tool.Usable()
			}
			if err != nil {
				t.Errorf("%s, while another program holds the lock: %v", f, err)
			}
		}
	})
}

// TestLockIsRecognised, by what the legacy programs say when another one holds it.
func TestLockIsRecognised(t *testing.T) {
	t.Parallel()
	lock, err := os.Create(filepath.Join(t.TempDir(), "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	nstest.Run(t, func() {
		cmd := exec.Command("/usr/sbin/iptables-legacy-restore", "--noflush", "-w", "1")
		cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+lock.Name())
		cmd.Stdin = strings.NewReader("*nat\nCOMMIT\n")
		out, err := cmd.CombinedOutput()
		if err == nil || !xtables.IsLocked(fmt.Errorf("programming: %w", &xtables.RestoreError{Message: xtables.OneLine(string(out)), Err: err})) {
			t.Errorf("not recognised: %v: %s", err, out)
		}
	})
	if xtables.IsLocked(nil) || xtables.IsLocked(errors.New("xtables lock")) || xtables.IsLocked(&xtables.RestoreError{Message: "line 3 failed"}) {
		t.Error("something else is taken for a held lock")
	}
}
