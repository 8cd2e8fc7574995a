// Package tracer follows real packets of a flow through the rules of nf_tables, those of all programs, by the kernel's own tracing: it
// marks the first packets of connections in a table of its own, and reads what the kernel tells of them. It sends nothing, decides
// nothing, and leaves nothing behind.
package tracer

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/conntrack"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Flow says which packets to follow.
type Flow struct {
	Protocol plan.Protocol
	Dst      netip.AddrPort
	// Sources are where packets come from; none stands for anywhere.
	Sources []netip.Prefix
	// Output follows what this node sends, in place of what arrives.
	Output bool
	// Rate bounds how many packets are followed per second; 0 stands for 20.
	Rate int
}

// Family returns the address family of the flow.
func (f Flow) Family() plan.Family { return plan.FamilyOf(f.Dst.Addr()) }

const (
	defaultRate = 20
	burst       = 5
)

func (f Flow) rate() uint64 {
	if f.Rate > 0 {
		return uint64(f.Rate)
	}
	return defaultRate
}

// What became of a packet.
const (
	// Accept: it has left the node, or reached a process of it.
	Accept = "accept"
	// Drop: a rule or a chain's policy has dropped it. The kernel says so too of what a rule rejects.
	Drop = "drop"
	// Lost: the last rule has let it pass, and it has not come to the end of its way.
	Lost = "lost"
)

// Packet is the way of one packet.
type Packet struct {
	Time time.Time
	// Src and Dst are those with which it came, and To and From those with which it ended, after translation.
	Src, Dst, From, To netip.AddrPort
	// In and Out are the interfaces by which it came and went; empty for none, or if it did not get so far.
	In, Out string
	Steps   []Step
	// End is Accept, Drop or Lost. What is dropped, the last step has dropped.
	End string
	// Local says that it ended at a process of this node.
	Local bool
	// Tracked says that connection tracking has an entry for the connection, and Replied that it has seen an answer. TrackedTo is where
	// that entry says that packets go.
	Tracked, Replied bool
	TrackedTo        netip.AddrPort
	// Answer is the way of an answer from where connection tracking has seen it: one that got through, if any did, and else the last one; nil if
	// none was followed.
	Answer *Packet
	// Reset says of an answer of TCP that it refuses the connection.
	Reset bool

	answer  bool   // It is one itself.
	in, out uint32 // indexes of interfaces
}

// Step is a rule that has matched a packet, or the end of a chain with a policy.
type Step struct {
	// Hook is prerouting, input, forward, output or postrouting; empty if the chain is gone.
	Hook string
	// Table is with its family, as in "ip nat".
	Table, Chain string
	// Rule is as iptables-save or nft print it, without the chain; of a policy "policy".
	Rule string
	// Verdict is accept, drop, continue, return, jump CHAIN or goto CHAIN.
	Verdict string

	family byte
	table  string
	handle uint64
}

// Result is what Follow has seen.
type Result struct {
	Packets []Packet
	// Passed is how many packets of the flow have passed, those of older connections included.
	Passed uint64
	// Lost is set if the kernel had more to tell than could be read.
	Lost bool
}

// Tracer follows packets. It is not safe for concurrent use.
type Tracer struct {
	flow         Flow
	conn         *nft.Conn
	subscription *netlink.Subscription
	packets      map[uint32]*Packet // by the kernel's number, of those not ended long ago
	list         []*Packet
	answers      []*Packet
	ended        int // of list
	interfaces   map[uint32]string
}

// buffer is the size of the buffer for messages, in bytes: a packet has about fifty of 200 bytes, which the kernel counts as about 1 kB.
const buffer = 8 << 20

// mostSteps bounds what is kept of one packet.
const mostSteps = 500

