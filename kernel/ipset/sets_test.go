package ipset

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

func openSets(t testing.TB) *Sets {
	t.Helper()
	nstest.Enter(t)
	s, err := OpenSets()
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// setOf is a set of entries.
func setOf(entries ...Entry) map[Entry]struct{} {
	m := map[Entry]struct{}{}
	for _, e := range entries {
		m[e] = struct{}{}
	}
	return m
}

func entriesOf(s *Sets, set Set) (map[Entry]struct{}, error) {
	var m map[Entry]struct{}
	err := s.Entries(set, func() { m = map[Entry]struct{}{} }, func(e Entry) { m[e] = struct{}{} })
	return m, err
}

// samples are entries for each type and family.
func samples(kind string, f plan.Family) []Entry {
	a, b := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.1.0.1")
	wide, one, half := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("128.0.0.0/1")
	if f == plan.IPv6 {
		a, b = netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00:1::")
		wide, one, half = netip.MustParsePrefix("fd00::/64"), netip.MustParsePrefix("fd00::1/128"), netip.MustParsePrefix("::/1")
	}
	switch kind {
	case "hash:ip":
		return []Entry{{Addr: a}, {Addr: b}}
	case "hash:net":
		return []Entry{{Net: wide}, {Net: one}, {Net: half}}
	case "hash:ip,port":
		return []Entry{
			{Addr: a, Protocol: plan.TCP, Port: 443}, {Addr: a, Protocol: plan.UDP, Port: 1},
			{Addr: b, Protocol: plan.SCTP, Port: 65535},
		}
	case "hash:net,port":
		return []Entry{
			{Net: wide, Protocol: plan.TCP, Port: 443}, {Net: half, Protocol: plan.UDP, Port: 1},
			{Net: one, Protocol: plan.SCTP, Port: 65535},
		}
	case "hash:ip,port,ip":
		return []Entry{{Addr: a, Protocol: plan.TCP, Port: 443, Addr2: b}, {Addr: a, Protocol: plan.UDP, Port: 1, Addr2: a}}
	case "hash:ip,port,net":
		return []Entry{{Addr: a, Protocol: plan.TCP, Port: 443, Net: one}, {Addr: a, Protocol: plan.SCTP, Port: 1, Net: half}}
	default:
		return []Entry{{Port: 0}, {Port: 80}, {Port: 65535}}
	}
}

// TestSetsReadBack compares what was written with what is read, and both with what ipset says, for all types.
func TestSetsReadBack(t *testing.T) {
	s := openSets(t)
	n := 0
	for kind := range setTypes {
		for _, f := range plan.Families {
			for _, marks := range []bool{false, true} {
				n++
				set := Set{Name: fmt.Sprintf("SET-%d", n), Type: kind, Family: f, Marks: marks}
				if created, err := s.Ensure(set); !created || err != nil {
					t.Fatalf("Ensure %+v: %v, %v", set, created, err)
				}
				want := samples(kind, f)
				for round := range 2 { // The second time, the marks change.
					if marks {
						want[0].Mark, want[0].Mask = 0x90000001, 0xffffffff
						want[1].Mark, want[1].Mask = uint32(round), 0xff00
					}
					require.NoError(t, s.Add(set, want))
					if got, err := entriesOf(s, set); err != nil || !maps.Equal(got, setOf(want...)) {
						t.Errorf("%+v: entries %v, %v; want %v", set, got, err, want)
					}
				}
				list := []string{set.Name}
				for i := range FewSets { // They are not there; but for the first time, others are.
					list = append(list, fmt.Sprint("ABSENT-", i))
				}
				sizes, err := s.Sizes(list)
				if err != nil || !maps.Equal(sizes, map[string]int{set.Name: len(want)}) {
					t.Errorf("%+v: sizes %v, %v; want %d", set, sizes, err, len(want))
				}
				lines := []string{set.CreateText()}
				for _, e := range want {
					lines = append(lines, "add "+set.Name+" "+e.Text(set))
				}
				got := strings.Split(strings.TrimSpace(nstest.Exec(t, "ipset", "save", set.Name)), "\n")
				slices.Sort(lines)
				slices.Sort(got)
				if !slices.Equal(got, lines) {
					t.Errorf("ipset save:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(lines, "\n"))
				}
				if created, err := s.Ensure(set); created || err != nil {
					t.Errorf("Ensure again: %v, %v", created, err)
				}
				for range 2 { // The second time, they are gone.
					assert.NoError(t, s.Remove(set, want[1:]))
				}
				if got, err := entriesOf(s, set); err != nil || !maps.Equal(got, setOf(want[0])) {
					t.Errorf("%+v: entries %v after removing all but one, %v", set, got, err)
				}
			}
		}
	}
	names, err := s.Names()
	if err != nil || len(names) != n || !slices.IsSorted(names) {
		t.Errorf("names %v, %v; want %d", names, err, n)
	}
	sizes, err := s.Sizes(names)
	require.NoError(t, err)
	require.Len(t, sizes, n)
	for _, name := range names {
		assert.Equal(t, 1, sizes[name], name)
	}
	for _, name := range append(names, names...) {
		assert.NoError(t, s.Destroy(name))
	}
	if names, err := s.Names(); err != nil || names != nil {
		t.Errorf("names %v, %v after destroying all", names, err)
	}
}

// TestSetThatIpsetMade takes over a set that a newer revision of its type made, as kube-proxy does by way of ipset.
func TestSetThatIpsetMade(t *testing.T) {
	s := openSets(t)
	nstest.Exec(t, "ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port", "family", "inet", "maxelem", "100")
	nstest.Exec(t, "ipset", "add", "KUBE-CLUSTER-IP", "10.96.0.1,tcp:443")
	set := Set{Name: "KUBE-CLUSTER-IP", Type: "hash:ip,port", Family: plan.IPv4}
	if created, err := s.Ensure(set); created || err != nil {
		t.Errorf("Ensure: %v, %v", created, err)
	}
	want := setOf(Entry{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: plan.TCP, Port: 443})
	if got, err := entriesOf(s, set); err != nil || !maps.Equal(got, want) {
		t.Errorf("entries %v, %v; want %v", got, err, want)
	}
}

func TestSetWithOtherProperties(t *testing.T) {
	s := openSets(t)
	for i, c := range []struct {
		args    string
		want    Set
		refused bool // while a rule asks the set
	}{
		{"hash:ip family inet timeout 5", Set{Type: "hash:ip", Family: plan.IPv4}, false},
		{"hash:ip family inet", Set{Type: "hash:ip", Family: plan.IPv4, Marks: true}, false},
		{"hash:ip family inet skbinfo counters", Set{Type: "hash:ip", Family: plan.IPv4, Marks: true}, false},
		{"hash:ip family inet netmask 24", Set{Type: "hash:ip", Family: plan.IPv4}, false},
		{"bitmap:port range 0-1000", Set{Type: "bitmap:port"}, false},
		{"hash:net family inet", Set{Type: "hash:ip", Family: plan.IPv4}, true},
		{"hash:ip family inet", Set{Type: "hash:ip,port", Family: plan.IPv4}, true},
		{"list:set", Set{Type: "hash:ip", Family: plan.IPv4}, true},
	} {
		c.want.Name = fmt.Sprintf("SET-%d", i)
		nstest.Exec(t, "ipset", append([]string{"create", c.want.Name}, strings.Fields(c.args)...)...)
		rule := []string{"-m", "set", "--match-set", c.want.Name, "src", "-j", "ACCEPT"}
		nstest.Exec(t, "iptables-legacy", append([]string{"-A", "INPUT"}, rule...)...)
		created, err := s.Ensure(c.want)
		if c.refused {
			if created || err == nil || !strings.Contains(err.Error(), "remove the rules that use it") {
				t.Errorf("%s to %s, with a rule: %v, %v", c.args, c.want.Type, created, err)
			}
			if err := s.Destroy(c.want.Name); err == nil || !strings.Contains(err.Error(), "still use it") {
				t.Errorf("removing what a rule asks: %v", err)
			}
			nstest.Exec(t, "iptables-legacy", append([]string{"-D", "INPUT"}, rule...)...)
			created, err = s.Ensure(c.want)
		}
		if !created || err != nil {
			t.Errorf("%s to %s: %v, %v", c.args, c.want.Type, created, err)
		}
		if got, err := s.header(c.want.Name); err != nil || !got.is(c.want) {
			t.Errorf("%s became %+v, %v", c.args, got, err)
		}
	}
	if names, err := s.Names(); err != nil || len(names) != 8 {
		t.Errorf("names %v, %v: want no others", names, err)
	}
}

// TestFullSet fills a set while a rule asks it, and somebody reads it all the time.
func TestFullSet(t *testing.T) {
	s := openSets(t)
	nstest.Exec(t, "ipset", "create", "SMALL-new", "hash:ip") // left over from another time
	set := Set{Name: "SMALL", Type: "hash:ip", Family: plan.IPv4, Marks: true, MaxElem: 300}
	if _, err := s.Ensure(set); err != nil {
		t.Fatal(err)
	}
	nstest.Exec(t, "iptables-legacy", "-A", "INPUT", "-m", "set", "--match-set", "SMALL", "src", "-j", "ACCEPT")
	var entries []Entry
	for i := range 3000 {
		entries = append(entries, Entry{Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Mark: uint32(i), Mask: 0xffff})
	}
	reader, err := Present()
	require.NoError(t, err)
	defer reader.Close()
	stop, reads := make(chan struct{}), 0
	var reading sync.WaitGroup
	reading.Go(func() {
		for ; ; reads++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := entriesOf(reader, set); err != nil {
				t.Errorf("reading beside: %v", err)
				return
			}
		}
	})
	err = s.Add(set, entries)
	close(stop)
	reading.Wait()
	require.NoError(t, err, "beside %d reads", reads)
	if got, err := entriesOf(s, set); err != nil || !maps.Equal(got, setOf(entries...)) {
		t.Errorf("%d entries, %v; want %d", len(got), err, len(entries))
	}
	if h, err := s.header("SMALL"); err != nil || h.references != 1 || h.maxElem != 4800 {
		t.Errorf("the set is %+v, %v; want one reference, and 4800 entries at most", h, err)
	}
	if names, err := s.Names(); err != nil || !reflect.DeepEqual(names, []string{"SMALL"}) {
		t.Errorf("names %v, %v", names, err)
	}
	if created, err := s.Ensure(set); created || err != nil {
		t.Errorf("Ensure of a set that has grown: %v, %v", created, err)
	}
}

// TestBadEntries has entries that the kernel refuses among good ones.
func TestBadEntries(t *testing.T) {
	s := openSets(t)
	set := Set{Name: "NETS", Type: "hash:net", Family: plan.IPv4}
	if _, err := s.Ensure(set); err != nil {
		t.Fatal(err)
	}
	good := samples("hash:net", plan.IPv4)
	bad := []Entry{{Net: netip.MustParsePrefix("0.0.0.0/0")}, {Net: netip.MustParsePrefix("fd00::/64")}}
	err := s.Add(set, []Entry{good[0], bad[0], good[1], bad[1], good[2]})
	for _, part := range []string{
		"ipset NETS, entry 0.0.0.0/0: a range of this length", "entry fd00::/64: the kernel does not understand this; an address may",
	} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v, want %q in it", err, part)
		}
	}
	if got, err := entriesOf(s, set); err != nil || !maps.Equal(got, setOf(good...)) {
		t.Errorf("entries %v, %v; want %v", got, err, good)
	}
	set.Name = "NONE"
	if err := s.Add(set, good); err == nil || !strings.Contains(err.Error(), "NONE") {
		t.Errorf("adding to no set: %v", err)
	}
	if _, err := entriesOf(s, set); err == nil {
		t.Error("entries of no set")
	}
	if _, err := s.Ensure(Set{Name: "X", Type: "hash:mac"}); err == nil || !strings.Contains(err.Error(), "hash:mac") {
		t.Errorf("a type that is not known: %v", err)
	}
	if err := s.hasType("hash:none"); !isSetError(err, ipsetNoSuchType) || !strings.Contains(err.Error(), "modprobe ip_set_hash:none") {
		t.Errorf("a type that the kernel does not know: %v", err)
	}
}

