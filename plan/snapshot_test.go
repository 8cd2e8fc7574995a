package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// text prints all of a snapshot.
func (s *Snapshot) text() string {
	var out strings.Builder
	fmt.Fprintf(&out, "%d %s %v %v %t\n", s.Generation, s.Time, s.Node, s.Settings, s.Partial)
	for svc, ports := range s.Services() {
		fmt.Fprintln(&out, svc)
		for _, sp := range ports {
			fmt.Fprintf(&out, "  %p %s %s\n", sp, sp.Key, sp.Affinity)
		}
	}
	return out.String()
}

// checkSnapshot compares a snapshot with the plan that it is of.
func checkSnapshot(t *rapid.T, s *Snapshot, p *Plan) {
	n := 0
	var last Service
	for svc, ports := range s.Services() {
		if n > 0 && last.Compare(svc) >= 0 {
			t.Fatalf("%s comes before %s", last, svc)
		}
		last = svc
		var keys []Key
		for _, sp := range ports {
			keys = append(keys, sp.Key)
			if p.Services[sp.Key] != sp || s.ServicePort(sp.Key) != sp {
				t.Fatalf("%s is not that of the plan", sp.Key)
			}
		}
		if len(keys) == 0 || !slices.Equal(keys, p.KeysOf(svc)) {
			t.Fatalf("%s has %v, want %v", svc, keys, p.KeysOf(svc))
		}
		n += len(ports)
	}
	if n != len(p.Services) {
		t.Fatalf("there are %d ServicePorts, want %d", n, len(p.Services))
	}
	if got := s.ServicePort(Key{Service: Service{"ns", "none"}}); got != nil {
		t.Fatalf("%s is there", got.Key)
	}
}

// TestSnapshot: whatever changes how, a snapshot is the plan as it was when it was published, and stays so.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := New(Node{Name: "n"}, Settings{})
		var published Publisher
		if published.Latest() != nil {
			t.Fatal("there is a snapshot before the first")
		}
		var taken []*Snapshot
		var texts []string
		services := rapid.SampledFrom([]int{3, 100, 1000}).Draw(t, "services")
		for range rapid.IntRange(1, 12).Draw(t, "updates") {
			changed := Keys{}
			from := rapid.IntRange(0, services-1).Draw(t, "from")
			several := rapid.SampledFrom([]int{1, 2, services}).Draw(t, "how many")
			add := rapid.IntRange(0, 3).Draw(t, "add") > 0
			for i := from; i < min(from+several, services); i++ {
				k := Key{Service: Service{"ns", fmt.Sprint(i)}, Port: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "port"),
					Protocol: TCP, Family: rapid.SampledFrom(Families[:]).Draw(t, "family")}
				changed.Add(k)
				if add {
					p.Set(&ServicePort{Key: k, Affinity: time.Duration(len(taken))})
					continue
				}
				for _, k := range p.KeysOf(k.Service) {
					changed.Add(k)
					p.Delete(k)
				}
			}
			p.Node.IPs = []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(len(taken))})}
			p.Partial = rapid.Bool().Draw(t, "partial")
			change := Only(changed)
			if rapid.IntRange(0, 4).Draw(t, "all") == 0 {
				change = Everything()
			}
			published.Publish(p, change)
			s := published.Latest()
			checkSnapshot(t, s, p)
			if s.Generation != uint64(len(taken)+1) || !s.Node.Equal(p.Node) || s.Partial != p.Partial || time.Since(s.Time) > time.Minute {
				t.Fatalf("snapshot %d is generation %d of %v, %v", len(taken)+1, s.Generation, s.Time, s.Node)
			}
			taken, texts = append(taken, s), append(texts, s.text())
		}
		for i, s := range taken {
			if now := s.text(); now != texts[i] {
				t.Fatalf("snapshot %d of %d was\n%s\nand is\n%s", i+1, len(taken), texts[i], now)
			}
		}
	})
}

// TestNoSnapshot: who asks before the first plan gets no Services.
func TestNoSnapshot(t *testing.T) {
	for svc := range (&Publisher{}).Latest().Services() {
		t.Errorf("there is %s", svc)
	}
}

