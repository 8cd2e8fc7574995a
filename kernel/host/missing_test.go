package host

import (
	"strings"
	"testing"

	"nodeproxy/internal/nstest"
)

// TestMissing asks for what no kernel has, and for what has to be there without the right to it.
func TestMissing(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	d.name = "none0"
	wantAdvice(t, d.add("none-such", nil), "module none-such", "run modprobe none")
	wantAdvice(t, d.canMake("none-too"), "module none-too", "run modprobe none")
	nstest.DropNetAdmin(t)
	if d, err := OpenDevice("none1"); err != nil {
		wantAdvice(t, err, "interface none1: the capability CAP_NET_ADMIN", "run as root")
	} else {
		d.Close()
		t.Error("an interface can be made without any right to it")
	}
	if err := CheckDevice("none1"); err != nil {
		wantAdvice(t, err, "interface none1: the capability", "run as root")
	} else {
		t.Error("an interface could be made without any right to it")
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
