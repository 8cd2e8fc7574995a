package iptables

import (
	"net"
	"testing"
	"time"

	"nodeproxy/backend"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// TestLocalhostNodePortsAreCounted connects to a node port at loopback and other addresses, and to another port.
func TestLocalhostNodePortsAreCounted(t *testing.T) {
	t.Parallel()
	inVariants(t, connectToLocalhost)
}

func connectToLocalhost(t *testing.T, v xtables.Variant) {
	listener, err := listenAt("192.0.2.7:8080", "192.0.2.7/32")
	if err != nil {
		t.Error(err)
		return
	}
	defer listener.Close()
	// Backend.Sync would do its work on other threads, which are in other namespaces.
	e := realEngine(t, v, plan.IPv4)
	b := &Backend{PerFamily: backend.PerFamily[*engine]{Engines: []*engine{e}}}
	read := b.LocalhostNodePorts()
	p := trafficPlan("192.0.2.7:8080")
	p.Settings.LocalhostNodePorts = true
	if n, err := read(); n != 0 || err != nil {
		t.Errorf("before the first sync: %d connections, %v", n, err)
	}
	program(t, e, p, plan.Everything())
	for _, c := range []struct {
		to   string
		open bool
		want uint64
	}{
		{"127.0.0.1:30080", true, 1}, {"127.0.0.1:30081", false, 1}, {"192.0.2.7:30080", true, 1}, {"127.9.9.9:30080", true, 2},
		{"192.0.2.7:30081", false, 2}, {"127.0.0.1:30080", true, 3},
	} {
		conn, err := net.DialTimeout("tcp", c.to, 20*time.Second)
		if (err == nil) != c.open {
			t.Errorf("%s: %v, want it open: %t", c.to, err, c.open)
		}
		if err == nil {
			conn.Close()
		}
		if n, err := read(); n != c.want || err != nil {
			t.Errorf("after a connection to %s: %d, %v; want %d", c.to, n, err, c.want)
		}
	}
}
