package controlplane

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

func checkServiceCIDR(s *networking.ServiceCIDR, c *checker) {
	checkMeta(&s.ObjectMeta, false, validation.IsDNS1123Subdomain, c)
	if n := len(s.Spec.CIDRs); n < 1 || n > 2 {
		c.reject("spec.cidrs", "%d ranges; a ServiceCIDR has one, or one of each family", n)
		return
	}
	seen := map[v1.IPFamily]bool{}
	for i, text := range s.Spec.CIDRs {
		field := fmt.Sprintf("spec.cidrs[%d]", i)
		// Unlike older fields, this one is parsed strictly.
		cidr, err := netip.ParsePrefix(text)
		switch {
		case err != nil || cidr.Addr().Is4In6():
			c.reject(field, "%.60q is not a CIDR", text)
			continue
		case cidr != cidr.Masked():
			c.reject(field, "%s has host bits set; the range is %s", text, cidr.Masked())
		case seen[familyOf(cidr.Addr())]:
			c.reject(field, "%s is the second range of its family", text)
		}
		seen[familyOf(cidr.Addr())] = true
	}
}