func BenchmarkAddEntries(b *testing.B) {
	s := openSets(b)
	set := Set{Name: "MANY", Type: "hash:ip,port", Family: plan.IPv4}
	if _, err := s.Ensure(set); err != nil {
		b.Fatal(err)
	}
	var entries []Entry
	for i := range 10_000 {
		entries = append(entries, Entry{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Protocol: plan.TCP, Port: 80})
	}
	for b.Loop() {
		require.NoError(b, errors.Join(s.Add(set, entries), s.Remove(set, entries)))
	}
}

// TestSizesBesideOthers: sets of other programs are not counted, when they are there from the beginning, come and go.
func TestSizesBesideOthers(t *testing.T) {
	s := openSets(t)
	others := [2]string{"OTHER", "ANOTHER"}
	nstest.Exec(t, "ipset", "create", others[0], "hash:ip")
	sets := []Set{{Name: "SET-1", Type: "hash:ip,port", Family: plan.IPv4}, {Name: "SET-2", Type: "hash:ip,port", Family: plan.IPv6}}
	for _, set := range sets {
		_, err := s.Ensure(set)
		require.NoError(t, err)
		require.NoError(t, s.Add(set, samples(set.Type, set.Family)))
	}
	list := []string{sets[0].Name, sets[1].Name}
	for i := range FewSets { // So these are not asked for one after the other; most are not there.
		list = append(list, fmt.Sprint("ABSENT-", i))
	}
	looks := func(alone bool, want map[string]int) {
		t.Helper()
		got, err := s.Sizes(list)
		if err != nil || !maps.Equal(got, want) || s.alone != alone {
			t.Errorf("got %v, %v, alone: %t; want %v, %t", got, err, s.alone, want, alone)
		}
	}
	n := len(samples(sets[0].Type, plan.IPv4))
	few, err := s.Sizes(list[1:3])
	require.NoError(t, err)
	require.Equal(t, map[string]int{sets[1].Name: n}, few)
	both := map[string]int{sets[0].Name: n, sets[1].Name: n}
	looks(false, both)
	looks(false, both)
	nstest.Exec(t, "ipset", "destroy", others[0])
	looks(true, both)
	looks(true, both)
	nstest.Exec(t, "ipset", "create", others[1], "hash:ip")
	looks(false, both)
	looks(false, both)
	require.NoError(t, s.Destroy(sets[0].Name))
	looks(false, map[string]int{sets[1].Name: n})
}

