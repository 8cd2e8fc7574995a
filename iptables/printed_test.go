package iptables

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// TestAddressesAsPrinted: every form of an address and a range, in rules and as destination of DNAT, is written as iptables-save
// prints it.
func TestAddressesAsPrinted(t *testing.T) {
	t.Parallel()
	prefixes := map[plan.Family][]string{
		plan.IPv4: {"1.2.3.4/32", "10.0.0.0/8", "0.0.0.0/32", "0.0.0.0/1", "128.0.0.0/1"},
		plan.IPv6: {
			"::1.2.3.4/128", "::102/128", "::1:2/128", "::0.1.0.2/128", "::ffff/128", "::1:0/128", "::1/128", "::2/128", "::/128",
			"::1:0:0/128", "::1:2:3/128", "::ffff:0:0/128", "::fffe:102:304/128", "::ffff:0:102:304/128", "64:ff9b::102:304/128",
			"::1.2.3.0/120", "::1.2.0.0/112", "::1.0.0.0/104", "::/1", "::/96", "::1.2.3.4/126", "::ffff:0:0:0/80",
			"fd00::/8", "fd00:0:0:1::/64", "fd00:0:1:0:0:1:0:0/112", "1:0:0:2:0:0:0:3/128", "1:0:2:3:4:5:6:7/128", "0:1:2:3:4:5:6:7/128",
			"1:2:3:4:5:6:7:0/128", "0:0:1:2:3:4:5:6/128", "1:2:3:4:5:6::/128", "0:0:0:0:0:1:0:0/128", "::100:0/128", "::255.255.255.255/128",
		},
	}
	inAll(t, func(t *testing.T, v xtables.Variant, f plan.Family) {
		e := realEngine(t, v, f)
		var rules []string
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if f == plan.IPv6 {
			all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		rules = append(rules, xtables.NewRule().Src(all).Dst(all).Jump("RETURN"), xtables.NewRule().ConnectedTo(all).Jump("RETURN"))
		for _, text := range prefixes[f] {
			p := netip.MustParsePrefix(text).Masked()
			rules = append(rules, xtables.NewRule().Src(p).Jump("RETURN"), xtables.NewRule().NotDst(p).Jump("RETURN"))
			if p.IsSingleIP() {
				rules = append(rules, xtables.NewRule().Proto(plan.TCP).Word("-m", "tcp").Jump("DNAT --to-destination "+netip.AddrPortFrom(p.Addr(), 80).String()))
			}
			rules = append(rules, xtables.NewRule().ConnectedTo(p).Jump("RETURN"))
		}
		c := xtables.Chain{Table: names.NAT, Name: "KUBE-SVC-TEST", Rules: rules}
		require.NoError(t, e.Write(t.Context(), nil, []xtables.Change{xtables.WriteChain(c)}))
		held, err := e.Kernel.Save(t.Context(), names.NAT)
		require.NoError(t, err)
		if got, want := strings.Join(held[c.Name], "\n"), strings.Join(rules, "\n"); got != want {
			t.Errorf("written and printed differ:\n%s", diffLines(want, got))
		}
	})
}
