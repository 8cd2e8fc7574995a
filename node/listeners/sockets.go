package listeners

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// socket is a socket that receives packets from any peer.
type socket struct{ sockets.Socket }

// dumpSockets lists the sockets of a protocol; none if the kernel does not know the protocol or can't list its sockets.
func dumpSockets(p plan.Protocol) ([]socket, error) {
	list, err := sockets.List(p)
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	var out []socket
	for _, s := range list {
		s.Waiting = 0 // The same socket is to be equal.
		out = append(out, socket{s})
	}
	return out, err
}

// families returns the families whose packets a socket receives.
func (s socket) families() []plan.Family {
	if s.Both {
		return plan.Families[:]
	}
	return []plan.Family{plan.FamilyOf(s.Addr)}
}

// where describes the socket's address for messages.
func (s socket) where() string {
	at := s.Addr.String()
	switch {
	case s.Both:
		at = "every address"
	case s.Everywhere():
		at = "every " + plan.FamilyOf(s.Addr).String() + " address"
	}
	return fmt.Sprintf("%s, port %d/%s", at, s.Port, s.Protocol)
}
