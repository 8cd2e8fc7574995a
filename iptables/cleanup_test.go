package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
)

// TestCleanupWithoutNFTables: the variant nft holds nothing where the kernel has no nf_tables, or no netfilter sockets at all, and
// its programs fail there.
func TestCleanupWithoutNFTables(t *testing.T) {
	t.Parallel()
	number := bpf.LoadAbsolute{Off: 0, Size: 4}    // of the system call, in struct seccomp_data
	protocol := bpf.LoadAbsolute{Off: 32, Size: 4} // the low half of its third argument
	fails := func(errno unix.Errno) bpf.Instruction {
		return bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(errno)}
	}
	allowed := bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}
	for name, filter := range map[string][]bpf.Instruction{
		"no netfilter sockets": {
			number, bpf.JumpIf{Val: unix.SYS_SOCKET, SkipFalse: 3},
			protocol, bpf.JumpIf{Val: unix.NETLINK_NETFILTER, SkipFalse: 1},
			fails(unix.EPROTONOSUPPORT), allowed,
		},
		"no nf_tables": { // The real answer comes later, and is the same error.
			number, bpf.JumpIf{Val: unix.SYS_SENDTO, SkipTrue: 1}, bpf.JumpIf{Val: unix.SYS_SENDMSG, SkipFalse: 1},
			fails(unix.EINVAL), allowed,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func() {
				if err := filterCalls(filter); err != nil {
					t.Error(err)
					return
				}
				if out, err := exec.Command("iptables-nft-save", "-t", "nat").CombinedOutput(); err == nil {
					t.Errorf("iptables-nft-save does not fail: %s", out)
				}
				for _, dry := range []bool{true, false} {
					if lines, err := xtables.Cleanup(t.Context(), dry, xtables.NFT); err != nil || len(lines) > 0 {
						t.Errorf("%q, %v", lines, err)
					}
				}
			})
		})
	}
}

// filterCalls puts a seccomp filter before the system calls of this thread, and of the programs that it starts, for good.
func filterCalls(filter []bpf.Instruction) error {
	raw, err := bpf.Assemble(filter)
	if err != nil {
		return err
	}
	var code []unix.SockFilter
	for _, i := range raw {
		code = append(code, unix.SockFilter{Code: i.Op, Jt: i.Jt, Jf: i.Jf, K: i.K})
	}
	prog := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog))); errno != 0 {
		return errno
	}
	return nil
}

// othersLead makes a kernel with many chains of ours, to some of which rules of somebody else's lead.
func othersLead(n int, to ...int) *xtablestest.Kernel {
	k := xtablestest.New()
	nat := k.Tables[names.NAT]
	for i := range n {
		nat[fmt.Sprintf("%s%05d", names.PrefixCluster, i)] = []string{fmt.Sprintf("-j %s%05d", names.PrefixEndpoint, i)}
		nat[fmt.Sprintf("%s%05d", names.PrefixEndpoint, i)] = []string{"-j RETURN"}
	}
	for _, i := range to {
		nat["OTHERS"] = append(nat["OTHERS"], fmt.Sprintf("-j %s%05d", names.PrefixCluster, i))
	}
	return k
}

// oursLeft lists the chains of table nat that are ours.
func oursLeft(held xtables.Content) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(held)), func(name string) bool { return !names.IsOurs(names.NAT, name) })
}

// TestCleanupOfWhatOthersLeadTo: chains that others' rules lead to stay, and are named; among many they are found by few runs of
// iptables-restore, and none is made again that is gone.
func TestCleanupOfWhatOthersLeadTo(t *testing.T) {
	t.Parallel()
	const n = 5000 // Services, of two chains each
	for _, batch := range []int{0, xtables.MaxNames} {
		for _, others := range [][]int{{}, {n / 3}, {0, n / 2, n/2 + 1, n - 1}} {
			k := othersLead(n, others...)
			w := &xtables.Writer{Kernel: k, MaxNames: batch}
			_, err := w.Cleanup(t.Context(), []names.Table{names.NAT}, false)
			var want []string
			for _, i := range others {
				name := fmt.Sprintf("%s%05d", names.PrefixCluster, i)
				want = append(want, name)
				if err == nil || !strings.Contains(err.Error(), "chain "+name+" of table nat stays, since rules in OTHERS lead to it: ") {
					t.Errorf("batches of %d: %s is not named: %v", batch, name, err)
				}
			}
			if len(others) == 0 && err != nil {
				t.Errorf("batches of %d: %v", batch, err)
			}
			if got := oursLeft(k.Tables[names.NAT]); !slices.Equal(got, want) {
				t.Errorf("batches of %d: %d chains are left, want %v", batch, len(got), want)
			}
			if got := k.Tables[names.NAT]["OTHERS"]; len(got) != len(others) {
				t.Errorf("others have left %q", got)
			}
			// For each, the halves that it is in and their other halves; then whether the kernel takes anything, and the chain once more.
			limit := 2 + 2*len(others)*(bits.Len(2*n)+1)
			if batch > 0 {
				limit += 2 * 2 * n / batch
			}
			if len(k.Restores) > limit {
				t.Errorf("batches of %d, others lead to %d: %d runs, want no more than %d", batch, len(others), len(k.Restores), limit)
			}
		}
	}
}

