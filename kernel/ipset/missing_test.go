package ipset

import (
	"strings"
	"testing"

	"nodeproxy/internal/nstest"
)

// TestMissing asks for what has to be there without the right to it.
func TestMissing(t *testing.T) {
	nstest.Enter(t)
	nstest.DropNetAdmin(t)
	if s, err := OpenSets(); err != nil {
		wantAdvice(t, err, "ipset: the capability CAP_NET_ADMIN", "run as root")
	} else {
		s.Close()
		t.Error("sets can be opened without any right to them")
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
