package nstest

import (
	"testing"

	"golang.org/x/sys/unix"
)

// DropNetAdmin takes the capability CAP_NET_ADMIN from the thread of a test that has called Enter. The thread ends with the test.
func DropNetAdmin(t testing.TB) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var rights [2]unix.CapUserData
	if err := unix.Capget(&header, &rights[0]); err != nil {
		t.Fatal(err)
	}
	rights[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &rights[0]); err != nil {
		t.Fatal(err)
	}
}
