package conntracktest

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Kernel has flows and answers as the kernel does, except for what goes wrong on purpose.
type Kernel struct {
	sync.Mutex
	Flows   []Entry
	Dumps   []string // what was asked for: "17 10.96.0.10:53", or "all" without a filter
	Deleted int

	NoFilter    bool  // refuses to filter
	Interrupted int   // how many dumps say that they were interrupted
	DumpError   error // what ends a dump half-way, once
	DeleteError error // what each deletion fails with, until it is unset
	LostAnswer  error // what is received instead of the next answer to deletions, once
	OpenError   error // what a socket fails with, once
}

type socket struct {
	kernel  *Kernel
	answers [][]byte
	err     error
}

// Dial opens a socket.
func (k *Kernel) Dial() (*netlink.Conn, error) {
	k.Lock()
	defer k.Unlock()
	if err := k.OpenError; err != nil {
		k.OpenError = nil
		return nil, err
	}
	return netlink.NewConn(&socket{kernel: k}), nil
}

func (s *socket) Close() error { return nil }

func (s *socket) Receive(b []byte) (int, error) {
	if len(s.answers) == 0 {
		return 0, cmp.Or(s.err, errors.New("the test's kernel has nothing to say"))
	}
	n := copy(b, s.answers[0])
	s.answers = s.answers[1:]
	return n, nil
}

func (s *socket) Send(b []byte) error {
	s.kernel.Lock()
	defer s.kernel.Unlock()
	return netlink.Messages(b, func(h netlink.Header, body []byte) {
		switch h.Type {
		case subsystem | nl.IPCTNL_MSG_CT_GET:
			s.dump(h, body)
		case subsystem | nl.IPCTNL_MSG_CT_DELETE:
			s.remove(h, body)
		}
	})
}

func (s *socket) answer(seq uint32, m netlink.Message) {
	s.answers = append(s.answers, m.Append(nil, seq))
}

func (s *socket) outcome(kind, flags uint16, seq uint32, err error) {
	errno, _ := err.(syscall.Errno)
	s.answer(seq, netlink.Message{Type: kind, Flags: flags, Body: binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno)))})
}

func (s *socket) dump(h netlink.Header, request []byte) {
	k := s.kernel
	asked, filtered := describe(request)
	k.Dumps = append(k.Dumps, asked)
	if filtered && k.NoFilter {
		s.outcome(unix.NLMSG_ERROR, 0, h.Seq, syscall.EOPNOTSUPP)
		return
	}
	flags := uint16(unix.NLM_F_MULTI)
	if k.Interrupted > 0 {
		k.Interrupted--
		flags |= unix.NLM_F_DUMP_INTR
	}
	for i, e := range k.Flows {
		if i == len(k.Flows)/2 && k.DumpError != nil {
			s.err, k.DumpError = k.DumpError, nil
			return
		}
		src, dst, from, to := e.tuples()
		b := Header(plan.FamilyOf(src.Addr()))
		b = Tuple(b, nl.CTA_TUPLE_ORIG, e.Protocol, src, dst)
		b = Tuple(b, nl.CTA_TUPLE_REPLY, e.Protocol, from, to).BigEndian32(nl.CTA_ID, 1)
		s.answer(h.Seq, netlink.Message{Type: subsystem | nl.IPCTNL_MSG_CT_NEW, Flags: flags, Body: b})
	}
	s.outcome(unix.NLMSG_DONE, flags, h.Seq, nil)
}

// original reads the original direction of the flow that a request is about.
func original(request []byte) (protocol uint8, src, dst netip.AddrPort) {
	orig := netlink.Attribute(request[4:], nl.CTA_TUPLE_ORIG)
	ip := netlink.ByType(netlink.Attribute(orig, nl.CTA_TUPLE_IP))
	ports := netlink.ByType(netlink.Attribute(orig, nl.CTA_TUPLE_PROTO))
	end := func(v4, v6, port uint16) netip.AddrPort {
		addr, ok := netip.AddrFromSlice(ip[v4])
		if !ok {
			addr, _ = netip.AddrFromSlice(ip[v6])
		}
		return netip.AddrPortFrom(addr, uint16(netlink.BigEndian(ports[port])))
	}
	return uint8(netlink.Number(ports[nl.CTA_PROTO_NUM])), end(nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC, nl.CTA_PROTO_SRC_PORT),
		end(nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST, nl.CTA_PROTO_DST_PORT)
}

func describe(request []byte) (asked string, filtered bool) {
	if netlink.Attribute(request[4:], attrFilter) == nil {
		return "all", false
	}
	protocol, src, dst := original(request)
	asked = fmt.Sprint(protocol)
	if dst.Addr().IsValid() {
		asked += " " + dst.Addr().String()
	}
	if dst.Port() != 0 {
		asked += fmt.Sprintf(" :%d", dst.Port())
	}
	if src.Addr().IsValid() {
		asked += " from " + src.Addr().String()
	}
	if src.Port() != 0 {
		asked += fmt.Sprintf(" from :%d", src.Port())
	}
	if netlink.BigEndian(netlink.Attribute(request[4:], attrStatusMask)) == statusReplied|statusDstNAT {
		asked += " early"
	}
	return asked, true
}

func (s *socket) remove(h netlink.Header, request []byte) {
	k := s.kernel
	protocol, src, dst := original(request)
	found := slices.IndexFunc(k.Flows, func(e Entry) bool {
		entrySrc, entryDst, _, _ := e.tuples()
		return e.Protocol == protocol && src == entrySrc && dst == entryDst
	})
	err := k.DeleteError
	switch {
	case err != nil:
	case found < 0:
		err = syscall.ENOENT
	default:
		k.Flows = slices.Delete(k.Flows, found, found+1)
		k.Deleted++
	}
	if k.LostAnswer != nil && h.Flags&unix.NLM_F_ACK != 0 {
		s.err, k.LostAnswer = k.LostAnswer, nil
		return
	}
	if err != nil || h.Flags&unix.NLM_F_ACK != 0 {
		s.outcome(unix.NLMSG_ERROR, 0, h.Seq, err)
	}
}

// Wait waits until something is so.
func (k *Kernel) Wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		k.Lock()
		done := ok()
		k.Unlock()
		if done {
			return
		}
		if time.Since(start) > time.Minute {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}
