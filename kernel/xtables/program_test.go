package xtables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// sh runs a shell command in the namespace of this thread.
func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
}

func findProgram(t *testing.T, v Variant, f plan.Family) *Program {
	t.Helper()
	p, err := Find(v, f)
	require.NoError(t, err)
	return p
}

// TestRestoreErrorShowsTheLine: what the programs of either variant refuse is shown with the lines around it.
func TestRestoreErrorShowsTheLine(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			nstest.Run(t, func() {
				k := findProgram(t, v, plan.IPv4)
				err := k.Restore(Text("*nat\n:KUBE-A - [0:0]\n-A KUBE-A -j RETURN\n-A KUBE-A -j KUBE-MISSING\nCOMMIT\n"))
				if err == nil {
					t.Fatal("a jump to a chain that does not exist was accepted")
				}
				// The nft variant looks chains up at the end, and blames COMMIT for what it does not find.
				if !strings.Contains(err.Error(), " 4: -A KUBE-A -j KUBE-MISSING") || !strings.Contains(err.Error(), "\n> ") {
					t.Errorf("the error does not show the line: %v", err)
				}
				if nat, err := k.Save(t.Context(), names.NAT); err != nil || nat["KUBE-A"] != nil {
					t.Error("half of it was applied")
				}
			})
		})
	}
}

// TestDetect: which variant is in use already.
func TestDetect(t *testing.T) {
	for _, c := range []struct {
		name, setUp string
		want        Variant
	}{
		{"nothing there", "true", NFT},
		{"the kubelet's hint in nft", "iptables-nft -t mangle -N KUBE-IPTABLES-HINT; iptables-legacy -A INPUT -j ACCEPT", NFT},
		{"the kubelet's hint in legacy", "iptables-legacy -t mangle -N KUBE-IPTABLES-HINT; iptables-nft -A INPUT -j ACCEPT", Legacy},
		{"an old kubelet's canary in legacy, in IPv6", "ip6tables-legacy -t mangle -N KUBE-KUBELET-CANARY", Legacy},
		{"more rules in legacy", "iptables-legacy -A INPUT -j ACCEPT; iptables-legacy -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT", Legacy},
		{"hints in both", "iptables-nft -t mangle -N KUBE-IPTABLES-HINT; iptables-legacy -t mangle -N KUBE-IPTABLES-HINT", NFT},
		{"chains without rules in legacy", "iptables-legacy -N A; iptables-legacy -N B", NFT},
		{"a chain that only begins like a hint", "iptables-legacy -t mangle -N KUBE-IPTABLES-HINTS", NFT},
		{"rules of IPv6 count too", "ip6tables-legacy -A INPUT -j ACCEPT", Legacy},
		{"as many rules in both", "iptables-legacy -A INPUT -j ACCEPT; iptables-nft -A INPUT -j ACCEPT", NFT},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func() {
				sh(t, c.setUp)
				if got := Detect(); got != c.want {
					t.Errorf("got %s, want %s", got, c.want)
				}
			})
		})
	}
}

