// Package drifttest tests, on a real kernel with IPVS, that a Backend of package ipvs notices what others have changed.
package drifttest

import (
	"context"
	"flag"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/vishvananda/netns"

	"nodeproxy/e2e/kernel/inkernel"
	"nodeproxy/internal/nstest"
	"nodeproxy/ipvs"
	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/plantest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // They wait most of the time, also on one processor.
		panic(err)
	}
	os.Exit(inkernel.Main(m))
}

// lab is a Backend over a network namespace.
type lab struct {
	t       testing.TB
	variant xtables.Variant
	ns      netns.NsHandle
	backend *ipvs.Backend
	plan    *plan.Plan
	seen    chan string
	reports chan drift.Report
}

// inLab is unwatched with the backend's watch, which notices what others change, and repairs some of it.
func inLab(t testing.TB, v xtables.Variant, n int, o ipvs.Options, f func(l *lab)) {
	t.Helper()
	unwatched(t, v, n, o, func(l *lab) {
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		running.Go(func() {
			assert.NoError(t, l.watch(ctx))
		})
		<-l.seen // It begins with a suspicion.
		f(l)
	})
}

// unwatched runs f on a thread in a namespace of its own, in which n Services with two endpoints each are programmed. Programs
// that f starts inherit it; goroutines do not.
func unwatched(t testing.TB, v xtables.Variant, n int, o ipvs.Options, f func(l *lab)) {
	t.Helper()
	nstest.Run(t, func() {
		ns, err := netns.Get()
		if err != nil {
			t.Error(err)
			return
		}
		defer ns.Close()
		l := &lab{t: t, variant: v, ns: ns, plan: plantest.Large(n, 2), seen: make(chan string, 1000), reports: make(chan drift.Report, 1000)}
		l.plan.Settings.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}
		if err := l.start(o); err != nil {
			t.Error(err)
			return
		}
		f(l)
	})
}

func (l *lab) start(o ipvs.Options) (err error) {
	o.MasqueradeBit = 14
	l.backend, err = ipvs.New(ipvs.Config{
		Options: o, Variant: l.variant, Families: []plan.Family{plan.IPv4, plan.IPv6}, Log: slog.New(slog.DiscardHandler),
		Compared: func(r drift.Report) { l.reports <- r },
	})
	if err != nil {
		return err
	}
	return l.backend.Sync(context.Background(), l.plan, plan.Everything())
}

// watch runs the backend's watch in the namespace, on a thread that goes with it.
func (l *lab) watch(ctx context.Context) error {
	runtime.LockOSThread()
	if err := netns.Set(l.ns); err != nil {
		return err
	}
	return l.backend.Watch(ctx, func(why string) { l.seen <- why })
}

// compare compares everything with the kernel as the program does: with a sync of everything where that is needed to repair what differs.
func (l *lab) compare() {
	l.t.Helper()
	if l.backend.Compare(context.Background()) {
		l.sync()
	}
}

// reported returns what has been reported.
func (l *lab) reported() drift.Report {
	var all drift.Report
	for {
		select {
		case r := <-l.reports:
			all.Found, all.Took = append(all.Found, r.Found...), all.Took+r.Took
		default:
			return all
		}
	}
}

func (l *lab) sync() {
	l.t.Helper()
	if err := l.backend.Sync(context.Background(), l.plan, plan.Everything()); err != nil {
		l.t.Error(err)
	}
}

// do runs a command, {} in which stands for the variant.
func (l *lab) do(command string) {
	l.t.Helper()
	command = strings.ReplaceAll(command, "{}", string(l.variant))
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		l.t.Errorf("%s: %v: %s", command, err, out)
	}
}

// fault is something that another program does.
type fault struct {
	name string
	do   string
	want string             // in the words of what is found; empty if nothing is to be
	n    map[drift.Kind]int // how much is found, where that is known
}

func one(k drift.Kind) map[drift.Kind]int { return map[drift.Kind]int{k: 1} }

// services are so few that other namespaces do not matter, see prober of package ipvs.
const services = 10

