package blocking

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/inspect/reality"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
)

// match says whether a rule matches.
type match int

const (
	no match = iota
	maybe
	yes
)

// rule is what a rule does with a packet.
type rule struct {
	match match
	// specific is true if the rule asks for the Service's address or port.
	specific bool
	// ends are what it may do with what it matches: more than one where a map decides. It has none if it decides nothing.
	ends []end
	text string
	// number is that of the rule in its chain.
	number int
	// mark is the mark that it sets; nil if it sets none. restores are the bits that it takes from the connection's.
	mark     *mark
	restores uint32
	// clamps says that it limits how long packets of TCP are (TCPMSS).
	clamps bool
}

// end is a verdict, and where it leads if it is jump or goto, or how it translates; port is where to on this node, and addr the
// address, if that is known.
type end struct {
	verdict, to string
	port        uint16
	addr        netip.Addr
}

// translates is the verdict of what translates an address, and accepts the packet.
const translates = "translate"

// notrack is the verdict, of those that end nothing, that keeps a packet from being tracked.
const notrack = "notrack"

// walk follows a packet through the chains of a hook.
type walk struct {
	*search
	rules  ruleset
	packet packet
	out    []finding
	found  map[string]bool
	// beside is true in a chain for translation that leads to this program's.
	beside bool
	// even is true in one for translation that the kernel may call before this program's or after them.
	even bool
	// clamps is set once a rule may limit how long packets of TCP are.
	clamps bool
	// accepted is set once a rule may have accepted the packet, and passed are the marks with which the packet may go on behind the hook's chain.
	accepted bool
	passed   marks
	// known says how chains end, by how they begin: where chains lead to each other, there may be very many ways, but these are few.
	known map[state]state
}

// state is all that the result of a chain depends on, and the result.
type state struct {
	chain                    nft.ChainID
	sure, specific, accepted bool
	mark                     mark
	ended                    bool
}

// walk begins a walk of a packet through a base chain.
func (s *search) walk(b base, p packet) *walk {
	p.mark = s.begin(&p, b.Hook)
	return &walk{search: s, rules: b.rules, packet: p, found: map[string]bool{}, known: map[state]state{}}
}

func (w *walk) report(chain nft.ChainID, number int, b reality.Blocking) {
	b.Rule = strings.TrimSpace(b.Rule)
	b.Place, b.What, b.Answers, b.ICMP = chain.String(), w.packet.what, w.packet.answer && !w.packet.icmp, w.packet.icmp
	if w.rules.variant() == legacyVariant {
		b.Place += ", of iptables-legacy"
	}
	f := finding{Blocking: b, chain: chain, number: number, rules: w.rules, from: w.packet.from}
	if f.from != "" {
		f.to, f.What = f.What, f.What+" from "+f.from
	}
	if !w.found[chain.String()+b.Rule] {
		w.found[chain.String()+b.Rule] = true
		w.out = append(w.out, f)
	}
}

// deepest bounds how deep chains are followed, as the kernel does.
const deepest = 16

// chain follows the packet through a chain. sure is false if it may not come there, and specific says that the rules that lead there ask
// for the Service's address or port. It returns true if the packet goes no further in any case.
func (w *walk) chain(id nft.ChainID, sure, specific bool, depth int) (ended bool, err error) {
	at := state{chain: id, sure: sure, specific: specific, accepted: w.accepted, mark: w.packet.mark}
	if before, is := w.known[at]; is {
		w.accepted, w.packet.mark = before.accepted, before.mark
		return before.ended, nil
	}
	rules, err := w.rules.judges(id)
	if err != nil || depth > deepest {
		return false, err
	}
	v := visit{id: id, sure: sure, specific: specific, depth: depth}
	goes := true
	for i, j := range rules {
		if err := w.ctx.Err(); err != nil {
			return false, err
		}
		w.judged++
		r := j(&w.packet)
		r.number = i + 1
		if ended, goes, err = w.apply(&v, r); err != nil {
			return false, err
		}
		if ended || !goes {
			break
		}
	}
	if goes {
		v.left.add(w.packet.mark)
	}
	w.packet.mark = v.left.mark
	w.known[at] = state{accepted: w.accepted, mark: w.packet.mark, ended: ended}
	return ended, nil
}

// visit is one visit of a packet to a chain.
type visit struct {
	id nft.ChainID
	// sure becomes false if the packet may have left the chain.
	sure, specific bool
	depth          int
	// left are the marks with which it may have left the chain for the one that led here, and behind those with which it goes on behind a rule.
	left, behind marks
}

// apply does what a rule does. goes is false if the packet certainly leaves the chain.
func (w *walk) apply(v *visit, r rule) (ended, goes bool, err error) {
	if r.match == no {
		return false, true, nil
	}
	w.clamps = w.clamps || r.clamps && w.packet.protocol == unix.IPPROTO_TCP
	certain := v.sure && r.match == yes && len(r.ends) == 1
	if w.packet.nat {
		return w.applyNAT(v, r, certain)
	}
	before := w.packet.mark
	start := before
	if r.mark != nil {
		w.unmark(v.id, r, before, certain || v.sure && r.match == yes)
		if start = *r.mark; v.specific || r.specific {
			start = start.changed(before)
		}
	}
	v.behind = marks{}
	if r.match == maybe {
		v.behind.add(before)
	}
	if len(r.ends) == 0 {
		v.behind.add(start)
	}
	for _, e := range r.ends {
		w.packet.mark = start
		if ended, goes, err = w.end(v, r, e, certain); ended || !goes || err != nil {
			return ended, goes, err
		}
	}
	if w.packet.mark = before; v.behind.any {
		w.packet.mark = v.behind.mark
	}
	return false, true, nil
}