// TestRestoreErrorOfBadRule: a rule that can't be read is blamed itself, by either variant, and what the program said is kept
// without its hints about --help.
func TestRestoreErrorOfBadRule(t *testing.T) {
	t.Parallel()
	for _, v := range []Variant{NFT, Legacy} {
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
				err := findProgram(t, v, plan.IPv4).Restore(Text(input.String()))
				var refused *RestoreError
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
					strings.Contains(refused.Message, "--help") || isLocked(err) {
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
		if got := Excerpt(input, tc.message); got != tc.want {
			t.Errorf("%q: got\n%s\nwant\n%s", tc.message, got, tc.want)
		}
	}
	bare := &RestoreError{Program: "p", Message: "m", Err: errors.New("exit status 1")}
	if got := bare.Error(); got != "p: exit status 1: m" {
		t.Errorf("without an excerpt it is %q", got)
	}
}

// TestLockIsNoLack: a lock that another program holds says nothing about what the kernel can do. A family that were left out for it
// would stay so until the next start.
func TestLockIsNoLack(t *testing.T) {
	lock, err := os.Create(filepath.Join(t.TempDir(), "lock"))
	require.NoError(t, err)
	defer lock.Close()
	require.NoError(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	t.Setenv("XTABLES_LOCKFILE", lock.Name())
	nstest.Run(t, func() {
		for _, f := range plan.Families {
			tool, err := Find(Legacy, f)
			if err == nil {
				err = tool.Usable()
			}
			assert.NoError(t, err, "%s, while another program holds the lock", f)
		}
	})
}

// TestLockIsRecognised, by what the legacy programs say when another one holds it.
func TestLockIsRecognised(t *testing.T) {
	t.Parallel()
	lock, err := os.Create(filepath.Join(t.TempDir(), "lock"))
	require.NoError(t, err)
	defer lock.Close()
	require.NoError(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	nstest.Run(t, func() {
		cmd := exec.Command("/usr/sbin/iptables-legacy-restore", "--noflush", "-w", "1")
		cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+lock.Name())
		cmd.Stdin = strings.NewReader("*nat\nCOMMIT\n")
		out, err := cmd.CombinedOutput()
		if err == nil || !isLocked(fmt.Errorf("programming: %w", &RestoreError{Message: oneLine(string(out)), Err: err})) {
			t.Errorf("not recognised: %v: %s", err, out)
		}
	})
	if isLocked(nil) || isLocked(errors.New("xtables lock")) || isLocked(&RestoreError{Message: "line 3 failed"}) {
		t.Error("something else is taken for a held lock")
	}
}

// TestDetectBesideNativeRules: what says which variant is in use is seen beside rules that iptables can't read.
func TestDetectBesideNativeRules(t *testing.T) {
	for _, c := range []struct {
		name, setUp string
		want        Variant
	}{
		{"the kubelet's hint", "iptables-nft -t mangle -N KUBE-IPTABLES-HINT; iptables-nft -t mangle -A INPUT -j ACCEPT; " +
			"nft add rule ip mangle INPUT ct state new counter; iptables-legacy -A INPUT -j ACCEPT", NFT},
		{"more rules in nft", "iptables-nft -A INPUT -j ACCEPT; iptables-nft -A INPUT -j DROP; nft add rule ip filter INPUT ct state new counter; " +
			"iptables-legacy -A INPUT -j ACCEPT; iptables-legacy -A INPUT -j DROP", NFT},
	} {
		t.Run(c.name, func(t *testing.T) {
			nstest.Run(t, func() {
				sh(t, c.setUp)
				if got := Detect(); got != c.want {
					t.Errorf("got %s, want %s", got, c.want)
				}
			})
		})
	}
}

// TestCounted: counters are read in both forms, of which the second one is that beside native rules.
func TestCounted(t *testing.T) {
	for line, want := range map[string]string{
		`-A KUBE-SERVICES -d 10.0.0.1/32 -m comment --comment "a -c 1 2" -c 3 156 -j KUBE-SVC-A`: `3 -A KUBE-SERVICES ` +
			`-d 10.0.0.1/32 -m comment --comment "a -c 1 2" -j KUBE-SVC-A`,
		`-A KUBE-X -c 3 156 -j LOG --log-prefix "a -c b"`: `3 -A KUBE-X -j LOG --log-prefix "a -c b"`,
		"[3:156] -A KUBE-X -j DROP":                       "3 -A KUBE-X -j DROP",
		"-A KUBE-X -c 5 0":                                "5 -A KUBE-X",
		"-N KUBE-X":                                       "0 -N KUBE-X",
		"-P INPUT ACCEPT -c 1":                            "0 -P INPUT ACCEPT -c 1",
	} {
		rule, packets := Counted(line)
		if got := fmt.Sprint(packets, " ", rule); got != want {
			t.Errorf("%q becomes %q", line, got)
		}
	}
}

// TestOutputHeldOpen: a program that has ended well, but whose output somebody still holds open, has refused nothing: no Service is to be
// blamed for that.
func TestOutputHeldOpen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	held, err := os.OpenFile(fifo, os.O_RDWR, 0) // Until this is closed, the child of the script reads.
	require.NoError(t, err)
	defer held.Close()
	path := filepath.Join(dir, "restore")
	nstest.Script(t, path, "cat >/dev/null\ncat "+fifo+" &\n")
	program := &Program{RestorePath: path, RestoreTime: 3 * time.Minute}
	err = program.restore(Text("*nat\nCOMMIT\n"))
	var refused *RestoreError
	if err == nil || errors.As(err, &refused) {
		t.Errorf("got %v", err)
	}
}

// TestPrepare: a program that was started before takes the next input; where somebody has ended it meanwhile, another one does. Close ends one
// that waits, even if it hangs.
func TestPrepare(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, begun, took := filepath.Join(dir, "restore"), filepath.Join(dir, "begun"), filepath.Join(dir, "took")
	nstest.Script(t, path, "echo >>"+begun+"\nexec cat >>"+took+"\n")
	program := &Program{RestorePath: path, RestoreTime: time.Hour}
	want := func(runs int, input string) {
		t.Helper()
		lines, err := os.ReadFile(begun)
		require.NoError(t, err)
		text, err := os.ReadFile(took)
		require.NoError(t, err)
		if len(lines) != runs || string(text) != input {
			t.Errorf("%d runs took %q, want %d and %q", len(lines), text, runs, input)
		}
	}
	program.Prepare()
	program.Prepare()
	require.NoError(t, program.restore(Text("one\n")))
	want(1, "one\n")
	require.NoError(t, program.restore(Text("two\n")))
	want(2, "one\ntwo\n")
	program.Prepare()
	killed := program.ahead.cmd.Process
	require.NoError(t, killed.Kill())
	require.NoError(t, unix.Waitid(unix.P_PID, killed.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
	require.NoError(t, os.WriteFile(begun, nil, 0o600)) // It may have come so far, or not.
	require.NoError(t, program.restore(Text("three\n")))
	want(1, "one\ntwo\nthree\n")
	program.Prepare()
	waits := program.ahead.cmd
	require.NoError(t, waits.Process.Signal(unix.SIGSTOP))
	program.Close()
	program.Close()
	if waits.ProcessState == nil || program.ahead != nil {
		t.Error("it has not ended")
	}
}

// TestPrepared: a program that waits knows nothing of the tables yet, and keeps nobody from changing them. It changes nothing where its input
// ends, as with this process.
func TestPrepared(t *testing.T) {
	t.Parallel()
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				k := findProgram(t, v, plan.IPv4)
				defer k.Close()
				assert.NoError(t, k.Restore(Text("*nat\n:GOES - [0:0]\n:STAYS - [0:0]\n-A STAYS -j ACCEPT\nCOMMIT\n")))
				k.Prepare()
				if !assert.NotNil(t, k.ahead) {
					return
				}
				other := "iptables-" + string(v) + " -t nat " // It does not wait for a lock.
				sh(t, other+"-X GOES")
				sh(t, other+"-N NEW")
				sh(t, other+"-I STAYS -j RETURN")
				assert.NoError(t, k.Restore(Text("*nat\n:GOES - [0:0]\n-A GOES -j NEW\n-D STAYS -j ACCEPT\nCOMMIT\n")))
				assert.Nil(t, k.ahead)
				nat, err := k.Save(t.Context(), names.NAT)
				assert.NoError(t, err)
				assert.Equal(t, []string{"-j NEW"}, nat["GOES"])
				assert.Equal(t, []string{"-j RETURN"}, nat["STAYS"])

				generation := k.Generation()
				k.Prepare()
				assert.NoError(t, k.ahead.input.Close())
				assert.NoError(t, k.ahead.cmd.Wait())
				assert.Empty(t, k.ahead.output.String())
				assert.Equal(t, generation, k.Generation())
			})
		})
	}
}

