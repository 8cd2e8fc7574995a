package flows

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"nodeproxy/plan"
)

// fakeKernel holds flows and answers as the kernel does, except for what goes wrong on purpose.
type fakeKernel struct {
	mu      sync.Mutex
	flows   []entry
	dumps   []string // what was asked for: "17 10.96.0.10:53", or "all" without a filter
	deleted int

	noFilter    bool  // refuses to filter
	interrupted int   // how many dumps say that they were interrupted
	dumpError   error // what ends a dump half-way, once
	deleteError error // what each deletion fails with, until it is unset
	lostAnswer  error // what Receive returns instead of the next answer to deletions, once
	openError   error // what a socket fails with, once
}

type fakeConn struct {
	kernel  *fakeKernel
	answers [][]byte
	err     error
}

func (k *fakeKernel) open() (conn, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.openError; err != nil {
		k.openError = nil
		return nil, err
	}
	return &fakeConn{kernel: k}, nil
}

func (c *fakeConn) Close() error { return nil }

func (c *fakeConn) Receive(b []byte) (int, error) {
	if len(c.answers) == 0 {
		return 0, cmp.Or(c.err, errors.New("the test's kernel has nothing to say"))
	}
	n := copy(b, c.answers[0])
	c.answers = c.answers[1:]
	return n, nil
}

func (c *fakeConn) Send(b []byte) error {
	c.kernel.mu.Lock()
	defer c.kernel.mu.Unlock()
	for len(b) > 0 {
		length := binary.NativeEndian.Uint32(b)
		h := header{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:])}
		switch h.typ {
		case msgGet:
			c.dump(h, b[headerLen:length])
		case msgDelete:
			c.remove(h, b[headerLen:length])
		}
		b = b[length:]
	}
	return nil
}

func (c *fakeConn) errno(typ, flags uint16, seq uint32, err error) {
	errno, _ := err.(syscall.Errno)
	m := message(binary.NativeEndian.AppendUint32(nil, 0))
	m = binary.NativeEndian.AppendUint16(m, typ)
	m = binary.NativeEndian.AppendUint16(m, flags)
	m = binary.NativeEndian.AppendUint32(m, seq)
	m = binary.NativeEndian.AppendUint32(m, 0)
	m = binary.NativeEndian.AppendUint32(m, uint32(-int32(errno)))
	m.finish(0)
	c.answers = append(c.answers, m)
}

func (c *fakeConn) dump(h header, request []byte) {
	k := c.kernel
	asked, filtered := describe(request)
	k.dumps = append(k.dumps, asked)
	if filtered && k.noFilter {
		c.errno(syscall.NLMSG_ERROR, 0, h.seq, syscall.EOPNOTSUPP)
		return
	}
	flags := uint16(syscall.NLM_F_MULTI)
	if k.interrupted > 0 {
		k.interrupted--
		flags |= dumpFlagInterrupted
	}
	for i, e := range k.flows {
		if i == len(k.flows)/2 && k.dumpError != nil {
			c.err, k.dumpError = k.dumpError, nil
			return
		}
		src, dst, from, to := e.tuples()
		m := newMessage(msgNew, flags, h.seq, plan.FamilyOf(src.Addr()))
		m = appendTuple(m, attrOrig, e.protocol, src, dst)
		m = appendTuple(m, attrReply, e.protocol, from, to).attr(attrID, 0, 0, 0, 1)
		m.finish(0)
		c.answers = append(c.answers, m)
	}
	c.errno(syscall.NLMSG_DONE, flags, h.seq, nil)
}

func describe(request []byte) (asked string, filtered bool) {
	var orig tuple
	early := false
	attributes(request[nfgenmsgLen:], func(typ uint16, payload []byte) {
		switch typ {
		case attrOrig:
			orig.parse(payload)
		case attrFilter:
			filtered = true
		case attrStatusMask:
			early = payload[3] == statusReplied|statusDstNAT
		}
	})
	if !filtered {
		return "all", false
	}
	asked = fmt.Sprint(orig.protocol)
	if orig.dstAddr.IsValid() {
		asked += " " + orig.dstAddr.String()
	}
	if orig.dstPort != 0 {
		asked += fmt.Sprintf(" :%d", orig.dstPort)
	}
	if orig.srcAddr.IsValid() {
		asked += " from " + orig.srcAddr.String()
	}
	if orig.srcPort != 0 {
		asked += fmt.Sprintf(" from :%d", orig.srcPort)
	}
	if early {
		asked += " early"
	}
	return asked, true
}

func (c *fakeConn) remove(h header, request []byte) {
	k := c.kernel
	var orig tuple
	attributes(request[nfgenmsgLen:], func(typ uint16, payload []byte) {
		if typ == attrOrig {
			orig.parse(payload)
		}
	})
	found := slices.IndexFunc(k.flows, func(e entry) bool {
		src, dst, _, _ := e.tuples()
		return e.protocol == orig.protocol && src == orig.src() && dst == orig.dst()
	})
	err := k.deleteError
	switch {
	case err != nil:
	case found < 0:
		err = syscall.ENOENT
	default:
		k.flows = slices.Delete(k.flows, found, found+1)
		k.deleted++
	}
	if k.lostAnswer != nil && h.flags&syscall.NLM_F_ACK != 0 {
		c.err, k.lostAnswer = k.lostAnswer, nil
		return
	}
	if err != nil || h.flags&syscall.NLM_F_ACK != 0 {
		c.errno(syscall.NLMSG_ERROR, 0, h.seq, err)
	}
}

// staleFlows are n flows to a Service whose endpoint is another one by now.
func staleFlows(n int) []entry {
	e := entry{protocol: protoUDP, dst: "10.96.0.10:53", from: "10.244.2.2:5353"}
	return fromPort("10.244.1.9", slices.Repeat([]entry{e}, n), 1)
}

// fakeReconciler knows a UDP Service at 10.96.0.10:53, on a machine without addresses.
func fakeReconciler(k *fakeKernel, change func(*Config)) (*Reconciler, *plan.Plan) {
	r := newReconciler(func(c *Config) {
		c.Families = []plan.Family{plan.IPv4}
		if change != nil {
			change(c)
		}
	})
	r.open = k.open
	r.local = func(plan.Family) (*addresses, error) { return &addresses{}, nil }
	p := plan.New(plan.Node{}, plan.Settings{})
	p.Set(service("dns", plan.UDP, "10.96.0.10:53", "10.244.1.1:5353"))
	r.Update(p, nil)
	return r, p
}

// wait waits until something is so.
func (k *fakeKernel) wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		k.mu.Lock()
		done := ok()
		k.mu.Unlock()
		if done {
			return
		}
		if time.Since(start) > 5*time.Second {
			t.Fatalf("%s: not within 5s", what)
		}
	}
}
