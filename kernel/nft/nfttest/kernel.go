// Package nfttest has nf_tables of a machine for tests: what the kernel refuses and answers, in simulated time (testing/synctest).
package nfttest

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Kernel is nf_tables of a network namespace. It takes the messages that the kernel takes, refuses what the kernel refuses, with the same
// errors, and answers in the same form. It does not know objects, flowtables, timeouts and intervals. The mutex guards all fields.
type Kernel struct {
	sync.Mutex
	// Draw returns a random time below a limit: how long something takes. Without it, nothing takes time.
	Draw func(what string, limit time.Duration) time.Duration
	// Changed is called after each transaction that has changed tables of a family, with the Kernel locked.
	Changed func(Change)
	// Spared is the name of a table whose transactions meet no trouble.
	Spared string

	tables     []*table
	handle     uint64 // of the last rule
	generation uint32
	ports      uint32
	trouble    Trouble
	until      time.Time // when the trouble ends
	listeners  []*listener
}

// Change is what a transaction has changed in the tables of a family.
type Change struct {
	Family plan.Family
	Tables map[string]bool // by name
	By     *Process
	Input  string // the messages
}

// Still returns a Kernel with the same tables, to read as long as k is locked. Nothing takes time there.
func (k *Kernel) Still() *Kernel { return &Kernel{tables: k.tables} }

// Trouble is what happens to programs that read or write tables.
type Trouble int

// The troubles.
const (
	Refused    Trouble = iota // nothing is taken
	Unanswered                // transactions are carried out, but the answer is lost
	Unreadable                // answers to questions are lost
	Slow                      // reading takes seconds
	Busy                      // other programs commit so often that each listing is interrupted
	Deaf                      // notifications are lost
	Troubles                  // is how many there are
)

func (t Trouble) String() string {
	return [...]string{"refuses all", "loses outcomes", "loses answers", "slow to read", "interrupts listings", "loses notifications"}[t]
}

// Suffer lets a trouble happen until some time has passed.
func (k *Kernel) Suffer(what Trouble, long time.Duration) {
	k.Lock()
	defer k.Unlock()
	k.trouble, k.until = what, time.Now().Add(long)
}

func (k *Kernel) suffers(what Trouble) bool { return k.trouble == what && time.Now().Before(k.until) }

// takes lets time pass.
func (k *Kernel) takes(what string, limit time.Duration) {
	if k.Draw != nil {
		time.Sleep(k.Draw(what, limit)) // how long it takes
	}
}

// Process is a process that has sockets.
type Process struct {
	*Kernel
	// Instant says that nothing that it does takes time or meets trouble.
	Instant bool
	dead    bool
	written int
}

// Start starts a process.
func (k *Kernel) Start() *Process { return &Process{Kernel: k} }

// Kill ends a process. It writes nothing more.
func (p *Process) Kill() {
	p.Lock()
	defer p.Unlock()
	p.dead = true
}

// Dead reports whether the process has been killed. The Kernel must be locked.
func (p *Process) Dead() bool { return p.dead }

// Written is how many transactions of the process have added something. Others have removed what is not used any more, and the like.
func (p *Process) Written() int {
	p.Lock()
	defer p.Unlock()
	return p.written
}

func (p *Process) takes(what string, limit time.Duration) {
	if !p.Instant {
		p.Kernel.takes(what, limit)
	}
}

// suffers reports whether the process meets a trouble. The Kernel must be locked.
func (p *Process) suffers(what Trouble) bool { return !p.Instant && p.Kernel.suffers(what) }

// Open opens a socket for requests.
func (p *Process) Open() (netlink.Socket, error) {
	p.Lock()
	defer p.Unlock()
	p.ports++
	return &socket{Process: p, port: p.ports}, nil
}

var errDead = errors.New("this process has been killed")

// socket is one for requests. Its answers wait in order.
type socket struct {
	*Process
	port    uint32
	answers [][]byte
	lost    bool // answers have been lost
	dump    *dump
}

// Port is as that of netlink's sockets.
func (s *socket) Port() uint32 { return s.port }

func (s *socket) Close() error { return nil }

type message struct {
	netlink.Header
	body []byte
}

// Send is as that of netlink.Socket.
func (s *socket) Send(b []byte) error {
	var list []message
	err := netlink.Messages(b, func(h netlink.Header, body []byte) { list = append(list, message{h, slices.Clone(body)}) })
	if err != nil {
		return err
	}
	if len(list) > 0 && list[0].Type == unix.NFNL_MSG_BATCH_BEGIN {
		s.takes("writing", 3*time.Millisecond)
		err := s.transact(list)
		s.takes("writing", time.Millisecond)
		return err
	}
	limit := time.Millisecond
	s.Lock()
	if s.suffers(Slow) {
		limit = time.Second
	}
	s.Unlock()
	s.takes("reading", limit)
	s.Lock()
	defer s.Unlock()
	for _, m := range list {
		s.ask(m)
	}
	return nil
}

