package proxier

import (
	"cmp"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// claim is the destination by which a packet is recognised, and so what only one ServicePort can own. A node port has no address.
type claim struct {
	addr     netip.Addr
	port     uint16
	protocol byte // the first letter of its name
	family   plan.Family
}

func claimOf(f plan.Frontend, family plan.Family) claim {
	return claim{f.Addr, f.Port, f.Protocol[0], family}
}

// claimant is a ServicePort that asks for a claim.
type claimant struct {
	kind plan.FrontendKind
	key  *plan.Key
}

func (c claimant) compare(o claimant) int {
	return cmp.Or(cmp.Compare(c.kind, o.kind), c.key.Compare(*o.key))
}

// claims decides which ServicePort owns each frontend: the claimant of the better kind or, among equals, of the lower key.
// kube-proxy makes rules for all of them, and which one works is chance; here no order of events and no restart changes the answer,
// and no user's external IP takes a cluster IP's traffic (CVE-2020-8554).
type claims struct {
	owners map[claim]claimant
	others map[claim][]claimant // who else asks for what has an owner, in order; no entry is empty
}

func newClaims() claims { return claims{map[claim]claimant{}, map[claim][]claimant{}} }

// owner returns the owner of c.
func (cs *claims) owner(c claim) plan.Key { return *cs.owners[c].key }

// add adds a claimant to those of c, and reports whether it is the owner now.
func (cs *claims) add(c claim, who claimant) (owns bool) {
	owner, owned := cs.owners[c]
	if owns = !owned || who.compare(owner) < 0; owns {
		cs.owners[c], who = who, owner
	}
	if owned {
		i, _ := slices.BinarySearchFunc(cs.others[c], who, claimant.compare)
		cs.others[c] = slices.Insert(cs.others[c], i, who)
	}
	return owns
}

// remove removes a claimant of c, and reports whether it was one, and the owner.
func (cs *claims) remove(c claim, who claimant) (was, owned bool) {
	others := cs.others[c]
	if owner, is := cs.owners[c]; !is {
		return false, false
	} else if owned = owner.compare(who) == 0; !owned {
		i, found := slices.BinarySearchFunc(others, who, claimant.compare)
		if !found {
			return false, false
		}
		others = slices.Delete(others, i, i+1)
	} else if len(others) == 0 {
		delete(cs.owners, c)
		return true, true
	} else {
		cs.owners[c], others = others[0], others[1:]
	}
	if cs.others[c] = others; len(others) == 0 {
		delete(cs.others, c)
	}
	return true, owned
}

// claim enters the claims of a ServicePort, and unclaim removes them. If that changes an owner, the Service of every other ServicePort
// that claims the same is touched: it wins, loses, or is shadowed by a different one now.
func (s *State) claim(spec *portSpec) {
	for _, f := range spec.wants {
		c := claimOf(f, spec.key.Family)
		if s.claims.add(c, claimant{f.Kind, &spec.key}) {
			s.touchClaimants(c)
		}
		if f.Kind == plan.NodePort {
			s.nodePorts++
		}
	}
}

func (s *State) unclaim(spec *portSpec) {
	for _, f := range spec.wants {
		c := claimOf(f, spec.key.Family)
		was, owned := s.claims.remove(c, claimant{f.Kind, &spec.key})
		if owned {
			s.touchClaimants(c)
		}
		if was && f.Kind == plan.NodePort {
			s.nodePorts--
		}
	}
}

func (s *State) touchClaimants(c claim) {
	if owner, is := s.claims.owners[c]; is {
		s.touch(owner.key.Service)
	}
	for _, who := range s.claims.others[c] {
		s.touch(who.key.Service)
	}
}
