package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

// mends are the ways in which what other programs have done is found and mended. Each reports what it has found; a start does not, as it
// has nothing to compare with.
var mends = map[string]func(*testing.T, *engine, *plan.Plan) drift.Found{
	"beside syncs": func(t *testing.T, e *engine, p *plan.Plan) drift.Found {
		found, again, err := e.CompareBeside(context.Background())
		if err != nil && !again {
			t.Error(err)
		}
		if again {
			synced(t, e, p, plan.Everything())
			found = append(found, e.Found...)
		}
		return found
	},
	"by a sync": func(t *testing.T, e *engine, p *plan.Plan) drift.Found {
		synced(t, e, p, plan.Everything())
		return e.Found
	},
	"by a start": func(t *testing.T, e *engine, p *plan.Plan) drift.Found {
		e.forget()
		synced(t, e, p, plan.Everything())
		return nil
	},
}

// foreignElement puts an element into a set as another program may. content appends its attributes.
func foreignElement(t *testing.T, f plan.Family, set string, content func(netlink.Buffer) netlink.Buffer) {
	t.Helper()
	s, err := netlink.OpenLarge(unix.NETLINK_NETFILTER, 1<<20)
	require.NoError(t, err)
	c := netlink.NewConn(s)
	defer c.Close()
	body := netlink.Buffer{nft.Protocol(f), 0, 0, 0}.Text(unix.NFTA_SET_ELEM_LIST_TABLE, names.NFTables).Text(unix.NFTA_SET_ELEM_LIST_SET, set).
		Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b netlink.Buffer) netlink.Buffer { return b.Nest(1, content) })
	ends := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	errs, err := c.Transact([]netlink.Message{{Type: unix.NFNL_MSG_BATCH_BEGIN, Body: ends},
		{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWSETELEM, Flags: unix.NLM_F_CREATE, Body: body},
		{Type: unix.NFNL_MSG_BATCH_END, Body: ends}})
	if err != nil || len(errs) > 0 {
		t.Fatalf("adding to set %s: %v, %v", set, errs, err)
	}
}

func bytesOf(kind uint16, v string) func(netlink.Buffer) netlink.Buffer {
	return func(b netlink.Buffer) netlink.Buffer {
		return b.Nest(kind, func(b netlink.Buffer) netlink.Buffer { return b.Bytes(unix.NFTA_DATA_VALUE, []byte(v)...) })
	}
}

// TestCatchAll: an element for all keys that no other has is found in every set and map, named and removed.
func TestCatchAll(t *testing.T) {
	nstest.Enter(t)
	for _, f := range plan.Families {
		_ = Cleanup()
		e, k := testEngine(t, f)
		p := plantest.Clusters().Example(1).Plan
		synced(t, e, p, plan.Everything())
		for i, set := range e.sets {
			for how, mend := range mends {
				if f == plan.IPv6 && how != "beside syncs" {
					continue // It is the same in both families.
				}
				el := nft.Element{Data: strings.Repeat("\x00", set.Data.Length())}
				if set.Data != nil && set.Data.Length() == 0 {
					el.Chain = names.NFTDrop
				}
				b := nft.NewBatch(f, names.NFTables)
				b.AddElements(set, []nft.Element{el})
				require.NoError(t, k.kernel.Commit(b), "%s", set.Name)
				found := mend(t, e, p)
				if want := "* of set " + set.Name + ofTable(f); how != "by a start" && (len(found) != 1 || found[0].Object != want || found[0].State != drift.Unexpected) {
					t.Errorf("%s of %s, %s: found %v", set.Name, f, how, found)
				}
				if _, is, err := k.kernel.Element(f, names.NFTables, e.sets[i], nft.Element{}); is || err != nil {
					t.Errorf("%s of %s, %s: it is there: %t, %v", set.Name, f, how, is, err)
				}
				holds(t, e, p)
			}
		}
	}
}

