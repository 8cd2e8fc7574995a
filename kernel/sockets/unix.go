package sockets

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
)

// The layout of struct unix_diag_req and unix_diag_msg.
const (
	unixRequestLength = 24
	unixMessageLength = 16
	showName          = 1    // UDIAG_SHOW_NAME
	showUID           = 0x40 // UDIAG_SHOW_UID
	unixName          = 0    // UNIX_DIAG_NAME
	unixUID           = 7    // UNIX_DIAG_UID
)

// UserOf returns the user who owns the Unix socket with a name, by sock_diag. It returns -1 if there is none, and before Linux 5.3.
func UserOf(name string) int {
	c, err := netlink.Dial(unix.NETLINK_INET_DIAG)
	if err != nil {
		return -1
	}
	defer c.Close()
	request := make([]byte, unixRequestLength)
	request[0] = unix.AF_UNIX
	binary.NativeEndian.PutUint32(request[4:], 1<<stateListen|1<<stateClose)
	binary.NativeEndian.PutUint32(request[12:], showName|showUID)
	uid := -1
	// An error leaves it unknown.
	_ = c.Dump(netlink.Message{Type: unix.SOCK_DIAG_BY_FAMILY, Body: request}, func(message []byte) error {
		if len(message) < unixMessageLength {
			return nil
		}
		attributes := netlink.ByType(message[unixMessageLength:])
		if user := attributes[unixUID]; string(attributes[unixName]) == name && len(user) == 4 {
			uid = int(binary.NativeEndian.Uint32(user))
		}
		return nil
	})
	return uid
}
