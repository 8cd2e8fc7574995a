package main

import (
	"net/netip"
	"testing"

	"nodeproxy/inspect"
	"nodeproxy/kernel/tracer"
)

// TestDistinct: of a first packet that is sent again, the one counts that got furthest.
func TestDistinct(t *testing.T) {
	t.Parallel()
	client, other := netip.MustParseAddrPort("192.0.2.7:1000"), netip.MustParseAddrPort("192.0.2.7:1001")
	to, endpoint := netip.MustParseAddrPort("10.96.0.10:80"), netip.MustParseAddrPort("10.244.1.5:8080")
	got := distinct([]tracer.Packet{
		{Src: client, Dst: to, From: client, To: to, End: tracer.Lost}, {Src: other, Dst: to, From: other, To: endpoint, End: tracer.Accept, Replied: true},
		{Src: client, Dst: to, From: client, To: endpoint, End: tracer.Accept}, {Src: client, Dst: to, From: client, To: to, End: tracer.Lost},
	})
	if len(got) != 2 || got[0].Action == inspect.Lost || got[0].Endpoint != endpoint.String() || got[0].Repeated != 2 || got[1].Repeated != 0 || !got[1].Answered {
		t.Errorf("%+v", got)
	}
}
