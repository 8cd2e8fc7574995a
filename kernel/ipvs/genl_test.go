package ipvs

import (
	"testing"

	"nodeproxy/kernel/netlink"
)

// TestCutShort reads what no kernel sends.
func TestCutShort(t *testing.T) {
	for _, b := range []netlink.Buffer{nil, {8}, {8, 0, 2, 0}, {0, 0, 2, 0}, {3, 0, 2, 0}, {5, 0, 2, 0}} {
		if _, _, err := parseService(append(genl(0), b...)); err == nil {
			t.Errorf("%v is a virtual server", b)
		}
		if _, _, err := parseRealServer(append(genl(0), b...), 4); err == nil {
			t.Errorf("%v is a real server", b)
		}
	}
}