// TestVersion: what programs say of themselves, and those that say nothing in time.
func TestVersion(t *testing.T) {
	dir := t.TempDir()
	for i, c := range []struct {
		script string
		want   string
	}{
		{"echo 'iptables v1.8.9 (nf_tables)'", "{[1 8 9] nft} <nil>"},
		{"echo 'ip6tables v1.8.10 (legacy)'", "{[1 8 10] legacy} <nil>"},
		{"echo 'iptables v1.6.1'", "{[1 6 1] legacy} <nil>"},
		{"echo 'iptables v1.6.2'", "{[1 6 2] legacy} <nil>"},
		{"echo nothing", `{[0 0 0] } asking PATH for its version: it says "nothing"`},
		{"exit 3", "{[0 0 0] } asking PATH for its version: exit status 3"},
		{"sleep 5 & exec sleep 1000", "{[0 0 0] } asking PATH for its version: it was ended, since it did not end by itself within 3s"},
	} {
		path := filepath.Join(dir, fmt.Sprint(i))
		nstest.Script(t, path, c.script+"\n")
		limit := 3 * time.Minute
		if strings.HasPrefix(c.script, "sleep") {
			limit = 3 * time.Second
		}
		v, err := askVersion(path, limit)
		if got := strings.ReplaceAll(fmt.Sprint(v, " ", err), path, "PATH"); got != c.want {
			t.Errorf("%s: got %s, want %s", c.script, got, c.want)
		}
	}
}

