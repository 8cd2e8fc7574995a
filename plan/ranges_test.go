package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed"
)

func TestCanonical(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ in, want string }{
		{"[]", "[]"},
		{"[10.0.0.0/8 10.1.0.0/16 10.0.0.0/8]", "[10.0.0.0/8]"},
		{"[10.0.1.0/24 10.0.0.0/24]", "[10.0.0.0/23]"},
		{"[10.0.1.0/24 10.0.2.0/24]", "[10.0.1.0/24 10.0.2.0/24]"},
		{"[10.0.0.0/25 10.0.1.0/24 10.0.0.128/26 10.0.0.192/26]", "[10.0.0.0/23]"},
		{"[128.0.0.0/1 0.0.0.0/1]", "[0.0.0.0/0]"},
		{"[::/1 8000::/1 2001:db8::/32]", "[::/0]"},
		{"[0.0.0.0/0 0.0.0.0/0]", "[0.0.0.0/0]"},
		{"[2001:db8::2/127 2001:db8::1/128 2001:db8::/128]", "[2001:db8::/126]"},
	} {
		var in []netip.Prefix
		for _, text := range strings.Fields(strings.Trim(tc.in, "[]")) {
			in = append(in, netip.MustParsePrefix(text))
		}
		if got := fmt.Sprint(Canonical(in)); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.in, got, tc.want)
		}
	}
}

// TestCanonicalHoldsTheSame: of a small space, each address is in the canonical ranges if it is in one of those given. These ranges
// are as few as possible: each is all of a part of the space, and the part of twice its size is not full.
func TestCanonicalHoldsTheSame(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		space := rapid.SampledFrom([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/26"), netip.MustParsePrefix("255.255.255.192/26"),
			netip.MustParsePrefix("2001:db8::ffc0/122")}).Draw(t, "space")
		var all []netip.Addr
		for a := space.Addr(); space.Contains(a); a = a.Next() {
			all = append(all, a)
		}
		given := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
			bits := space.Bits() + rapid.IntRange(1, 6).Draw(t, "bits")
			return netip.PrefixFrom(all[rapid.IntRange(0, len(all)-1).Draw(t, "address")], bits).Masked()
		}), 0, 40).Draw(t, "ranges")
		in := func(list []netip.Prefix, a netip.Addr) bool {
			return slices.ContainsFunc(list, func(r netip.Prefix) bool { return r.Contains(a) })
		}
		got := Canonical(slices.Clone(given))
		for _, a := range all {
			if want := in(given, a); in(got, a) != want || Within(got, a) != want {
				t.Fatalf("%s: %s is in %s: %v, Within: %v; in %s: %v", space, a, got, in(got, a), Within(got, a), given, want)
			}
		}
		for _, a := range []netip.Addr{space.Addr().Prev(), all[len(all)-1].Next()} {
			if a.IsValid() && Within(got, a) {
				t.Fatalf("%s is within %s", a, got)
			}
		}
		full := func(r netip.Prefix) bool {
			return !slices.ContainsFunc(all, func(a netip.Addr) bool { return r.Contains(a) && !in(given, a) })
		}
		for i, r := range got {
			if r != r.Masked() || i > 0 && got[i-1].Compare(r) >= 0 || full(netip.PrefixFrom(r.Addr(), r.Bits()-1).Masked()) && r.Bits() > space.Bits() {
				t.Fatalf("%s: range %s of %s", space, r, got)
			}
		}
	})
}