// Receive is as that of netlink.Socket. Parts of a listing are as things are then.
func (s *socket) Receive(b []byte) (int, error) {
	if s.dump != nil && len(s.answers) == 0 {
		s.takes("listing", 200*time.Microsecond)
	}
	s.Lock()
	defer s.Unlock()
	switch {
	case s.dead:
		return 0, errDead
	case s.lost:
		s.lost, s.answers, s.dump = false, nil, nil
		return 0, unix.ENOBUFS
	case len(s.answers) == 0 && s.dump != nil:
		s.part()
	case len(s.answers) == 0:
		return 0, errors.New("nothing was asked")
	}
	n := copy(b, s.answers[0])
	s.answers = s.answers[1:]
	return n, nil
}

func (s *socket) answer(to message, kind, flags uint16, body []byte) {
	s.answers = append(s.answers, netlink.Message{Type: kind, Flags: flags, Body: body}.Append(nil, to.Seq))
}

// outcome answers with an error; at is where in the body of the request the kernel finds fault, -1 where it does not say.
func (s *socket) outcome(to message, no unix.Errno, at int) {
	body := netlink.Buffer(binary.NativeEndian.AppendUint32(nil, uint32(-int32(no))))
	body = append(body, netlink.Message{Type: to.Type, Flags: to.Flags}.Append(nil, to.Seq)...)
	flags := uint16(unix.NLM_F_CAPPED)
	if at >= 0 {
		flags |= unix.NLM_F_ACK_TLVS
		body = body.Uint32(offsetAttr, uint32(unix.SizeofNlMsghdr+at))
	}
	s.answer(to, unix.NLMSG_ERROR, flags, body)
}

const offsetAttr = 2 // NLMSGERR_ATTR_OFFS

// transact carries out the messages of a transaction, or none of them.
func (s *socket) transact(list []message) error {
	s.Lock()
	defer s.Unlock()
	if s.dead {
		return errDead
	}
	spared := s.Spared != "" && list[1].text(tableAttr) == s.Spared
	if s.suffers(Refused) && !spared {
		s.outcome(list[0], unix.ENOMEM, -1)
		return nil
	}
	t := &transaction{kernel: s.Kernel, touched: map[byte]map[string]bool{}}
	for _, m := range list[1 : len(list)-1] {
		err := t.carryOut(m)
		if err == nil && (m.kind() == unix.NFT_MSG_NEWRULE || m.kind() == unix.NFT_MSG_NEWSETELEM) {
			t.leads = &m
		}
		if err != nil {
			s.refuse(t, list, m, err)
			return nil
		}
	}
	if t.leads != nil {
		if no := s.valid(); no != 0 {
			s.refuse(t, list, *t.leads, &refusal{no, -1})
			return nil
		}
	}
	if s.lost = s.suffers(Unanswered) && !spared; !s.lost {
		s.acknowledge(list)
	}
	if len(t.undo) == 0 {
		return nil
	}
	s.generation++
	if t.adds() {
		s.written++
	}
	s.notify(t.changes, s.port)
	for _, f := range plan.Families {
		if in := t.touched[nft.Protocol(f)]; in != nil && s.Changed != nil {
			s.Changed(Change{f, in, s.Process, t.input()})
		}
	}
	return nil
}

// refuse takes back what has been carried out, and answers.
func (s *socket) refuse(t *transaction, list []message, of message, err *refusal) {
	for _, undo := range slices.Backward(t.undo) {
		undo()
	}
	s.outcome(of, err.no, err.at)
	s.acknowledge(slices.DeleteFunc(slices.Clone(list), func(m message) bool { return m.Seq == of.Seq }))
}

func (s *socket) acknowledge(list []message) {
	for _, m := range list {
		if m.Flags&unix.NLM_F_ACK != 0 {
			s.outcome(m, 0, -1)
		}
	}
}

// listener is a socket for notifications.
type listener struct {
	*Process
	queue []notification
	wake  chan struct{}
}

type notification struct {
	at   time.Time
	list []message
	err  error
}

// Subscribe opens a socket for notifications of all transactions.
func (p *Process) Subscribe() (nft.Notifications, error) {
	l := &listener{Process: p, wake: make(chan struct{}, 1)}
	p.Lock()
	defer p.Unlock()
	p.listeners = append(p.listeners, l)
	return l, nil
}

// notify tells all listeners of a transaction. The Kernel must be locked.
func (k *Kernel) notify(changes []message, port uint32) {
	for i := range changes {
		changes[i].Port = port
	}
	changes = append(changes, message{netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN, Port: port}, []byte{0, 0, 0, 0}})
	for _, l := range k.listeners {
		n := notification{time.Now(), changes, nil}
		if k.Draw != nil {
			n.at = n.at.Add(k.Draw("notification", 20*time.Millisecond))
		}
		if l.suffers(Deaf) {
			n.list, n.err = nil, unix.ENOBUFS
		}
		l.queue = append(l.queue, n)
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// Follow is as that of netlink.Subscription.
func (l *listener) Follow(ctx context.Context, each func(h netlink.Header, body []byte), failed func(error)) {
	defer func() {
		l.Lock()
		defer l.Unlock()
		l.listeners = slices.DeleteFunc(l.listeners, func(other *listener) bool { return other == l })
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		}
		l.Lock()
		queue := l.queue
		l.queue = nil
		l.Unlock()
		for _, n := range queue {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(n.at)):
			}
			if n.err != nil {
				failed(n.err)
			}
			for _, m := range n.list {
				each(m.Header, m.body)
			}
		}
	}
}