// TestRead: of a table that changes while it is read in parts, each part is as it is then, and what has gone is left out; the legacy
// variant has read all of it before. Rules that only nft can read are reported at the end.
func TestRead(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			nstest.Run(t, func() {
				k := findProgram(t, v, plan.IPv4)
				var told []NativeRules
				k.OnNativeRules = func(n NativeRules) { told = append(told, n) }
				assert.NoError(t, k.Restore(Text("*nat\n:A - [0:0]\n:B - [0:0]\n:C - [0:0]\n-A A -j RETURN\n-A B -j RETURN\nCOMMIT\n")))
				sh(t, fmt.Sprintf("iptables-%s -t nat -A POSTROUTING -j C", v))
				r, err := k.Read(t.Context(), names.NAT)
				if !assert.NoError(t, err) {
					return
				}
				part := func(want Content, list ...string) {
					t.Helper()
					got, err := r.Chains(t.Context(), list)
					assert.NoError(t, err)
					assert.Equal(t, want, got)
				}
				assert.Subset(t, r.Names, []string{"A", "B", "C", "POSTROUTING"})
				part(Content{"A": {"-j RETURN"}}, "A", "OTHER")
				assert.NoError(t, k.Restore(Text("*nat\n:A - [0:0]\n:B - [0:0]\n-X A\n-A B -j ACCEPT\nCOMMIT\n")))
				if v == Legacy {
					part(Content{"A": {"-j RETURN"}, "B": {"-j RETURN"}, "C": nil}, "A", "B", "C")
					return
				}
				part(Content{"B": {"-j ACCEPT"}, "C": nil}, "A", "B", "C")
				sh(t, "nft add rule ip nat POSTROUTING masquerade")
				got, err := r.Chains(t.Context(), []string{"POSTROUTING"})
				if rules := got["POSTROUTING"]; err != nil || len(rules) != 2 || rules[0] != "-j C" || !Unread(rules[1]) || len(told) > 0 {
					t.Errorf("read %v, told of %v: %v", got, told, err)
				}
				r.End()
				assert.Equal(t, []NativeRules{{plan.IPv4, "nat", []string{"POSTROUTING"}}}, told)
			})
		})
	}
}

