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
	protocol plan.Protocol
	port     uint16
	family   plan.Family
}

func claimOf(f plan.Frontend, family plan.Family) claim {
	return claim{family: family, addr: f.Addr, protocol: f.Protocol, port: f.Port}
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
type claims map[claim][]claimant // in order, the owner first; no entry is empty

// owner returns the owner of c.
func (cs claims) owner(c claim) plan.Key { return *cs[c][0].key }

// claim enters the claims of a ServicePort, and unclaim removes them. If that changes an owner, the Service of every other ServicePort
// that claims the same is touched: it wins, loses, or is shadowed by a different one now.
func (s *State) claim(spec *portSpec) {
	for _, f := range spec.wants {
		c, who := claimOf(f, spec.key.Family), claimant{f.Kind, &spec.key}
		i, _ := slices.BinarySearchFunc(s.claims[c], who, claimant.compare)
		if i == 0 {
			s.touchClaimants(c)
		}
		s.claims[c] = slices.Insert(s.claims[c], i, who)
		if f.Kind == plan.NodePort {
			s.nodePorts++
		}
	}
}

func (s *State) unclaim(spec *portSpec) {
	for _, f := range spec.wants {
		c, who := claimOf(f, spec.key.Family), claimant{f.Kind, &spec.key}
		i, found := slices.BinarySearchFunc(s.claims[c], who, claimant.compare)
		if !found {
			continue
		}
		if s.claims[c] = slices.Delete(s.claims[c], i, i+1); i == 0 {
			s.touchClaimants(c)
		}
		if len(s.claims[c]) == 0 {
			delete(s.claims, c)
		}
		if f.Kind == plan.NodePort {
			s.nodePorts--
		}
	}
}

func (s *State) touchClaimants(c claim) {
	for _, who := range s.claims[c] {
		s.touch(who.key.Service)
	}
}