// TestForeignElements: whatever the kernel lets other programs put into sets is found, named and mended.
func TestForeignElements(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	p := plantest.Large(20, 3)
	synced(t, e, p, plan.Everything())
	sp := p.Services[plantest.LargeService(2, 0, 3).Key]
	name := nameOf(plan.IPv4, sp.Frontends[0])
	endpoint := id{set: endpoints, key: indexed(name, 1)}
	of, _ := e.current.of(sp.Key).kindsOf(sp.Frontends[0])
	lead := id{set: kinds, key: string(native(of.number()))}
	remove := func(i id) {
		t.Helper()
		b := nft.NewBatch(plan.IPv4, names.NFTables)
		b.DeleteElements(e.sets[i.set], []nft.Element{i.element(value{})})
		require.NoError(t, k.kernel.Commit(b))
	}
	data := func() string {
		el, is, err := k.kernel.Element(plan.IPv4, names.NFTables, e.sets[endpoints], endpoint.element(value{}))
		if err != nil || !is {
			t.Fatalf("there is an endpoint: %t, %v", is, err)
		}
		return el.Data
	}
	for what, c := range map[string]struct {
		put  func()
		want string
	}{
		"an endpoint with a limit": {func() {
			value := data()
			remove(endpoint)
			foreignElement(t, plan.IPv4, names.NFTEndpoints, func(b netlink.Buffer) netlink.Buffer {
				b = bytesOf(unix.NFTA_SET_ELEM_DATA, value)(bytesOf(unix.NFTA_SET_ELEM_KEY, endpoint.key)(b))
				return b.Nest(unix.NFTA_SET_ELEM_EXPR, func(b netlink.Buffer) netlink.Buffer {
					return b.Text(unix.NFTA_EXPR_NAME, "limit").Nest(unix.NFTA_EXPR_DATA, func(b netlink.Buffer) netlink.Buffer {
						return b.Bytes(unix.NFTA_LIMIT_RATE, binary.BigEndian.AppendUint64(nil, 1)...).
							Bytes(unix.NFTA_LIMIT_UNIT, binary.BigEndian.AppendUint64(nil, 60)...)
					})
				})
			})
		}, "10.96.0.12 . tcp . 80 . 0:1 of set endpoints"},
		"a kind that jumps": {func() {
			remove(lead)
			foreignElement(t, plan.IPv4, names.NFTKinds, func(b netlink.Buffer) netlink.Buffer {
				return bytesOf(unix.NFTA_SET_ELEM_KEY, lead.key)(b).Nest(unix.NFTA_SET_ELEM_DATA, func(b netlink.Buffer) netlink.Buffer {
					return b.Nest(unix.NFTA_DATA_VERDICT, func(b netlink.Buffer) netlink.Buffer {
						return b.BigEndian32(unix.NFTA_VERDICT_CODE, 0xfffffffd).Text(unix.NFTA_VERDICT_CHAIN, of.chain())
					})
				})
			})
		}, "of set kinds"},
		"userdata of the greatest length": {func() {
			foreignElement(t, plan.IPv4, names.NFTClusterIPs, func(b netlink.Buffer) netlink.Buffer {
				return bytesOf(unix.NFTA_SET_ELEM_KEY, "\xc0\x00\x02\x01")(b).Bytes(unix.NFTA_SET_ELEM_USERDATA, append([]byte{5, 254}, make([]byte, 254)...)...)
			})
		}, "192.0.2.1 of set cluster-ips"},
		"a comment of the greatest length": {func() {
			foreignElement(t, plan.IPv4, names.NFTClusterIPs, func(b netlink.Buffer) netlink.Buffer {
				return bytesOf(unix.NFTA_SET_ELEM_KEY, "\xc0\x00\x02\x01")(b).Bytes(unix.NFTA_SET_ELEM_USERDATA, append([]byte{0, 254}, make([]byte, 254)...)...)
			})
		}, "192.0.2.1 of set cluster-ips"},
	} {
		for how, mend := range mends {
			c.put()
			found := mend(t, e, p)
			if how != "by a start" && (len(found) != 1 || !strings.Contains(found[0].Object, c.want)) {
				t.Errorf("%s, %s: found %v", what, how, found)
			}
			holds(t, e, p)
			if again := mends["beside syncs"](t, e, p); len(again) > 0 {
				t.Errorf("%s, %s: after the repair, found %v", what, how, again)
			}
		}
	}
}

// rememberClient puts a client into a map of affinity, and remembers reports whether it is still there. It is not where the table was created anew.
func rememberClient(t *testing.T) {
	t.Helper()
	nstest.Exec(t, "nft", "add element ip nodeproxy affinity-3 { 10.96.0.12 . tcp . 80 . 203.0.113.77 timeout 1h : 0:1 }")
}

func remembers(t *testing.T) bool {
	t.Helper()
	return strings.Contains(nstest.Exec(t, "nft", "list map ip nodeproxy affinity-3"), "203.0.113.77")
}

