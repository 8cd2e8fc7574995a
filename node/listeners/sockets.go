package listeners

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
)

// socket is one that takes what comes in from anywhere.
type socket struct{ sockets.Socket }

// dumpSockets lists the sockets of a protocol. A kernel that does not know the protocol, or can't show its sockets, has none to
// show.
func dumpSockets(p plan.Protocol) ([]socket, error) {
	list, err := sockets.List(p)
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	var out []socket
	for _, s := range list {
		out = append(out, socket{s})
	}
	return out, err
}

// families are those whose packets a socket takes.
func (s socket) families() []plan.Family {
	if s.Both {
		return plan.Families[:]
	}
	return []plan.Family{plan.FamilyOf(s.Addr)}
}

// where names the place for people.
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
