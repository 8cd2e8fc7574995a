package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestServiceCIDRs: the ranges of the configuration and of ServiceCIDR objects make one list, and everything is made anew
// only where that list has changed.
func TestServiceCIDRs(t *testing.T) {
	t.Parallel()
	var said []string
	given := []netip.Prefix{netip.MustParsePrefix("fd00:10:96::/112"), netip.MustParsePrefix("::ffff:10.96.0.0/112")}
	s := NewState("me", plan.Settings{ServiceCIDRs: given}, plan.Families[:], func(f source.Finding) { said = append(said, f.String()) })
	s.Update()
	object := func(cidrs ...string) *networking.ServiceCIDR {
		return &networking.ServiceCIDR{Spec: networking.ServiceCIDRSpec{CIDRs: cidrs}}
	}
	deleting := object("10.97.0.0/16")
	deleting.DeletionTimestamp = &metav1.Time{}
	const both = "[10.96.0.0/16 fd00:10:96::/112]"
	if got := fmt.Sprint(s.Plan().Settings.ServiceCIDRs); got != both {
		t.Errorf("those of the configuration: %s", got)
	}
	for i, step := range []struct {
		objects map[string]*networking.ServiceCIDR
		want    string
		anew    bool
	}{
		{map[string]*networking.ServiceCIDR{"kubernetes": object("10.96.0.0/16", "fd00:10:96::/112")}, both, false},
		{map[string]*networking.ServiceCIDR{"more": object("10.97.0.0/16")}, "[10.96.0.0/16 10.97.0.0/16 fd00:10:96::/112]", true},
		{map[string]*networking.ServiceCIDR{"more": deleting}, "[10.96.0.0/16 10.97.0.0/16 fd00:10:96::/112]", false},
		{map[string]*networking.ServiceCIDR{"more": nil, "again": object("10.97.0.0/16")}, "[10.96.0.0/16 10.97.0.0/16 fd00:10:96::/112]", false},
		{map[string]*networking.ServiceCIDR{"bad": object("x", "10.90.0.0/16")},
			"[10.90.0.0/16 10.96.0.0/16 10.97.0.0/16 fd00:10:96::/112]", true},
		{map[string]*networking.ServiceCIDR{"again": nil, "bad": nil}, both, true},
		{map[string]*networking.ServiceCIDR{"kubernetes": nil}, both, false},
	} {
		s.Apply(source.Batch{ServiceCIDRs: step.objects})
		p, change := s.Update()
		if got := fmt.Sprint(p.Settings.ServiceCIDRs); got != step.want || change.All() != step.anew {
			t.Errorf("step %d: %s, anew %t, want %s, %t", i, got, change.All(), step.want, step.anew)
		}
	}
	if want := []string{`ServiceCIDR bad: spec.cidrs[0]: "x" is not a CIDR; this range is ignored`}; !slices.Equal(said, want) {
		t.Errorf("said %q, want %q", said, want)
	}
	if given[0] != netip.MustParsePrefix("fd00:10:96::/112") {
		t.Error("the caller's list was changed")
	}
}