// TestIntruders: chains, sets and objects of other programs in the table are found, named and removed, and clients stay remembered.
func TestIntruders(t *testing.T) {
	nstest.Enter(t)
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(20, 3)
	synced(t, e, p, plan.Everything())
	rememberClient(t)
	for _, c := range []struct {
		nft  string
		want []string
	}{
		{"add chain ip nodeproxy evil { type filter hook forward priority 0; policy drop; }", []string{"chain evil"}},
		{"add chain ip nodeproxy evil { type filter hook forward priority 0; }; add chain ip nodeproxy loose; add rule ip nodeproxy loose drop; " +
			"add rule ip nodeproxy evil jump loose", []string{"chain evil", "chain loose"}},
		{"add chain ip nodeproxy loose; add element ip nodeproxy kinds { 7777:1 : goto loose }", []string{"chain loose", "7777:1 of set kinds"}},
		{"add set ip nodeproxy theirs { type ipv4_addr; elements = { 192.0.2.1 }; }", []string{"all of set theirs"}},
		{"add set ip nodeproxy theirs { type ipv4_addr; }; add chain ip nodeproxy loose; add rule ip nodeproxy loose ip daddr @theirs drop; " +
			"add map ip nodeproxy led { type ipv4_addr : verdict; elements = { 192.0.2.1 : jump loose }; }",
			[]string{"all of set theirs", "all of set led", "chain loose"}},
		{"add counter ip nodeproxy mine", []string{"object counter mine"}},
		{"add quota ip nodeproxy few { 10 mbytes; }; add chain ip nodeproxy loose; add rule ip nodeproxy loose quota name few drop",
			[]string{"object quota few", "chain loose"}},
		{"add chain ip nodeproxy loose; add rule ip nodeproxy to-services jump loose", []string{"chain to-services", "chain loose"}},
		{"add chain ip nodeproxy loose; add rule ip nodeproxy loose ip daddr { 192.0.2.1, 192.0.2.2 } drop", []string{"chain loose"}},
		{"add chain ip nodeproxy loose; add rule ip nodeproxy loose tcp dport 99 jump { drop; }", []string{"chain loose"}},
		{"add chain ip nodeproxy evil { type filter hook forward priority 0; }; add rule ip nodeproxy evil tcp dport 99 jump { drop; }",
			[]string{"chain evil"}},
		{"insert rule ip nodeproxy to-services tcp dport 99 goto { accept; }", []string{"chain to-services"}},
	} {
		for how, mend := range mends {
			if out, err := exec.Command("nft", c.nft).CombinedOutput(); err != nil {
				t.Fatalf("nft %s: %v: %s", c.nft, err, out)
			}
			found := mend(t, e, p)
			for _, want := range c.want {
				if how != "by a start" && !slices.ContainsFunc(found, func(d drift.Difference) bool { return strings.Contains(d.String(), want) }) {
					t.Errorf("%q, %s: found %v, want %s too", c.nft, how, found, want)
				}
			}
			holds(t, e, p)
			if again := mends["by a sync"](t, e, p); len(again) > 0 {
				t.Errorf("%q, %s: after the repair, found %v", c.nft, how, again)
			}
			content, err := e.kernel.Read(plan.IPv4, names.NFTables, e.sets, nil)
			require.NoError(t, err)
			known := namesOf(append(e.layout.chains(), e.layout.kindChains(e.kinds)...), nil)
			if in := intrudersIn(content, e.sets, known); !in.empty() {
				t.Errorf("%q, %s: %v is left", c.nft, how, in)
			}
			if !remembers(t) {
				t.Errorf("%q, %s: a client is forgotten", c.nft, how)
				rememberClient(t)
			}
		}
	}
}

// TestIntruderAtUnknown: while not all Services are known, a chain that the kernel calls goes, and what may be of Services not known yet stays.
func TestIntruderAtUnknown(t *testing.T) {
	nstest.Enter(t)
	ctx := context.Background()
	e, _ := testEngine(t, plan.IPv4)
	p := plantest.Large(20, 3)
	synced(t, e, p, plan.Everything())
	nstest.Exec(t, "nft", "add chain ip nodeproxy evil { type filter hook forward priority 0; policy drop; }; add element ip nodeproxy services { * : 1:1 }")
	again, _ := testEngine(t, plan.IPv4)
	some := plantest.Large(3, 1)
	some.Settings, some.Partial = p.Settings, true
	for range 2 {
		if err := again.Sync(ctx, some, plan.Everything()); err != nil || len(again.Found) > 0 {
			t.Fatalf("%v, %v", again.Found, err)
		}
		content, err := again.kernel.Read(plan.IPv4, names.NFTables, again.sets, nil)
		require.NoError(t, err)
		if _, is := content.Chains["evil"]; is {
			t.Error("the chain is left")
		}
		for k := range e.kinds {
			if _, is := content.Chains[k.chain()]; !is {
				t.Errorf("the chain %s of Services that are not known yet is gone", k.chain())
			}
		}
		if _, is, err := again.kernel.Element(plan.IPv4, names.NFTables, again.sets[services], nft.Element{}); is || err != nil {
			t.Errorf("the catch-all element is left: %t, %v", is, err)
		}
	}
	if found, more, err := again.CompareBeside(ctx); len(found) > 0 || more || err != nil {
		t.Errorf("a comparison found %v, %t, %v", found, more, err)
	}
	synced(t, again, p, plan.Everything())
	holds(t, again, p)
}