// Start begins to follow packets in the network namespace of the calling thread. Without nftables, the error is nft.ErrAbsent.
func Start(f Flow) (*Tracer, error) {
	s, err := netlink.Subscribe(unix.NETLINK_NETFILTER, buffer, groupTrace)
	if err != nil {
		return nil, err
	}
	c, err := nft.Dial()
	if err == nil {
		if err = f.addTable(c); err == nil {
			return &Tracer{flow: f, conn: c, subscription: s, packets: map[uint32]*Packet{}, interfaces: map[uint32]string{}}, nil
		}
		c.Close()
	}
	s.Close()
	return nil, err
}

// Family returns the address family of the flow.
func (t *Tracer) Family() plan.Family { return t.flow.Family() }

// Close removes the table.
func (t *Tracer) Close() error {
	b := nft.NewBatch(t.flow.Family(), names.Trace)
	b.DeleteTable()
	err := t.conn.Commit(b)
	t.subscription.Close()
	t.conn.Close()
	return err
}

// settle is how long to wait for the rest of what is told of packets.
const settle = 300 * time.Millisecond

// answer is how long to wait for the answers to packets.
const answer = 2 * time.Second

// Follow waits until ctx ends or there are as many packets as most. It can be called once.
func (t *Tracer) Follow(ctx context.Context, most int) (*Result, error) {
	out := &Result{}
	reading, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	quiet := time.NewTimer(time.Hour)
	defer quiet.Stop()
	var mu sync.Mutex // guards the fields of t while messages are read
	read := make(chan struct{})
	go func() {
		defer close(read)
		t.subscription.Follow(reading, func(h netlink.Header, body []byte) {
			mu.Lock()
			defer mu.Unlock()
			m, ok := parseMessage(h, body)
			if !ok || !t.add(m, most) {
				return
			}
			if t.ended >= most {
				quiet.Reset(0)
			} else if len(t.list) >= most {
				quiet.Reset(settle)
			}
		}, func(error) { mu.Lock(); out.Lost = true; mu.Unlock() })
	}()
	select {
	case <-quiet.C:
	case <-ctx.Done():
		time.Sleep(settle)
	}
	var err error
	if out.Passed, err = t.flow.counted(); err != nil {
		return nil, err
	}
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) { // The answer to the last packet may be on its way.
		mu.Lock()
		out.Packets = nil
		for _, p := range t.list {
			out.Packets = append(out.Packets, *p)
		}
		err := t.readFlows(out.Packets)
		unanswered := slices.ContainsFunc(out.Packets, func(p Packet) bool { return p.End == Accept && (p.Answer == nil || p.Answer.End == Lost) })
		mu.Unlock()
		if err != nil {
			return nil, err
		}
		if time.Since(begin) > answer || !unanswered {
			break
		}
	}
	stop()
	<-read
	return out, t.finish(out.Packets)
}