// faults are in groups, each of which is tried in a namespace of its own.
var faults = [][]fault{
	{
		{"nothing", "true", "", nil},
		{"a virtual server removed", "ipvsadm -D -t 10.96.0.10:80", "virtual server TCP 10.96.0.10:80: missing", one(drift.VirtualServer)},
		{"a virtual server's scheduler", "ipvsadm -E -t 10.96.0.10:80 -s sh", "virtual server TCP 10.96.0.10:80: changed",
			one(drift.VirtualServer)},
		{"a virtual server added", "ipvsadm -A -t 10.97.0.1:80 -s rr", "virtual server TCP 10.97.0.1:80: unexpected",
			one(drift.VirtualServer)},
	}, {
		{"a real server removed", "ipvsadm -d -t 10.96.0.11:80 -r 10.244.0.2:8080",
			"real server 10.244.0.2:8080 of virtual server TCP 10.96.0.11:80: missing", one(drift.RealServer)},
		{"a real server's weight", "ipvsadm -e -t 10.96.0.11:80 -r 10.244.0.2:8080 -m -w 7", "weight 7 in place of 1: changed",
			one(drift.RealServer)},
		{"all virtual servers removed", "ipvsadm -C", "virtual server TCP 10.96.0.10:80: missing",
			map[drift.Kind]int{drift.VirtualServer: services}},
	}, {
		{"a set's entry removed", "ipset del KUBE-CLUSTER-IP 10.96.0.12,tcp:80",
			"set element 10.96.0.12,tcp:80 of set KUBE-CLUSTER-IP: missing", one(drift.SetElement)},
		{"a set's entry added", "ipset add KUBE-NO-ENDPOINTS 10.96.0.12,udp:80",
			"set element 10.96.0.12,udp:80 of set KUBE-NO-ENDPOINTS: unexpected", one(drift.SetElement)},
		{"a set emptied", "ipset flush KUBE-CLUSTER-IP", "of set KUBE-CLUSTER-IP: missing",
			map[drift.Kind]int{drift.SetElement: services}},
		{"connection tracking turned off", "echo 0 >/proc/sys/net/ipv4/vs/conntrack",
			`sysctl net.ipv4.vs.conntrack is "0" in place of 1: changed`, one(drift.Sysctl)},
		{"forwarding turned off", "echo 0 >/proc/sys/net/ipv4/ip_forward",
			`sysctl net.ipv4.ip_forward is "0" in place of 1: changed`, one(drift.Sysctl)},
	}, {
		{"an address removed", "ip addr del 10.96.0.13/32 dev kube-ipvs0", "address 10.96.0.13 of interface kube-ipvs0: missing",
			one(drift.Address)},
		{"an address added", "ip addr add 10.11.12.13/32 dev kube-ipvs0", "address 10.11.12.13 of interface kube-ipvs0: unexpected",
			one(drift.Address)},
		{"the device turned off", "ip link set kube-ipvs0 down", "it was turned off", one(drift.Address)},
		{"the device removed", "ip link del kube-ipvs0", "it was removed",
			map[drift.Kind]int{drift.Address: 1 + services}},
		{"a chain emptied", "iptables-{} -w -t nat -F KUBE-POSTROUTING", "in KUBE-POSTROUTING of table nat (IPv4): missing", nil},
		{"a table emptied", "iptables-{} -w -t mangle -F", "of table mangle (IPv4): missing", nil},
		{"IPv6 jumps removed", "ip6tables-{} -w -t filter -F INPUT", "in INPUT of table filter (IPv6): missing", nil},
	},
}

// routeFaults are for --ipvs-vips=routes.
var routeFaults = []fault{
	{"nothing", "true", "", nil},
	{"a route removed", "ip route del local 10.96.0.0/12 dev kube-ipvs0 table local",
		"route 10.96.0.0/12 of interface kube-ipvs0: missing", one(drift.Route)},
	{"a rule inserted", "iptables-{} -w -t nat -I KUBE-SERVICES -j RETURN", "\"-j RETURN\" in KUBE-SERVICES of table nat (IPv4): unexpected",
		one(drift.Rule)},
}