// BenchmarkSizes is what it costs to ask for the sizes of 34 sets, one of which has many entries, at once and set by set.
func BenchmarkSizes(b *testing.B) {
	s := openSets(b)
	var sets []Set
	var names []string
	for i := range 34 {
		sets = append(sets, Set{Name: fmt.Sprintf("SET-%d", i), Type: "hash:ip,port", Family: plan.IPv4})
		names = append(names, sets[i].Name)
		_, err := s.Ensure(sets[i])
		require.NoError(b, err)
	}
	there := 0
	for _, n := range []int{10_000, 20_000} {
		var entries []Entry
		for i := there; i < n; i++ {
			addr := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
			entries = append(entries, Entry{Addr: addr, Protocol: plan.TCP, Port: 80})
		}
		there = n
		require.NoError(b, s.Add(sets[0], entries))
		b.Run(fmt.Sprint(n, " at once"), func(b *testing.B) {
			for b.Loop() {
				sizes, err := s.Sizes(names)
				require.NoError(b, err)
				require.Equal(b, n, sizes[sets[0].Name])
			}
		})
		b.Run(fmt.Sprint(n, " set by set"), func(b *testing.B) {
			for b.Loop() {
				for _, set := range sets {
					_, err := s.header(set.Name)
					require.NoError(b, err)
				}
			}
		})
	}
}
