package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"nodeproxy/inspect"
	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/netlink"
)

// refuseVariable names an IPv4 address. A nodeproxy that a test has started with it adds no element of nftables for a TCP port of that
// address without the kernel refusing it.
const refuseVariable = "NODEPROXY_TEST_REFUSE"

// notification is struct seccomp_notif, and response struct seccomp_notif_resp.
type (
	notification struct {
		id             uint64
		thread, _      uint32
		_              int32
		_              uint32
		_              uint64
		_, text, bytes uint64
		_              [3]uint64
	}
	response struct {
		id    uint64
		_     int64
		_     int32
		flags uint32
	}
)

// refuseElements makes the kernel refuse elements of an address from now on. A filter has each sendto of this process wait until the
// message has been looked at, and an element of the address gets a key of a type that the kernel does not know. So it is the kernel
// that refuses it, with the answer of the kernel, and the program is what it always is.
func refuseElements(a netip.Addr) error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the system call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SENDTO, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	memory, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	listener, _, no := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
	if no != 0 {
		return fmt.Errorf("seccomp: %w", no)
	}
	go func() {
		for {
			var n notification
			switch _, _, no := unix.Syscall(unix.SYS_IOCTL, listener, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&n))); no {
			case 0:
			case unix.EINTR, unix.ENOENT: // A signal interrupted a thread, which calls again.
				continue
			default:
				panic(no)
			}
			if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", n.thread)); err == nil { // A program that it runs has the filter too.
				b := make([]byte, n.bytes)
				if _, err := memory.ReadAt(b, int64(n.text)); err == nil && spoil(b, a) {
					if _, err := memory.WriteAt(b, int64(n.text)); err != nil {
						panic(err)
					}
				}
			}
			r := response{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
			_, _, _ = unix.Syscall(unix.SYS_IOCTL, listener, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&r)))
		}
	}()
	return nil
}

// spoil changes the elements of an address that messages add, and reports whether there are any.
func spoil(b []byte, a netip.Addr) (found bool) {
	frontend := append(a.AsSlice(), unix.IPPROTO_TCP, 0, 0, 0) // the key begins with it
	_ = netlink.Messages(b, func(h netlink.Header, body []byte) {
		if h.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWSETELEM {
			return
		}
		const header = 4
		list := netlink.Attribute(body[header:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for _, element := range netlink.Attributes(list) {
			key := netlink.Attribute(element, unix.NFTA_SET_ELEM_KEY)
			if bytes.HasPrefix(netlink.Attribute(key, unix.NFTA_DATA_VALUE), frontend) {
				const kind, unknown = 2, 0x7f // where an attribute has its type
				key[kind] = unknown
				found = true
			}
		}
	})
	return found
}

// TestRefusedByNFTables: the kernel refuses what is of one Service. It is named, probes take the node for healthy, every other Service
// is programmed, even if it came with it or changes later, and so is this one once its owner has mended it.
func TestRefusedByNFTables(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can change rules")
	}
	c := startChecked(t, []string{refuseVariable + "=10.96.0.66"}, "--mode=nftables")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "here") })}
	go func() { _ = server.Serve(c.endpoint) }()
	t.Cleanup(func() { server.Close() })

	// write gives the Services bad and late an address each, and waits until everything has a state.
	write := func(bad, late, state string) {
		t.Helper()
		text := checkedService
		for name, addr := range map[string]string{"bad": bad, "late": late} {
			text += "---" + strings.NewReplacer("name: web", "name: "+name, "service-name: web", "service-name: "+name, "10.96.0.10", addr,
				"type: NodePort, ", "", ", nodePort: 30080", "").Replace(checkedService[:strings.LastIndex(checkedService, "---")])
		}
		c.write(text)
		want := []string{"bad " + bad + " " + state, "late " + late + " programmed", "web 10.96.0.10 programmed"}
		var got []string
		defer func() {
			if t.Failed() {
				t.Logf("there are %q, want %q", got, want)
			}
		}()
		eventually(t, "the Services are as they should be", func() bool {
			got = nil
			for _, sp := range c.services() {
				got = append(got, sp.Name+" "+sp.ClusterIP+" "+sp.State)
			}
			slices.Sort(got)
			return slices.Equal(got, want)
		})
		for _, at := range []string{"10.96.0.10", late, "192.0.2.1:30080"} {
			if text, err := curl("http://" + at); text != "here" {
				t.Errorf("%s answers %q, %v", at, text, err)
			}
		}
		if !ready() {
			t.Error("it is not ready")
		}
	}
	for _, late := range []string{"10.96.0.67", "10.96.0.68"} {
		write("10.96.0.66", late, inspect.Refused)
		c.says(1, "get findings", "the kernel refuses port", "default/bad")
		if text, err := curl("http://10.96.0.66", "--max-time", "0.5"); err == nil {
			t.Errorf("what is refused answers %q", text)
		}
	}
	write("10.96.0.69", "10.96.0.68", inspect.Programmed)
	if text, err := curl("http://10.96.0.69"); text != "here" {
		t.Errorf("what was refused answers %q, %v", text, err)
	}
	if text, _ := c.ask("get", "findings"); strings.Contains(text, "refuses") {
		t.Errorf("what was refused is still found: %s", text)
	}
	nstest.Exec(t, "nft", "get", "element", "ip", "nodeproxy", "services", "{ 10.96.0.69 . tcp . 80 }")
}