// unmark reports a rule that changes the mark by which a packet is to be masqueraded.
func (w *walk) unmark(id nft.ChainID, r rule, before mark, certain bool) {
	own := w.node.Mark
	if !w.packet.remarked || before.known&own != 0 || bits.OnesCount32(own) != 1 {
		return
	}
	switch cleared := r.mark.known&own != 0 && r.mark.value&own == 0; {
	case cleared && certain:
		w.report(id, r.number, reality.Blocking{Rule: r.text + " meta mark set", Certain: !w.accepted, Unmarked: true})
	case r.restores&own != 0 && certain:
		w.report(id, r.number, reality.Blocking{Rule: r.text + " meta mark set ct mark", Unmarked: true})
	}
}

// end does what a rule does by one of its verdicts. The results are those of apply.
func (w *walk) end(v *visit, r rule, e end, certain bool) (ended, goes bool, err error) {
	about := v.specific || r.specific
	switch e.verdict {
	case "drop", "reject":
		last := v.depth == 0 && r.text == "" // as a policy is
		if certain || about || last {
			w.report(v.id, r.number, reality.Blocking{Rule: r.text + " " + e.verdict, Certain: certain && !w.accepted})
		}
		return certain, !certain, nil
	case notrack:
		if w.packet.untracked && (certain || about) {
			own := w.packet.here == yes && w.packet.dst.addr.IsValid() // A program of this node may answer there.
			certain := certain && !w.accepted && !own && !w.node.IPVS  // IPVS translates some of it.
			w.report(v.id, r.number, reality.Blocking{Rule: r.text + " " + e.verdict, Certain: certain, Untracked: true})
		}
		v.behind.add(w.packet.mark)
	case "accept", translates:
		w.passed.add(w.packet.mark)
		if certain {
			return true, false, nil
		}
		w.accepted = true
	case "return":
		v.left.add(w.packet.mark)
		if certain {
			return false, false, nil
		}
		v.sure = false
	case "jump", "goto":
		to := nft.ChainID{Family: v.id.Family, Table: v.id.Table, Chain: e.to}
		if w.ours(w.rules, to) {
			accepts := w.jumpOurs(e.to, certain)
			if accepts {
				w.passed.add(w.packet.mark)
			}
			v.behind.add(w.packet.mark)
			return accepts, !accepts, nil
		}
		ended, err := w.chain(to, certain, about, v.depth+1)
		if err != nil || ended {
			return ended, false, err
		}
		if e.verdict == "jump" {
			v.behind.add(w.packet.mark)
			break
		}
		v.left.add(w.packet.mark)
		if certain {
			return false, false, nil
		}
		v.sure = false
	}
	return false, true, nil
}

// jumpOurs does what one of this program's chains does, and reports whether it accepts the packet for certain. They refuse only what the plan says.
func (w *walk) jumpOurs(chain string, certain bool) (accepts bool) {
	p := &w.packet
	switch {
	case chain == names.Forward && certain && (p.answer || p.masqueraded == yes): // It accepts what is established, and what is masqueraded.
		return true
	case chain == names.Forward && certain && p.masqueraded == no && !p.answer:
	case chain == names.NodePorts && certain && p.check: // It accepts what asks for the health of a Service.
		return true
	default:
		w.accepted = w.accepted || chain == names.Forward
	}
	return false
}

// applyNAT is apply where it is the translation of packets that is looked at. The first jump to a chain of this program ends the search.
func (w *walk) applyNAT(v *visit, r rule, certain bool) (ended, goes bool, err error) {
	source := w.packet.dnat == yes
	for _, e := range r.ends {
		to := nft.ChainID{Family: v.id.Family, Table: v.id.Table, Chain: e.to}
		decides := w.beside && (e.verdict == "accept" || e.verdict == "return" && v.depth == 0)
		ours := (e.verdict == "jump" || e.verdict == "goto") && w.ours(w.rules, to)
		switch {
		case w.packet.sources && ours: // It masquerades nothing of this.
		case w.packet.sources && e.verdict == translates:
			if certain && e.addr.IsValid() && !w.node.Local(e.addr) {
				w.report(v.id, r.number, reality.Blocking{Rule: fmt.Sprintf("%s %s to %s", r.text, e.to, e.addr), Certain: w.node.Near != nil && w.node.Near(e.addr), Missing: true, Toward: e.addr})
			}
			if certain {
				return true, false, nil
			}
		case ours, e.verdict == translates && source:
			return true, false, nil
		case decides || e.verdict == translates:
			if certain {
				text := r.text + " " + cmp.Or(e.to, e.verdict)
				if e.addr.IsValid() {
					text += " to " + e.addr.String()
				}
				w.report(v.id, r.number, reality.Blocking{Rule: text, Certain: !w.even, Unmasqueraded: source, Diverted: !source, To: e.port, Toward: e.addr})
				return true, false, nil
			}
		case e.verdict == "accept":
			if certain {
				return true, false, nil
			}
		case e.verdict == "return":
			if certain {
				return false, false, nil
			}
			v.sure = false
		case e.verdict == "jump" || e.verdict == "goto":
			ended, err := w.chain(to, certain, false, v.depth+1)
			if err != nil || ended {
				return ended, false, err
			}
			if e.verdict == "goto" {
				return false, !certain, nil
			}
		}
	}
	return false, true, nil
}
