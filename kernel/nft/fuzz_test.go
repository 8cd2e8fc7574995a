package nft

import (
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// answering is a socket on which every request gets the same answer, with the right number.
type answering struct {
	body    []byte
	answers [][]byte
}

func (s *answering) Close() error { return nil }

func (s *answering) Send(b []byte) error {
	return netlink.Messages(b, func(h netlink.Header, _ []byte) {
		if h.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
			s.answers = append(s.answers, netlink.Message{Type: h.Type, Body: s.body}.Append(nil, h.Seq),
				netlink.Message{Type: unix.NLMSG_DONE}.Append(nil, h.Seq))
		} else {
			s.answers = append(s.answers, netlink.Message{Type: h.Type, Body: s.body}.Append(nil, h.Seq),
				netlink.Message{Type: unix.NLMSG_ERROR, Flags: unix.NLM_F_CAPPED | unix.NLM_F_ACK_TLVS, Body: s.body}.Append(nil, h.Seq))
		}
	})
}

func (s *answering) Receive(b []byte) (int, error) {
	if len(s.answers) == 0 {
		return 0, io.EOF
	}
	n := copy(b, s.answers[0])
	s.answers = s.answers[1:]
	return n, nil
}

const fuzzed = "services" // the name of a table and of all that is in it

// example is a transaction with everything that a table can hold; the kernel answers in the same form.
func example(f plan.Family) (*Batch, []Set, []Chain) {
	sets := []Set{
		{Name: fuzzed, Key: Concat{TypeIPv4, TypeProtocol, TypeServicePort}, Data: Concat{TypeClassID}, Counted: true},
		{Name: fuzzed, Key: Concat{TypeClassID}, Data: Concat{TypeVerdict}},
		{Name: fuzzed, Key: Concat{TypeProtocol, TypeIPv4}},
		{Name: fuzzed, Key: Concat{TypeProtocol, TypeIPv4}, Data: Concat{TypeClassID}, Dynamic: true, Size: 20},
	}
	chains := []Chain{{Name: fuzzed, Rules: []Rule{{Text: "drop", Comment: "all", Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}}}},
		{Name: fuzzed, Hook: &Hook{Type: "nat", Name: "output", Priority: -100}}}
	b := NewBatch(f, fuzzed)
	b.AddTable()
	for _, s := range sets {
		b.AddSet(s)
		b.AddElements(s, []Element{{Key: "12345678", Data: "1234", Comment: "a comment"}, {Chain: "next"}, {}})
	}
	if err := b.AddChains(chains); err != nil {
		panic(err)
	}
	b.DeleteObject(Object{Name: fuzzed, Type: 1})
	b.DeleteObject(Object{Name: fuzzed})
	return b, sets, chains
}

// FuzzRead: whatever the kernel answers, reading a table, its sets and their elements ends, and so does a transaction.
func FuzzRead(f *testing.F) {
	b, sets, chains := example(plan.IPv4)
	for _, m := range b.messages {
		f.Add([]byte(m.Body))
	}
	other := netlink.Buffer{unix.NFPROTO_IPV4, 0, 0, 0}.Text(tableAttr, fuzzed).Text(unix.NFTA_SET_ELEM_LIST_SET, fuzzed).
		Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b netlink.Buffer) netlink.Buffer {
			return b.Nest(listElem, func(b netlink.Buffer) netlink.Buffer {
				return b.BigEndian32(unix.NFTA_SET_ELEM_FLAGS, 3).Text(unix.NFTA_SET_ELEM_OBJREF, "quota").Bytes(unix.NFTA_SET_ELEM_TIMEOUT, 1).
					Nest(setElemExprs, func(b netlink.Buffer) netlink.Buffer {
						return b.Nest(listElem, func(b netlink.Buffer) netlink.Buffer { return b.Text(unix.NFTA_EXPR_NAME, "limit") })
					}).Bytes(unix.NFTA_SET_ELEM_USERDATA, append([]byte{5, 254}, make([]byte, 254)...)...)
			})
		})
	f.Add([]byte(other))
	f.Add([]byte{0xea, 0xff, 0xff, 0xff, 40: 0}) // an error
	f.Fuzz(func(t *testing.T, body []byte) {
		if len(body) > 60000 {
			return
		}
		c := NewConn(&answering{body: body})
		if content, err := c.Read(plan.IPv4, fuzzed, sets, chains); err == nil && content != nil {
			for _, o := range content.Objects {
				_ = o.String()
			}
			for _, ch := range chains {
				if is := content.Chains[ch.Name]; len(is.Match(ch)) != len(is.Labels) {
					t.Errorf("%d rules match of %d", len(is.Match(ch)), len(is.Labels))
				}
			}
			_ = content.Intact(sets, chains)
		}
		for _, s := range sets {
			_, _ = c.Elements(plan.IPv4, fuzzed, s)
			for _, e := range []Element{{}, {Key: "12345678"}} {
				if got, is, err := c.Element(plan.IPv4, fuzzed, s, e); is && (err != nil || got.Key != e.Key) {
					t.Errorf("asked for %q, got %q, %v", e.Key, got.Key, err)
				}
			}
		}
		var refused *RefusedError
		if again, _, _ := example(plan.IPv4); errors.As(c.Commit(again), &refused) {
			_ = refused.Error()
		}
	})
}

