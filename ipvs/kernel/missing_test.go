package kernel

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
)

// TestMissing asks for what no kernel has, and for what has to be there without the right to it. Each error has to name what
// is missing, and what to do.
func TestMissing(t *testing.T) {
	nstest.Enter(t)
	d := openDevice(t)
	d.name = "none0"
	_, family := genericFamily("NONE", "none_such")
	_, link := d.make("none-such")
	errs := map[string]error{"module none_such": family, "module none-such": link, "module none-too": d.canMake("none-too")}

	// Rights are a thread's; this one ends with the test.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var rights [2]unix.CapUserData
	if err := unix.Capget(&header, &rights[0]); err != nil {
		t.Fatal(err)
	}
	rights[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &rights[0]); err != nil {
		t.Fatal(err)
	}
	if s, err := OpenServers(); err != nil {
		errs["IPVS: the capability CAP_NET_ADMIN"] = err
	} else {
		s.Close()
		t.Error("servers can be opened without any right to them")
	}
	if s, err := OpenSets(); err != nil {
		errs["ipset: the capability CAP_NET_ADMIN"] = err
	} else {
		s.Close()
		t.Error("sets can be opened without any right to them")
	}
	if d, err := OpenDevice("none1"); err != nil {
		errs["interface none1: the capability CAP_NET_ADMIN"] = err
	} else {
		d.Close()
		t.Error("an interface can be made without any right to it")
	}
	if err := CheckDevice("none1"); err != nil {
		errs["interface none1: the capability"] = err
	} else {
		t.Error("an interface could be made without any right to it")
	}
	for want, err := range errs {
		advice := "run as root"
		if strings.HasPrefix(want, "module") {
			advice = "run modprobe none"
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), advice) {
			t.Errorf("error %v; want %q and %q in it", err, want, advice)
		}
	}
}