// TestReadHashes: of chains of ours, the legacy variant keeps only hashes. One that is as known has the rules that are known; of others, the
// table is read once more, at most.
func TestReadHashes(t *testing.T) {
	t.Parallel()
	for _, f := range plan.Families {
		nstest.Run(t, func() {
			k := findProgram(t, Legacy, f)
			a, b := "-s 192.0.2.1/32 -j RETURN", "-s 192.0.2.2/32 -j RETURN"
			if f == plan.IPv6 { // The program prints them with dots.
				a, b = "-s ::102:304/128 -j RETURN", "-s ::102:305/128 -j RETURN"
			}
			text := "*nat\n:KUBE-SVC-A - [0:0]\n:KUBE-SVC-B - [0:0]\n:KUBE-SVC-C - [0:0]\n:KUBE-SERVICES - [0:0]\n:OTHER - [0:0]\n"
			for _, chain := range []string{"KUBE-SVC-A", "KUBE-SERVICES", "OTHER"} {
				text += "-A " + chain + " " + a + "\n-A " + chain + " " + b + "\n"
			}
			assert.NoError(t, k.Restore(Text(text+"-A KUBE-SVC-C "+a+"\nCOMMIT\n")))
			r, err := k.Read(t.Context(), names.NAT)
			if !assert.NoError(t, err) {
				return
			}
			assert.NoError(t, k.Restore(Text("*nat\n:KUBE-SVC-C - [0:0]\n-X KUBE-SVC-C\n:KUBE-SERVICES - [0:0]\n:OTHER - [0:0]\nCOMMIT\n")))
			both := []string{a, b}
			list := []string{"KUBE-SVC-A", "KUBE-SVC-B", "KUBE-SVC-C", "KUBE-SERVICES", "OTHER", "KUBE-SVC-D"}
			save := k.SavePath
			k.SavePath = "/none" // Of those that are as known, nothing is read again.
			got, err := r.Chains(t.Context(), list[:2], Content{"KUBE-SVC-A": both})
			assert.NoError(t, err)
			assert.Equal(t, Content{"KUBE-SVC-A": both, "KUBE-SVC-B": nil}, got)
			k.SavePath = save
			got, err = r.Chains(t.Context(), list, Content{"KUBE-SVC-A": both, "KUBE-SERVICES": both})
			k.SavePath = "/none" // Nor is anything a second time.
			assert.NoError(t, err)
			assert.Equal(t, Content{"KUBE-SVC-A": both, "KUBE-SVC-B": nil, "KUBE-SERVICES": both, "OTHER": both}, got)
			assert.Same(t, &both[0], &got["KUBE-SVC-A"][0])
			got, err = r.Chains(t.Context(), list, Content{"KUBE-SVC-A": {b, a}, "KUBE-SVC-B": {a}})
			assert.NoError(t, err)
			assert.Equal(t, Content{"KUBE-SVC-A": both, "KUBE-SVC-B": nil, "KUBE-SERVICES": nil, "OTHER": both}, got)
		})
	}
}

// script returns the path of a shell script that takes the place of a program.
func script(t *testing.T, name, text string) string {
	path := filepath.Join(t.TempDir(), name)
	nstest.Script(t, path, text+"\n")
	return path
}

// otherChange is the command by which another program changes something.
const otherChange = "nft add table ip other; nft delete table ip other"

// programWithChains returns a Program whose table nat has some chains of one rule, and what the table holds.
func programWithChains(t *testing.T, n int) (*Program, Content) {
	k := findProgram(t, NFT, plan.IPv4)
	want := Content{}
	text := "*nat\n"
	for i := range n {
		name := fmt.Sprintf("KUBE-SVC-%d", i)
		want[name] = []string{fmt.Sprintf("-s 192.0.2.%d/32 -j RETURN", i)}
		text += fmt.Sprintf(":%s - [0:0]\n-A %s %s\n", name, name, want[name][0])
	}
	assert.NoError(t, k.Restore(Text(text+"COMMIT\n")))
	return k, want
}