// stubborn is a kernel that after some restores fails each with an error of its own.
type stubborn struct {
	*xtablestest.Kernel
	takes int
	err   error
	then  func()
}

func (k *stubborn) Restore(input xtables.Input) error {
	if len(k.Restores) < k.takes {
		return k.Kernel.Restore(input)
	}
	k.Restores = append(k.Restores, input.String())
	k.then()
	return k.err
}

// TestCleanupGivesUp: nothing is searched for where all fails, where the kernel has not refused anything, or once it is to end.
func TestCleanupGivesUp(t *testing.T) {
	t.Parallel()
	refused := &xtables.RestoreError{Program: "fake", Message: "refused", Err: errors.New("exit status 1")}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, tc := range []struct {
		name            string
		ctx             context.Context
		takes, restores int
		err, want       error
		then            func()
	}{
		{"nothing is taken", t.Context(), 0, 1, refused, refused, func() {}},
		{"it hangs at once", t.Context(), 0, 1, errors.ErrUnsupported, errors.ErrUnsupported, func() {}},
		{"it hangs in the search", t.Context(), 4, 5, errors.ErrUnsupported, errors.ErrUnsupported, func() {}},
		{"it is to end in the search", ctx, 4, 5, refused, context.Canceled, cancel},
	} {
		k := &stubborn{othersLead(100, 20), tc.takes, tc.err, tc.then}
		_, err := (&xtables.Writer{Kernel: k}).Cleanup(tc.ctx, []names.Table{names.NAT}, false)
		if !errors.Is(err, tc.want) || len(k.Restores) != tc.restores {
			t.Errorf("%s: after %d runs: %v; want %d and %v", tc.name, len(k.Restores), err, tc.restores, tc.want)
		}
	}
}

// TestCleanupOfRealTables: the kernel refuses to remove a chain that somebody else's rule leads to, by either variant and in both
// families; all other chains go.
func TestCleanupOfRealTables(t *testing.T) {
	if !nstest.Process(t) {
		return
	}
	const wanted = names.PrefixCluster + "07"
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		for _, f := range plan.Families {
			k, err := xtables.Find(v, f)
			require.NoError(t, err)
			var input strings.Builder
			input.WriteString("*nat\n:OTHERS - [0:0]\n")
			for i := range 20 {
				fmt.Fprintf(&input, ":%s%02d - [0:0]\n:%s%02d - [0:0]\n", names.PrefixCluster, i, names.PrefixEndpoint, i)
				fmt.Fprintf(&input, "-A %s%02d -j %s%02d\n", names.PrefixCluster, i, names.PrefixEndpoint, i)
			}
			require.NoError(t, k.Restore(xtables.Text(input.String()+"-A OTHERS -j "+wanted+"\nCOMMIT\n")))
			lines, err := xtables.Cleanup(t.Context(), false, v)
			if len(lines) != 40 || err == nil || strings.Count(err.Error(), " stays") != 1 ||
				!strings.Contains(err.Error(), "chain "+wanted+" of table nat stays, since rules in OTHERS lead to it: ") {
				t.Errorf("%s, %s: %d lines, %v", v, f, len(lines), err)
			}
			held, err := k.Save(t.Context(), names.NAT)
			if left := oursLeft(held); err != nil || !slices.Equal(left, []string{wanted}) || len(held["OTHERS"]) != 1 {
				t.Errorf("%s, %s: %q are left, %v", v, f, left, err)
			}
			assert.NoError(t, k.Restore(xtables.Text("*nat\n-F OTHERS\nCOMMIT\n")))
			if lines, err := xtables.Cleanup(t.Context(), false, v); len(lines) != 1 || err != nil {
				t.Errorf("%s, %s: %q, %v", v, f, lines, err)
			}
		}
	}
}

// unreadable is a kernel of which table mangle can't be read.
type unreadable struct{ xtables.Kernel }

func (u unreadable) Read(ctx context.Context, t names.Table) (*xtables.Reading, error) {
	if t == names.Mangle {
		return nil, errors.New("a match that is not installed")
	}
	return u.Kernel.Read(ctx, t)
}

// TestMangleUnreadable: in the end, a node is in sync where table mangle can't be read, in which this mode has nothing.
func TestMangleUnreadable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e, k := fakeEngine(plan.IPv4)
		e.Kernel = unreadable{k}
		fails := func() {
			t.Helper()
			require.ErrorContains(t, e.Sync(t.Context(), &plan.Plan{}, plan.Everything()), "a match that is not installed")
		}
		for range 2 {
			e.current = nil
			fails()
			time.Sleep(mangleTime - 1) // in simulated time
			fails()
			time.Sleep(time.Nanosecond) // in simulated time
			program(t, e, &plan.Plan{}, plan.Everything())
		}
		e.current = nil
		k.Tables[names.NAT]["KUBE-LOAD-BALANCER"] = nil // There is something of another mode.
		fails()
		time.Sleep(mangleTime) // in simulated time
		fails()
	})
}