// guardFaults are in the nftables tables that keep marks apart, whichever variant of iptables there is.
var guardFaults = []fault{
	{"nothing", "true", "", nil},
	{"a rule of the guard removed", "nft flush chain ip6 nodeproxy-ipvs-marks input-show",
		"chain in nftables table nodeproxy-ipvs-marks (IPv6): changed", one(drift.Chain)},
	{"the guard of marks removed", "nft delete table ip nodeproxy-ipvs-marks",
		"chain in nftables table nodeproxy-ipvs-marks (IPv4): missing", one(drift.Chain)},
}

// TestDrift: what others change is noticed within seconds, named, counted once, and put right.
func TestDrift(t *testing.T) {
	t.Parallel()
	try := func(v xtables.Variant, vips ipvs.VIPs, group []fault) {
		t.Run(string(v)+"/"+group[len(group)-1].name, func(t *testing.T) {
			t.Parallel()
			inLab(t, v, services, ipvs.Options{VIPs: vips}, func(l *lab) {
				before := l.held()
				for _, f := range group {
					l.check(f, before)
				}
			})
		})
	}
	for _, group := range faults {
		try(xtables.NFT, ipvs.Addresses, group)
	}
	try(xtables.Legacy, ipvs.Addresses, faults[len(faults)-1])
	try(xtables.Legacy, ipvs.Routes, routeFaults)
	try(xtables.NFT, ipvs.Addresses, guardFaults)
	try(xtables.Legacy, ipvs.Addresses, guardFaults)
}

func (l *lab) check(f fault, before string) {
	drain(l.seen)
	drain(l.reports)
	l.do(f.do)
	begin, why, limit := time.Now(), "", 3*time.Minute // which only a hang reaches
	if f.want == "" {
		limit = 4 * time.Second
	}
	var r drift.Report
	select {
	case why = <-l.seen:
		l.compare()
		r = l.reported()
	case r = <-l.reports:
		why = "a request of another program"
	case <-time.After(limit):
	}
	took := time.Since(begin)
	if (why != "") != (f.want != "") {
		l.t.Errorf("%s: suspected %q", f.name, why)
	}
	if all := r.Found.Words(len(r.Found)); !strings.Contains(all, f.want) || f.want == "" && all != "" {
		l.t.Errorf("%s: found %s, want %s", f.name, all, f.want)
	}
	for kind, n := range f.n {
		if counts := r.Found.Counts(); counts[kind] != n || len(r.Found) != n {
			l.t.Errorf("%s: found %v, want %d of %s", f.name, counts, n, kind)
		}
	}
	if now := l.held(); now != before {
		l.t.Errorf("%s: it is not as before:\n%s\nwant\n%s", f.name, now, before)
	}
	drain(l.reports)
	again := false
	for _, compare := range []func(){func() { again = l.backend.Compare(context.Background()) }, l.sync} {
		compare()
		if again {
			l.t.Errorf("%s: after the repair, a comparison asks for a sync of everything", f.name)
		}
		if n := len(l.reported().Found); n > 0 {
			l.t.Errorf("%s: after the repair there are %d differences", f.name, n)
		}
	}
	l.t.Logf("%-28s noticed after %4v, repaired in %v: %s (%s)", f.name, took.Round(time.Millisecond), r.Took.Round(time.Millisecond),
		r.Found.Words(1), why)
}

// held is what there is but for rules, which the last step of check compares.
func (l *lab) held() string {
	var out strings.Builder
	for _, command := range []string{"ipvsadm --save --numeric", "ipset save", "ip -o addr show dev kube-ipvs0"} {
		words := strings.Fields(command)
		text, err := exec.Command(words[0], words[1:]...).Output()
		if err != nil {
			l.t.Errorf("%s: %v", command, err)
		}
		lines := strings.Split(changing.ReplaceAllString(string(text), ""), "\n")
		slices.Sort(lines)
		out.WriteString(strings.Join(lines, "\n"))
	}
	return out.String()
}

// changing is what may differ without meaning anything.
var changing = regexp.MustCompile(`(?m)^\d+: | (hashsize|bucketsize|initval) \S+`)

func drain[T any](c chan T) {
	for {
		select {
		case <-c:
		case <-time.After(300 * time.Millisecond):
			return
		}
	}
}