// TestReadOld: a program that reads all tables to list one chain is not asked for parts of a table.
func TestReadOld(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		k, want := programWithChains(t, 3)
		k.RestorePath = script(t, "restore", "exit 1")
		for _, old := range []bool{true, false} {
			k.version.number = [3]int{1, 8, 7}
			if old {
				k.version.number = [3]int{1, 8, 4}
			}
			r, err := k.Read(t.Context(), names.NAT)
			if !assert.NoError(t, err) {
				return
			}
			got, err := r.Chains(t.Context(), slices.Collect(maps.Keys(want)))
			if old {
				assert.NoError(t, err)
				assert.Equal(t, want, got)
			} else {
				assert.Error(t, err)
			}
		}
	})
}

// TestSaveInParts: where iptables-nft-save does not end, as others change something all the time, and neither does the listing of many
// chains at once, fewer are listed at a time.
func TestSaveInParts(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		k, want := programWithChains(t, 40)
		k.SavePath = script(t, "save", otherChange+"; exec sleep 1000")
		k.RestorePath = script(t, "restore", `in=$(cat); [ $(echo "$in" | grep -c -- -S) -le 12 ] || { `+otherChange+
			`; exec sleep 1000; }; echo "$in" | iptables-nft-restore "$@"`)
		got, err := k.Save(t.Context(), names.NAT)
		assert.NoError(t, err)
		for name := range want {
			assert.Equal(t, want[name], got[name], name)
		}
		lines := 0
		assert.NoError(t, k.SaveCounters(t.Context(), func(string) { lines++ }))
		assert.GreaterOrEqual(t, lines, 80, "with counters")
	})
}

// TestSlowReading: on a machine on which each run of a program takes longer than partTime, whatever there is to read, parts do not become
// so small that a table takes hours: where nothing changes, they stay as they are, and where something does, they get more time.
func TestSlowReading(t *testing.T) {
	t.Parallel()
	const many = 40
	for _, tc := range []struct {
		name, first string // of the runs
		runs, most  int
		limit       time.Duration
	}{
		{"nothing changes", "sleep 1.2", 1, partChains, partTime},
		{"others change something", otherChange + "; exec sleep 1000", 3, many / 2, 2 * partTime},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				k, want := programWithChains(t, many)
				log := filepath.Join(t.TempDir(), "runs")
				k.SaveTime = time.Hour
				k.RestorePath = script(t, "restore", "[ -e "+log+" ]; first=$?; echo run >>"+log+"; [ $first = 0 ] || { "+tc.first+
					`; }; exec iptables-nft-restore "$@"`)
				r, err := k.chainReader(names.NAT, nil)
				if !assert.NoError(t, err) {
					return
				}
				got, err := r.read(t.Context(), slices.Collect(maps.Keys(want)))
				assert.NoError(t, err)
				assert.Equal(t, want, got)
				runs, err := os.ReadFile(log)
				assert.NoError(t, err)
				assert.Equal(t, tc.runs, strings.Count(string(runs), "run"), "runs of the program")
				assert.Equal(t, tc.most, r.most, "chains in one run")
				assert.Equal(t, tc.limit, r.limit, "time for one run")
			})
		})
	}
}

// TestInTime: a program is given up only where it takes too long and something has changed meanwhile.
func TestInTime(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func() {
		const limit = 10 * time.Millisecond
		failed := errors.New("failed")
		for _, tc := range []struct {
			name string
			run  func(context.Context) error
			late bool
			err  error
		}{
			// The reading takes ten times as long.
			{"slow", func(ctx context.Context) error { time.Sleep(10 * limit); return ctx.Err() }, false, nil},
			{"failed", func(context.Context) error { return failed }, false, failed},
			{"disturbed", func(ctx context.Context) error { sh(t, otherChange); <-ctx.Done(); return ctx.Err() }, true, context.Canceled},
		} {
			late, err := inTime(t.Context(), limit, tc.run)
			if late != tc.late || !errors.Is(err, tc.err) {
				t.Errorf("%s: %t, %v", tc.name, late, err)
			}
		}
		ended, cancel := context.WithCancel(t.Context())
		if late, err := inTime(ended, limit, func(ctx context.Context) error { cancel(); <-ctx.Done(); return ctx.Err() }); late || err == nil {
			t.Errorf("at the end: %t, %v", late, err)
		}
	})
}
