package proxier

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	networking "k8s.io/api/networking/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// applyServiceCIDRs applies changes of ServiceCIDRs; nil means that one is gone. One that is being deleted still counts: its finalizer keeps
// it until no Service has an address of it (KEP-1880).
func (s *State) applyServiceCIDRs(objects map[string]*networking.ServiceCIDR) {
	if len(objects) == 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(objects)) {
		f := &source.Findings{Object: "ServiceCIDR " + name}
		delete(s.cidrs, name)
		if obj := objects[name]; obj != nil {
			for i, text := range obj.Spec.CIDRs {
				if cidr, ok := parseCIDR(text); ok {
					s.cidrs[name] = append(s.cidrs[name], cidr)
				} else {
					f.Problem(fmt.Sprintf("spec.cidrs[%d]", i), "this range is ignored", "%.80q is not a CIDR", text)
				}
			}
		}
		s.reportNew(f.Object, f.List)
	}
	if now := s.serviceCIDRs(); !slices.Equal(now, s.plan.Settings.ServiceCIDRs) {
		s.plan.Settings.ServiceCIDRs = now
		s.rebuild = true
	}
}

// serviceCIDRs returns the ranges of the configuration and of all objects, in order, each once.
func (s *State) serviceCIDRs() []netip.Prefix {
	var out []netip.Prefix
	for _, cidr := range s.given.ServiceCIDRs {
		if cidr, ok := plan.Unmapped(cidr); ok {
			out = append(out, cidr)
		}
	}
	for _, cidrs := range s.cidrs {
		out = append(out, cidrs...)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}
