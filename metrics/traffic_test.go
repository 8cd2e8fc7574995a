package metrics

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"

	"nodeproxy/plan"
)

// fakeTraffic yields what it holds; an entry without a name is an error.
type fakeTraffic []plan.Traffic

func (f fakeTraffic) Traffic(context.Context) iter.Seq2[plan.Traffic, error] {
	return func(yield func(plan.Traffic, error) bool) {
		for _, t := range f {
			var err error
			if t.Key.Service.Name == "" {
				t, err = plan.Traffic{}, errors.New("not to be read")
			}
			if !yield(t, err) {
				return
			}
		}
	}
}

// changing is a TrafficReader that can be given others' traffic.
type changing struct{ fakeTraffic }

// busy is the traffic of Services, "NAME:BYTES".
func busy(list ...string) fakeTraffic {
	var out fakeTraffic
	for _, text := range list {
		name, bytes, _ := strings.Cut(text, ":")
		t := plan.Traffic{Key: testKey(name, plan.IPv4)}
		_, _ = fmt.Sscan(bytes, &t.BytesIn)
		out = append(out, t)
	}
	return out
}

// TestTrafficLimit: who has a place, as Services come, get busier and go.
func TestTrafficLimit(t *testing.T) {
	t.Parallel()
	s, reader := New(Config{Mode: ipvs}), &changing{}
	s.CollectTraffic(reader, 2)
	for _, step := range []struct {
		what    string
		traffic fakeTraffic
		want    string
		out     float64
	}{
		{"none", nil, "[]", 0},
		{"the busiest at first", busy("a:1", "b:3", "c:2"), "[b c]", 1},
		{"another gets busier", busy("a:9", "b:3", "c:2"), "[b c]", 1},
		{"a counter begins again", busy("a:9", "b:0", "c:2"), "[b c]", 1},
		{"one goes", busy("a:9", "c:2", "d:10"), "[c d]", 1},
		{"a place for all", busy("d:10", "c:2"), "[c d]", 0},
		{"one can't be read, and keeps its place", append(busy("a:90", "d:10"), plan.Traffic{}), "[d]", 1},
		{"it can be read again", busy("a:90", "c:2", "d:10"), "[c d]", 1},
		{"many others while both stay", busy("e:1", "f:2", "c:1", "g:9", "h:3", "i:8", "j:4", "d:1", "k:5"), "[c d]", 7},
		{"many others when both go", busy("e:1", "f:2", "g:9", "h:3", "i:8", "j:4", "k:5"), "[g i]", 5},
	} {
		reader.fakeTraffic = step.traffic
		var got []string
		for _, m := range gather(t, s)["nodeproxy_service_bytes_total"].GetMetric() {
			if l := m.GetLabel(); l[0].GetValue() == "in" {
				got = append(got, l[5].GetValue())
			}
		}
		slices.Sort(got)
		if fmt.Sprint(got) != step.want {
			t.Errorf("%s: %s, want %s", step.what, got, step.want)
		}
		holds(t, s, map[string]float64{"nodeproxy_service_traffic_left_out": step.out})
	}
	// holds reads once more, so the one error was met twice.
	holds(t, s, map[string]float64{"nodeproxy_service_traffic_read_failures_total": 2})
}

func TestTrafficValues(t *testing.T) {
	t.Parallel()
	s := New(Config{Mode: ipvs})
	s.CollectTraffic(fakeTraffic{
		{Key: testKey("a", plan.IPv6), Connections: 1, PacketsIn: 2, PacketsOut: 3, BytesIn: 4, BytesOut: 5},
		{Key: testKey("b", plan.IPv4), Connections: 6, PacketsIn: plan.NotCounted, PacketsOut: plan.NotCounted, BytesIn: 0, BytesOut: plan.NotCounted},
	}, 1000)
	const a, b = " ip_family=IPv6 namespace=ns port=http protocol=TCP service=a", " ip_family=IPv4 namespace=ns port=http protocol=TCP service=b"
	holds(t, s, map[string]float64{
		"nodeproxy_service_connections_total" + a:           1,
		"nodeproxy_service_packets_total direction=in" + a:  2,
		"nodeproxy_service_packets_total direction=out" + a: 3,
		"nodeproxy_service_bytes_total direction=in" + a:    4,
		"nodeproxy_service_bytes_total direction=out" + a:   5,
		"nodeproxy_service_connections_total" + b:           6,
		"nodeproxy_service_bytes_total direction=in" + b:    0,
	})
	for name, want := range map[string]int{"nodeproxy_service_packets_total": 2, "nodeproxy_service_bytes_total": 3} {
		if got := len(gather(t, s)[name].GetMetric()); got != want {
			t.Errorf("%s has %d series, want %d", name, got, want)
		}
	}
}

// TestTrafficOff: with a limit of 0 nobody is asked.
func TestTrafficOff(t *testing.T) {
	t.Parallel()
	s := New(Config{Mode: ipvs})
	s.CollectTraffic(nil, 0)
	if gather(t, s)["nodeproxy_service_traffic_left_out"] != nil {
		t.Error("traffic is collected")
	}
}

// TestNobodyIsAskedBeforeAScrape: registering does not read counters.
func TestNobodyIsAskedBeforeAScrape(t *testing.T) {
	t.Parallel()
	s, asked := New(Config{Mode: ipvs}), 0
	s.CollectTraffic(readerFunc(func() { asked++ }), 1000)
	s.Synced(Sync{})
	if asked != 0 {
		t.Errorf("asked %d times before a scrape", asked)
	}
	gather(t, s)
	if asked != 1 {
		t.Errorf("asked %d times by one scrape", asked)
	}
}

type readerFunc func()

func (f readerFunc) Traffic(context.Context) iter.Seq2[plan.Traffic, error] {
	f()
	return fakeTraffic(nil).Traffic(context.Background())
}

// BenchmarkScrapeTraffic is a scrape of the traffic of 10,000 ServicePorts, of which 1,000 have metrics.
func BenchmarkScrapeTraffic(b *testing.B) {
	var all fakeTraffic
	for i := range 10_000 {
		all = append(all, plan.Traffic{Key: testKey(fmt.Sprintf("service-%05d", i), plan.IPv4), Connections: 1, BytesIn: int64(i)})
	}
	s := New(Config{Mode: ipvs})
	s.CollectTraffic(all, 1000)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.registry.Gather(); err != nil {
			b.Fatal(err)
		}
	}
}
