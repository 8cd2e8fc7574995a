package packetsim_test

import (
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// setOf returns a set of a type, such as "ip,port" or "bitmap port", with entries such as "10.96.0.1,tcp:80".
func setOf(kind string, entries ...string) *packetsim.Set {
	dimensions, bitmap := strings.CutPrefix(kind, "bitmap ")
	s := &packetsim.Set{Family: plan.IPv4, Dimensions: strings.Split(dimensions, ","), Entries: map[packetsim.Element]packetsim.Entry{}}
	if bitmap {
		s.Family = 0
	}
	for _, text := range entries {
		var e packetsim.Element
		for i, part := range strings.Split(text, ",") {
			if s.Dimensions[i] != "port" {
				if !strings.Contains(part, "/") {
					part += "/32"
				}
				e[i].Prefix = netip.MustParsePrefix(part)
				continue
			}
			protocol, port, is := strings.Cut(part, ":")
			if !is {
				protocol, port = "", part
			}
			n, _ := strconv.Atoi(port)
			e[i].Protocol, e[i].Port = protocol, uint16(n)
		}
		s.Entries[e] = packetsim.Entry{Text: text}
	}
	return s
}

// TestSetFind asks sets of each type for packets from 203.0.113.1 to port 80 of 10.96.0.1.
func TestSetFind(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		kind, entries string // entries are separated by spaces
		flags         string // s for src, d for dst
		protocol      string
		want          string // the entry
	}{
		{"ip", "10.96.0.1", "d", "tcp", "10.96.0.1"},
		{"ip", "10.96.0.1", "s", "tcp", ""},
		{"ip", "203.0.113.1", "s", "tcp", "203.0.113.1"},
		{"ip", "10.96.0.2 10.96.0.3", "d", "tcp", ""},
		{"ip", "", "d", "tcp", ""},
		{"ip,port", "10.96.0.1,tcp:80", "dd", "tcp", "10.96.0.1,tcp:80"},
		{"ip,port", "10.96.0.1,tcp:80", "dd", "udp", ""},
		{"ip,port", "10.96.0.1,sctp:80", "dd", "sctp", "10.96.0.1,sctp:80"},
		{"ip,port", "10.96.0.1,tcp:81", "dd", "tcp", ""},
		{"ip,port", "10.96.0.1,tcp:80", "sd", "tcp", ""},
		{"ip,port", "10.96.0.1,tcp:80", "d", "tcp", ""},                   // too few flags
		{"ip,port", "10.96.0.1,tcp:80", "dds", "tcp", "10.96.0.1,tcp:80"}, // more do no harm
		{"ip,port,ip", "10.96.0.1,tcp:80,203.0.113.1", "dds", "tcp", "10.96.0.1,tcp:80,203.0.113.1"},
		{"ip,port,ip", "10.96.0.1,tcp:80,10.96.0.1", "dds", "tcp", ""},
		{"ip,port,net", "10.96.0.1,tcp:80,203.0.113.0/24", "dds", "tcp", "10.96.0.1,tcp:80,203.0.113.0/24"},
		{"ip,port,net", "10.96.0.1,tcp:80,203.0.114.0/24", "dds", "tcp", ""},
		{"ip,port,net", "10.96.0.1,tcp:80,203.0.0.0/8 10.96.0.1,tcp:80,203.0.113.0/24", "dds", "tcp", "10.96.0.1,tcp:80,203.0.113.0/24"},
		{"net", "0.0.0.0/1", "d", "tcp", "0.0.0.0/1"},
		{"net", "10.96.0.1", "d", "tcp", "10.96.0.1"},
		{"net,port", "0.0.0.0/1,tcp:80", "dd", "tcp", "0.0.0.0/1,tcp:80"},
		{"net,port", "128.0.0.0/1,tcp:80", "dd", "tcp", ""},
		{"bitmap port", "80", "d", "tcp", "80"},
		{"bitmap port", "80", "d", "udp", "80"},
		{"bitmap port", "80", "d", "sctp", ""},
		{"bitmap port", "70 90", "d", "tcp", ""},
	} {
		var flags []bool
		for _, f := range tc.flags {
			flags = append(flags, f == 's')
		}
		p := packetsim.Packet{Src: client, Dst: vip, Protocol: tc.protocol, Port: 80}
		e, found, err := setOf(tc.kind, strings.Fields(tc.entries)...).Find(&p, flags)
		if err != nil || e.Text != tc.want || found != (tc.want != "") {
			t.Errorf("in %s %q, a %s packet's %s finds %q, %t, %v, want %q", tc.kind, tc.entries, tc.protocol, tc.flags, e.Text, found, err, tc.want)
		}
	}
	// A source port is not known, and no guess.
	if _, _, err := setOf("ip,port").Find(&packetsim.Packet{Dst: vip}, []bool{false, true}); err == nil || !strings.Contains(err.Error(), "source port is not known") {
		t.Errorf("error is %v", err)
	}
}