// TestSnapshotShares: one change makes one Service anew, and a comparison of everything that finds nothing none; a change copies little,
// whatever the number of Services.
func TestSnapshotShares(t *testing.T) {
	p, published := manyServices(10000)
	k := Key{Service: Service{"namespace-7", "service-5007"}, Port: "http", Protocol: TCP, Family: IPv6}
	before := published.Latest()
	check := func(what string, changed int) {
		t.Helper()
		same := 0
		before.services.Ascend(func(e *programmed) bool {
			if now, _ := published.Latest().services.Get(e); now == e {
				same++
			}
			return true
		})
		if same != before.services.Len()-changed {
			t.Errorf("%s: %d of %d Services are as before", what, same, before.services.Len())
		}
	}
	published.Publish(p, Everything())
	check("no change", 0)
	p.Set(&ServicePort{Key: k})
	published.Publish(p, Only(Keys{k: {}}))
	check("one change", 1)
	if published.Latest().ServicePort(k) == before.ServicePort(k) {
		t.Error("the change is not there")
	}
	if n := testing.AllocsPerRun(10, func() {
		p.Set(&ServicePort{Key: k})
		published.Publish(p, Only(Keys{k: {}}))
	}); n > 50 {
		t.Errorf("a change takes %v allocations", n)
	}
	for range published.Latest().Services() {
		break // An iteration may end early.
	}
}

// TestSnapshotReaders: while a plan changes, each of several readers sees whole snapshots, in order. It is for the race detector.
func TestSnapshotReaders(t *testing.T) {
	t.Parallel()
	p, published := manyServices(300)
	keys := slices.SortedFunc(maps.Keys(p.Services), Key.Compare)
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			last := uint64(0)
			for end := false; !end; {
				select {
				case <-done:
					end = true
				default:
				}
				s := published.Latest()
				if s.Generation < last {
					t.Errorf("generation %d comes after %d", s.Generation, last)
				}
				last = s.Generation
				k := keys[s.Generation%uint64(len(keys))]
				if sp, _ := s.Programmed(k); sp != nil && !s.Serves(k.Service) {
					t.Errorf("generation %d has %s, and not its Service", s.Generation, k)
				}
				n := 0
				for _, ports := range s.Services() {
					for _, sp := range ports { // The writer changes all families of a Service at once.
						if n++; sp.Affinity != ports[0].Affinity || sp.Affinity > time.Duration(s.Generation) {
							t.Errorf("generation %d has %s of %d and %d", s.Generation, sp.Key, sp.Affinity, ports[0].Affinity)
						}
					}
				}
				if n != len(keys) && n != len(keys)-2 {
					t.Errorf("generation %d has %d ServicePorts", s.Generation, n)
				}
			}
		})
	}
	for i := range 2000 {
		k := keys[i%len(keys)]
		changed := Keys{}
		for _, f := range Families {
			k.Family = f
			changed.Add(k)
			p.Delete(k)
		}
		if i%3 == 0 {
			published.Publish(p, Only(changed))
		}
		for k := range changed {
			p.Set(&ServicePort{Key: k, Affinity: time.Duration(published.Latest().Generation)})
		}
		change := Only(changed)
		if i%50 == 0 {
			change = Everything()
		}
		published.Publish(p, change)
	}
	close(done)
	readers.Wait()
}

// manyServices returns a plan with so many Services of both families, published.
func manyServices(n int) (*Plan, *Publisher) {
	p := New(Node{Name: "n"}, Settings{})
	for i := range n {
		for _, f := range Families {
			p.Set(&ServicePort{Key: Key{Service: Service{fmt.Sprintf("namespace-%d", i%50), fmt.Sprintf("service-%d", i)}, Port: "http",
				Protocol: TCP, Family: f}})
		}
	}
	published := &Publisher{}
	published.Publish(p, Everything())
	return p, published
}

// BenchmarkPublish is a change of one endpoint's ServicePorts, both families, and a comparison of everything.
func BenchmarkPublish(b *testing.B) {
	for _, n := range []int{1000, 10000, 100000} {
		p, published := manyServices(n)
		keys := slices.SortedFunc(maps.Keys(p.Services), Key.Compare)
		b.Run(fmt.Sprintf("services=%d/one", n), func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i = (i + 7919*2) % len(keys)
				published.Publish(p, Only(Keys{keys[i]: {}, keys[i+1]: {}}))
			}
		})
		b.Run(fmt.Sprintf("services=%d/all", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				published.Publish(p, Everything())
			}
		})
	}
}
