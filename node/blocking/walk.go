package blocking

import (
	"strings"

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
}

// end is a verdict, and where it leads if it is jump or goto.
type end struct{ verdict, to string }

// translates is the verdict of what translates an address, and accepts the packet.
const translates = "translate"

// notrack is the verdict, of those that end nothing, that keeps a packet from being tracked.
const notrack = "notrack"

// walk follows a packet through the chains of a hook.
type walk struct {
	*search
	rules  ruleset
	packet packet
	out    []Rule
	found  map[string]bool
	// beside is true in a chain for translation that leads to this program's.
	beside bool
	// accepted is set once a rule may have accepted the packet.
	accepted bool
	// known says how chains end, by how they begin: where chains lead to each other, there may be very many ways, but these are few.
	known map[state]state
}

// state is all that the result of a chain depends on, and the result.
type state struct {
	chain                    nft.ChainID
	sure, specific, accepted bool
	ended                    bool
}

func (w *walk) report(r Rule) {
	r.rules, r.What, r.Answers = w.rules, w.packet.what, w.packet.answer
	if r.from = w.packet.from; r.from != "" {
		r.to, r.What = r.What, r.What+" from "+r.from
	}
	if !w.found[r.Chain.String()+r.Text] {
		w.found[r.Chain.String()+r.Text] = true
		w.out = append(w.out, r)
	}
}

// deepest bounds how deep chains are followed, as the kernel does.
const deepest = 16

// chain follows the packet through a chain. sure is false if it may not come there, and specific says that the rules that lead there ask
// for the Service's address or port. It returns true if the packet goes no further in any case.
func (w *walk) chain(id nft.ChainID, sure, specific bool, depth int) (ended bool, err error) {
	at := state{chain: id, sure: sure, specific: specific, accepted: w.accepted}
	if before, is := w.known[at]; is {
		w.accepted = before.accepted
		return before.ended, nil
	}
	rules, err := w.rules.judges(id)
	if err != nil || depth > deepest {
		return false, err
	}
	for i, j := range rules {
		if err := w.ctx.Err(); err != nil {
			return false, err
		}
		w.judged++
		r := j(&w.packet)
		r.number = i + 1
		var goes bool
		if ended, goes, err = w.apply(id, r, &sure, specific, depth); err != nil {
			return false, err
		}
		if ended || !goes {
			break
		}
	}
	w.known[at] = state{accepted: w.accepted, ended: ended}
	return ended, nil
}

// apply does what a rule does. goes is false if the packet certainly leaves the chain; sure becomes false if it may have left it.
func (w *walk) apply(id nft.ChainID, r rule, sure *bool, specific bool, depth int) (ended, goes bool, err error) {
	if r.match == no {
		return false, true, nil
	}
	certain, about := *sure && r.match == yes && len(r.ends) == 1, specific || r.specific
	if w.packet.nat {
		return w.applyNAT(id, r, certain, sure, depth)
	}
	for _, e := range r.ends {
		switch e.verdict {
		case "drop", "reject":
			if certain || about {
				w.report(Rule{Text: strings.TrimSpace(r.text + " " + e.verdict), Chain: id, number: r.number, Certain: certain && !w.accepted})
			}
			if certain {
				return true, false, nil
			}
		case notrack:
			if w.packet.untracked && (certain || about) {
				own := w.packet.here == yes && w.packet.dst.addr.IsValid() // A program of this node may answer there.
				certain := certain && !w.accepted && !own && !w.node.IPVS  // IPVS translates some of it.
				w.report(Rule{Text: strings.TrimSpace(r.text + " " + e.verdict), Chain: id, number: r.number, Certain: certain, Untracked: true})
			}
		case "accept", translates:
			if certain {
				return true, false, nil
			}
			w.accepted = true
		case "return":
			if certain {
				return false, false, nil
			}
			*sure = false
		case "jump", "goto":
			to := nft.ChainID{Family: id.Family, Table: id.Table, Chain: e.to}
			if w.packet.answer && certain && e.to == names.Forward {
				return true, false, nil // It accepts what is established.
			}
			if w.packet.check && certain && e.to == names.NodePorts {
				return true, false, nil // It accepts what asks for the health of a Service.
			}
			if e.to == names.Forward && w.packet.marked != maybe && !w.packet.answer && certain {
				if w.packet.marked == yes {
					return true, false, nil
				}
				continue
			}
			if ours(to) { // They refuse only what the plan says, and one accepts what is masqueraded.
				w.accepted = w.accepted || e.to == names.Forward
				continue
			}
			ended, err := w.chain(to, certain, about, depth+1)
			if err != nil || ended {
				return ended, false, err
			}
			if e.verdict == "goto" {
				if certain {
					return false, false, nil
				}
				*sure = false
			}
		}
	}
	return false, true, nil
}

// applyNAT is apply where it is the translation of packets that is looked at. The first jump to a chain of this program ends the search.
func (w *walk) applyNAT(id nft.ChainID, r rule, certain bool, sure *bool, depth int) (ended, goes bool, err error) {
	source := w.packet.dnat == yes
	for _, e := range r.ends {
		to := nft.ChainID{Family: id.Family, Table: id.Table, Chain: e.to}
		decides := w.beside && (e.verdict == "accept" || e.verdict == "return" && depth == 0)
		switch {
		case (e.verdict == "jump" || e.verdict == "goto") && ours(to), e.verdict == translates && source:
			return true, false, nil
		case decides || e.verdict == translates:
			if certain {
				w.report(Rule{Text: strings.TrimSpace(r.text + " " + e.verdict), Chain: id, number: r.number, Certain: true, Unmasqueraded: source, Diverted: !source})
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
			*sure = false
		case e.verdict == "jump" || e.verdict == "goto":
			ended, err := w.chain(to, certain, false, depth+1)
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
