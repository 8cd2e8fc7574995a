package iptables

import (
	"os/exec"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
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
					if lines, err := Cleanup(t.Context(), dry, NFT); err != nil || len(lines) > 0 {
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