// finish sets the names of interfaces and the texts of rules.
func (t *Tracer) finish(list []Packet) error {
	texts := newTexts(t.flow.Family())
	for i := range list {
		for p := &list[i]; p != nil; p = p.Answer {
			p.In, p.Out = t.interfaceName(p.in), t.interfaceName(p.out)
			if err := texts.fill(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// mostAnswers bounds how many answers are kept for each packet: a server repeats them if they get no further.
const mostAnswers = 5

// add adds a message to its packet. A packet begins with the rule that marks it: others are followed by other programs. It
// reports whether the packet is one of those that are kept.
func (t *Tracer) add(m message, most int) bool {
	own := m.table == names.Trace && m.family == nft.Protocol(t.flow.Family())
	p := t.packets[m.id]
	answers := m.chain == chainAnswerIn || m.chain == chainAnswerOut
	// Its headers come before the rule that matches it. A packet that is followed already passes the chains that answers begin in, too.
	if own && (m.chain == chainMark || answers) && m.kind == unix.NFT_TRACETYPE_RULE && m.src.IsValid() &&
		(p == nil || p.Src != m.src || p.End != Lost || len(p.Steps) > 0 && !answers) {
		delete(t.packets, m.id) // The kernel uses a number again, later.
		list, bound := &t.list, most
		if answers {
			list, bound = &t.answers, mostAnswers*most
		}
		if len(*list) == bound {
			return false
		}
		p = &Packet{Time: time.Now(), Src: m.src, Dst: m.dst, End: Lost, answer: answers, Reset: answers && m.reset && t.flow.Protocol == plan.TCP}
		t.packets[m.id], *list = p, append(*list, p)
	}
	if p == nil || len(p.Steps) >= mostSteps {
		return false
	}
	if m.src.IsValid() {
		p.From, p.To = m.src, m.dst
	}
	p.in, p.out = cmp.Or(m.in, p.in), cmp.Or(m.out, p.out)
	if own {
		if m.chain == chainInput || m.chain == chainPost {
			t.end(p, Accept)
			p.Local = m.chain == chainInput
		}
		return true
	}
	if m.kind == unix.NFT_TRACETYPE_RULE && m.handle == 0 || m.kind == unix.NFT_TRACETYPE_RETURN {
		return true // The end of a chain's rules, and the return from it.
	}
	s := Step{Table: familyName(m.family) + " " + m.table, Chain: m.chain, Verdict: m.verdict, family: m.family, table: m.table, handle: m.handle}
	if m.kind == unix.NFT_TRACETYPE_POLICY {
		s.Rule = "policy"
	}
	p.Steps = append(p.Steps, s)
	if m.verdict == Drop && p.End == Lost {
		t.end(p, Drop)
	}
	return true
}

func (t *Tracer) end(p *Packet, how string) {
	if p.End == Lost && !p.answer {
		t.ended++
	}
	p.End = how
}

func (t *Tracer) interfaceName(index uint32) string {
	if name, known := t.interfaces[index]; known || index == 0 {
		return name
	}
	name := fmt.Sprintf("interface %d", index)
	if i, err := net.InterfaceByIndex(int(index)); err == nil {
		name = i.Name
	}
	t.interfaces[index] = name
	return name
}

// readFlows reads what connection tracking has of the packets' connections.
func (t *Tracer) readFlows(list []Packet) error {
	if len(list) == 0 {
		return nil
	}
	var ends []conntrack.End
	at := map[netip.AddrPort][]*Packet{} // A client that gets no answer sends its first packet again.
	for i := range list {
		p := &list[i]
		at[p.Src] = append(at[p.Src], p)
		ends = append(ends, conntrack.End{Addr: p.Src.Addr(), Port: p.Src.Port()})
	}
	var table conntrack.Table
	s, err := table.Open()
	if err != nil {
		return err
	}
	defer s.Close()
	filter := conntrack.Filter{
		Family: t.flow.Family(), Protocol: netlink.Protocol(t.flow.Protocol), Src: conntrack.Narrowest(ends),
		Dst: conntrack.End{Addr: t.flow.Dst.Addr(), Port: t.flow.Dst.Port()},
	}
	_, _, err = s.RemoveIf(context.Background(), filter, func(fl *conntrack.Flow) bool {
		if fl.Dst == t.flow.Dst {
			for _, p := range at[fl.Src] {
				p.Tracked, p.Replied, p.TrackedTo, p.Answer = true, fl.Replied, fl.From, t.answerFrom(fl.From, fl.To)
				if p.Answer != nil && p.Answer.Reset { // It was open before, or the kernel would have forgotten it.
					a := *p.Answer
					a.Reset, p.Answer = false, &a
				}
			}
		}
		return false
	})
	for i := range list { // The kernel forgets a connection that is refused.
		if p := &list[i]; !p.Tracked && p.End == Accept {
			p.Answer = t.answerFrom(p.To, p.From)
			p.Replied = p.Answer != nil
		}
	}
	return err
}

// answerFrom returns the answer that Packet.Answer has: that of an endpoint to where packets come from, as it sees that.
func (t *Tracer) answerFrom(endpoint, to netip.AddrPort) (out *Packet) {
	for _, a := range t.answers {
		if a.Src == endpoint && a.Dst == to && (out == nil || out.End != Accept) {
			out = a
		}
	}
	return out
}
