package host

import (
	"net"
	"net/netip"
	"testing"

	links "github.com/vishvananda/netlink"
)

// TestUnkeyed: a policy of IPsec asks for keys that have not been agreed on.
func TestUnkeyed(t *testing.T) {
	t.Parallel()
	peer, other := net.IPv4(192, 0, 2, 7), net.IPv4(192, 0, 2, 8)
	policy := func(dir links.Dir, tmpl links.XfrmPolicyTmpl) links.XfrmPolicy {
		tmpl.Dst, tmpl.Proto = peer, links.XFRM_PROTO_ESP
		return links.XfrmPolicy{Dir: dir, Tmpls: []links.XfrmPolicyTmpl{tmpl}}
	}
	state := func(to net.IP, spi int) []links.XfrmState {
		return []links.XfrmState{{Dst: to, Proto: links.XFRM_PROTO_ESP, Spi: spi}}
	}
	for name, tc := range map[string]struct {
		policy links.XfrmPolicy
		states []links.XfrmState
		alone  bool // nobody manages keys
		want   netip.Addr
	}{
		"keys":                          {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{}), states: state(peer, 5)},
		"not asked":                     {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{})},
		"being asked":                   {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{}), states: state(peer, 0), want: netip.MustParseAddr("192.0.2.7")},
		"not asked, as nobody is there": {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{}), alone: true, want: netip.MustParseAddr("192.0.2.7")},
		"keys that somebody has set":    {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{}), states: state(peer, 5), alone: true},
		"of another":                    {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{}), states: append(state(other, 5), state(peer, 0)...), want: netip.MustParseAddr("192.0.2.7")},
		"optional":                      {policy: policy(links.XFRM_DIR_OUT, links.XfrmPolicyTmpl{Optional: 1})},
		"what comes in":                 {policy: policy(links.XFRM_DIR_IN, links.XfrmPolicyTmpl{})},
	} {
		if got := unkeyed(tc.policy, tc.states, !tc.alone); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