// TestIntruderAtStart: what another program has put there before a start goes without the table being created anew, once all Services are
// known and none is refused any more. Until then, a refused Service keeps what it has.
func TestIntruderAtStart(t *testing.T) {
	nstest.Enter(t)
	for _, partial := range []bool{false, true} {
		_ = Cleanup()
		e, s, _ := faultyEngine(t, plan.IPv4)
		p := plantest.Large(3, 1)
		before, bad := plantest.LargeService(7, 100, 2), plantest.LargeService(7, 200, 3)
		p.Set(before)
		sync := func() {
			t.Helper()
			synced(t, e, p, plan.Everything())
		}
		sync()
		rememberClient(t)
		nstest.Exec(t, "nft", "add set ip nodeproxy theirs { type ipv4_addr; }; add chain ip nodeproxy loose; add rule ip nodeproxy loose ip daddr @theirs drop")
		e.forget()
		if p.Partial = partial; !partial {
			p.Set(bad)
			s.refuse(unix.EINVAL, func(_, key string) bool { return strings.HasPrefix(key, nameOf(plan.IPv4, bad.Frontends[0])) })
		}
		for range 2 {
			sync()
			if _, is := elementsOf(t, e)[id{set: services, key: nameOf(plan.IPv4, before.Frontends[0])}]; !is {
				t.Errorf("partial %t: a Service has lost what it had", partial)
			}
		}
		s.refuses, p.Partial = nil, false
		again(e)
		sync()
		sync() // Only now it is known that nothing needs the chains.
		holds(t, e, p)
		if left := nstest.Exec(t, "nft", "list table ip nodeproxy"); strings.Contains(left, "loose") || strings.Contains(left, "theirs") {
			t.Errorf("partial %t: left in the table: %s", partial, left)
		}
		if !remembers(t) {
			t.Errorf("partial %t: a client is forgotten", partial)
		}
	}
}

// TestFlowtable: the messages about a flowtable are those of the kernel's, which may not have any.
func TestFlowtable(t *testing.T) {
	nstest.Enter(t)
	e, k := testEngine(t, plan.IPv4)
	synced(t, e, plantest.Large(3, 1), plan.Everything())
	b := nft.NewBatch(plan.IPv4, names.NFTables)
	intruders{objects: []nft.Object{{Name: "fast"}}}.disarm(b)
	if err := k.kernel.Commit(b); !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "removing flowtable fast") {
		t.Errorf("removing a flowtable that does not exist: %v", err)
	}
}

// TestNotRemovable: a table from which something can't be removed is created anew, in one transaction.
func TestNotRemovable(t *testing.T) {
	nstest.Enter(t)
	for how, mend := range mends {
		_ = Cleanup()
		e, k := testEngine(t, plan.IPv4)
		p := plantest.Large(20, 3)
		synced(t, e, p, plan.Everything())
		nstest.Exec(t, "nft", "add element ip nodeproxy services { * : 1:1 }")
		k.commits = 0
		fails := 1
		if how == "beside syncs" {
			fails = 2 // the repair beside syncs, and that of the sync
		}
		k.fail = func(commit int) error {
			if commit > fails {
				return nil
			}
			return &nft.RefusedError{What: "removing from set services 1 elements", Removes: true, Err: unix.EINVAL}
		}
		found := mend(t, e, p)
		if how != "by a start" && (len(found) == 0 || !strings.HasPrefix(found[0].Object, "* of set services")) {
			t.Errorf("%s: found %v", how, found)
		}
		if k.commits != fails+1 {
			t.Errorf("%s: %d transactions, want %d", how, k.commits, fails+1)
		}
		holds(t, e, p)
	}
}

// panicking is a kernel with something in it that a comparison does not survive.
type panicking struct{ kernel }