// FuzzElementAt: wherever the kernel says that it finds fault, looking for the element there ends, and an element is no longer than its message.
func FuzzElementAt(f *testing.F) {
	b, _, _ := example(plan.IPv4)
	for _, m := range b.messages {
		f.Add(m.Type, []byte(m.Body), 60)
	}
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, offset int) {
		if len(body) < headerLen { // This program has written it.
			return
		}
		if set, e := elementAt(netlink.Message{Type: kind, Body: body}, offset); len(set)+len(e.Key) > len(body) {
			t.Errorf("set %q and element %v are in a message of %d bytes", set, e, len(body))
		}
	})
}

// FuzzUserdata: whatever another program has stored beside a rule or an element, reading it ends, and a part of it is as long as it says.
func FuzzUserdata(f *testing.F) {
	f.Add(userdata("a comment", "a label"))
	f.Add([]byte{5, 254, 255: 0})
	f.Add([]byte{commentUserdata, 254, 255: 0})
	f.Add([]byte{5, 255, 256: 0})
	f.Add([]byte{5, 254, 1, 2, 3})
	f.Add([]byte{labelUserdata, 0, commentUserdata, 1, 0})
	f.Add(slices.Concat([]byte{7, 254}, make([]byte, 254), userdata("behind it", "")))
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, kind := range []byte{commentUserdata, labelUserdata, 5} {
			if part := userdataOf(raw, kind); len(part) > 255 || len(part) > max(0, len(raw)-2) {
				t.Errorf("a part of %d bytes in %d", len(part), len(raw))
			}
		}
	})
}

// FuzzWatch: whatever is notified, a change is told of at most once for each end of a transaction and family.
func FuzzWatch(f *testing.F) {
	b, _, _ := example(plan.IPv4)
	end := netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN, Body: []byte{0, 0, 0, 0}}.Append(nil, 0)
	for _, m := range b.messages {
		f.Add(append(m.Append(nil, 0), end...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		ends, changes := 0, 0
		w := &watched{tables: []string{fuzzed}, current: map[byte]Change{}, changed: func(Change) { changes++ }}
		_ = netlink.Messages(b, func(h netlink.Header, body []byte) {
			ends++
			w.message(h, body)
		})
		if changes > ends*len(plan.Families) {
			t.Errorf("%d changes in %d messages", changes, ends)
		}
	})
}

// FuzzRulesetVerdict: whatever a map of another program leads to, reading it ends.
func FuzzRulesetVerdict(f *testing.F) {
	f.Add([]byte(netlink.Buffer(nil).BigEndian32(unix.NFTA_VERDICT_CODE, gotoVerdict).Text(unix.NFTA_VERDICT_CHAIN, "next")), []byte{1, 2}, true)
	f.Add([]byte{4, 0, 1, 0}, []byte{}, false)
	f.Fuzz(func(t *testing.T, raw, key []byte, interval bool) {
		e := nftables.SetElement{Key: key, Val: raw}
		if verdictOf(&e) == nil {
			t.Error("no verdict")
		}
		s := &setContent{known: true, interval: interval, list: []nftables.SetElement{e, {Key: slices.Clone(raw), IntervalEnd: true}}}
		slices.SortFunc(s.list, func(a, b nftables.SetElement) int { return slices.Compare(a.Key, b.Key) })
		_, _ = s.find(raw)
		_, _ = s.find(key)
	})
}
