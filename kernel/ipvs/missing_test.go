package ipvs

import (
	"strings"
	"testing"

	"nodeproxy/internal/nstest"
)

// TestMissing asks for what no kernel has, and for what has to be there without the right to it.
func TestMissing(t *testing.T) {
	nstest.Enter(t)
	_, err := genericFamily("NONE", "none_such")
	wantAdvice(t, err, "module none_such", "run modprobe none")
	nstest.DropNetAdmin(t)
	if s, err := OpenServers(); err != nil {
		wantAdvice(t, err, "IPVS: the capability CAP_NET_ADMIN", "run as root")
	} else {
		s.Close()
		t.Error("servers can be opened without any right to them")
	}
	if c, err := OpenCounts(); err == nil {
		c.Close()
		t.Error("servers can be counted without any right to them")
	}
}

// wantAdvice checks that an error names what is missing, and what to do.
func wantAdvice(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v; want %q in it", err, part)
		}
	}
}
