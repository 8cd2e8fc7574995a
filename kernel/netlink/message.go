package netlink

import (
	"encoding/binary"
	"fmt"
	"math"
	"syscall"

	"golang.org/x/sys/unix"
)

// Message is a request. Its body follows the netlink header.
type Message struct {
	Type, Flags uint16
	Body        []byte
}

// Header is the header of a message.
type Header struct {
	Type, Flags uint16
	Seq, Port   uint32
}

// Append appends a message with its header, as it goes over a socket.
func (m Message) Append(b []byte, seq uint32) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+len(m.Body)))
	b = binary.NativeEndian.AppendUint16(b, m.Type)
	b = binary.NativeEndian.AppendUint16(b, m.Flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0) // the port, which the kernel knows
	b = append(b, m.Body...)
	return append(b, padding[:align(len(m.Body))-len(m.Body)]...)
}

// Messages calls each with the messages in b, which hold what a socket received.
func Messages(b []byte, each func(h Header, body []byte)) error {
	for len(b) >= unix.SizeofNlMsghdr {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.SizeofNlMsghdr || n > len(b) {
			return fmt.Errorf("a netlink message claims to have %d bytes, of %d that arrived", n, len(b))
		}
		each(Header{
			Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
			Seq: binary.NativeEndian.Uint32(b[8:]), Port: binary.NativeEndian.Uint32(b[12:]),
		}, b[unix.SizeofNlMsghdr:n])
		b = b[min(align(n), len(b)):]
	}
	return nil
}

// maxErrno is the highest number of an error that all of the kernel shares. Numbers above it are a subsystem's own.
const maxErrno = 4095

// SubsystemError is an error that only the subsystem can explain, such as those of ipset.
type SubsystemError struct {
	Number int32
	// Request is the request with its header, in which the kernel may have marked what is wrong.
	Request []byte
}

func (e *SubsystemError) Error() string { return fmt.Sprintf("error %d of this subsystem", e.Number) }

// Outcome reads the body of a message of type NLMSG_ERROR or NLMSG_DONE. The number 0, or none at all, is success.
func Outcome(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	n := int32(binary.NativeEndian.Uint32(body))
	switch {
	case n >= 0 || n == math.MinInt32:
		return nil
	case n < -maxErrno:
		return &SubsystemError{Number: -n, Request: append([]byte(nil), body[4:]...)}
	}
	return syscall.Errno(-n)
}

// AtError is an error with the attribute of the request that the kernel objects to.
type AtError struct {
	// Offset is where in the body of the request the attribute begins.
	Offset int
	Err    error
}

func (e *AtError) Error() string { return e.Err.Error() }

// Unwrap returns the kernel's error.
func (e *AtError) Unwrap() error { return e.Err }

// located adds to the error in a message what the kernel says about its place: an attribute after the header of the request.
func located(h Header, body []byte, err error) error {
	const status, offset = 4, 2 // the length of the error's number, and NLMSGERR_ATTR_OFFS
	if h.Flags&unix.NLM_F_ACK_TLVS == 0 || h.Flags&unix.NLM_F_CAPPED == 0 || len(body) < status+unix.SizeofNlMsghdr {
		return err
	}
	raw := Attribute(body[status+unix.SizeofNlMsghdr:], offset)
	if len(raw) != 4 {
		return err
	}
	at := int(binary.NativeEndian.Uint32(raw)) - unix.SizeofNlMsghdr
	if at < 0 {
		return err
	}
	return &AtError{at, err}
}