func (panicking) Sample(plan.Family, string, nft.Set, func(nft.Element) error) error {
	panic("not foreseen")
}

// TestComparisonPanics: a comparison that panics is reported and logged, and the table is created anew.
func TestComparisonPanics(t *testing.T) {
	nstest.Enter(t)
	var log strings.Builder
	e, k := testEngine(t, plan.IPv4)
	e.log = slog.New(slog.NewTextHandler(&log, nil))
	failed := 0
	e.failed = func(plan.Family, bool) { failed++ }
	p := plantest.Large(20, 3)
	ctx := context.Background()
	synced(t, e, p, plan.Everything())
	nstest.Exec(t, "nft", "flush map ip nodeproxy services")
	e.reader = func() (kernel, error) {
		r, err := read()
		return panicking{r}, err
	}
	if _, again, err := e.CompareBeside(ctx); !again || !errors.Is(err, errPanic) {
		t.Errorf("beside syncs: %t, %v", again, err)
	}
	k.kernel = panicking{k.kernel}
	synced(t, e, p, plan.Everything())
	if len(e.Found) != 1 || e.Found[0].Kind != drift.Table || failed != 2 {
		t.Errorf("found %v, and %d failures", e.Found, failed)
	}
	if got := log.String(); strings.Count(got, "not foreseen") < 2 || !strings.Contains(got, "stack") {
		t.Errorf("the log says %s", got)
	}
	holds(t, e, p)
}

// panickingAnswers is a kernel of which the answer to a question does.
type panickingAnswers struct{ kernel }

func (panickingAnswers) Find(plan.Family, string, []nft.ElementKey, func(int, nft.Element, bool) error) error {
	panic("not foreseen")
}

// TestAnswersPanic: so is one that panics where many elements are asked for side by side, and the log says where it did.
func TestAnswersPanic(t *testing.T) {
	nstest.Enter(t)
	var log strings.Builder
	e, k := testEngine(t, plan.IPv4)
	e.log = slog.New(slog.NewTextHandler(&log, nil))
	e.mostListed = 2
	p := plantest.Large(1000, 4)
	ctx := context.Background()
	synced(t, e, p, plan.Everything())
	e.reader = func() (kernel, error) {
		r, err := read()
		return panickingAnswers{r}, err
	}
	if _, again, err := e.CompareBeside(ctx); !again || !errors.Is(err, errPanic) {
		t.Errorf("beside syncs: %t, %v", again, err)
	}
	k.kernel = panickingAnswers{k.kernel}
	if err := e.Sync(ctx, p, plan.Everything()); err != nil || len(e.Found) != 1 || e.Found[0].Kind != drift.Table {
		t.Errorf("found %v: %v", e.Found, err)
	}
	if got := log.String(); strings.Count(got, "panickingAnswers.Find") < 2 {
		t.Errorf("the log says %s", got)
	}
	holds(t, e, p)
}

// FuzzElement: an element of whatever keys and data has a text, and what has the form of this program's elements can be taken apart.
func FuzzElement(f *testing.F) {
	f.Add(uint8(endpoints), "", "\x0a\x00\x00\x01\x00\x50\x00\x00", "", "", "")
	f.Add(uint8(kinds), "\x01\x02\x03\x04", "", "drop", "", "jump x")
	f.Add(uint8(sourceRanges), ranged(registers([]byte{10, 96, 0, 1}, []byte{6}, []byte{0, 80}), netip.MustParsePrefix("10.0.0.0/24")), "", "", "a/b", "")
	f.Add(uint8(stickyEndpoints), "1", "333", "", "\"", "limit")
	f.Fuzz(func(t *testing.T, set uint8, key, data, chain, comment, other string) {
		for _, family := range plan.Families {
			all := sets(family)
			i := id{setID(int(set) % len(all)), key}
			v := valueOf(nft.Element{Key: key, Data: data, Chain: chain, Comment: comment, Other: other})
			if text := i.text(family) + v.text(all[i.set]); text == "" {
				t.Error("it has no text")
			}
			if !formOf(all[i.set]).has(i, v) {
				continue
			}
			_ = i.frontendOf(family)
			e := &engine{family: family, sets: all}
			s := e.fullSync(plan.New(plan.Node{}, plan.Settings{}))
			s.have[i] = v
			_ = s.placesFound(&plan.ServicePort{})
			_ = rangesByFrontend(family, s.have)
			_ = e.keptFor([]*plan.ServicePort{{}}, s.have)
			_ = fmt.Sprint(e.differences([]write{{id: i, had: &v}}))
		}
	})
}
