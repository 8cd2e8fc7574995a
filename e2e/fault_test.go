package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// faultRow is a line of the table of faults.
type faultRow struct {
	Fault, Injected  string
	Mode             harness.Mode
	Variant          harness.Variant
	OK               bool
	Requests, Failed int
	// Repair is how long after the end of the fault all was as it should be, or what is to be said in place of that.
	Repair string
}

// faultTable has the rows of all tests of faults.
var faultTable struct {
	sync.Mutex
	rows []faultRow
}

func addFault(r faultRow) {
	faultTable.Lock()
	defer faultTable.Unlock()
	faultTable.rows = append(faultTable.rows, r)
}

// rowsVariable is set for a process that prints rows for another one, each as JSON after rowPrefix, in place of the table.
const rowsVariable, rowPrefix = "NODEPROXY_FAULT_ROWS", "fault row: "

// printFaults prints the table, if there is any row.
func printFaults() {
	faultTable.Lock()
	defer faultTable.Unlock()
	rows := faultTable.rows
	if len(rows) == 0 {
		return
	}
	if os.Getenv(rowsVariable) != "" {
		for _, r := range rows {
			text, err := json.Marshal(r)
			if err != nil {
				panic(err)
			}
			fmt.Printf("%s%s\n", rowPrefix, text)
		}
		return
	}
	slices.SortStableFunc(rows, func(a, b faultRow) int {
		return strings.Compare(a.Fault+a.Injected+string(a.Variant), b.Fault+b.Injected+string(b.Variant))
	})
	const layout = "%-27s  %-85s  %-15s %8s %6s  %s\n"
	fmt.Printf("\n"+layout, "fault", "injected", "mode", "requests", "failed", "time to repair")
	for _, r := range rows {
		if !r.OK {
			r.Repair += "  TEST FAILED"
		}
		fmt.Printf(layout, r.Fault, r.Injected, fmt.Sprintf("%s %s", r.Mode, r.Variant), fmt.Sprint(r.Requests), fmt.Sprint(r.Failed), r.Repair)
	}
}

// faultScene is a World in which something goes wrong under load. The load is on Services that stay as they are; another one
// is changed meanwhile. At the end, the kernel has to hold what a daemon that starts anew on another node writes.
type faultScene struct {
	*testing.T
	*harness.World
	variant harness.Variant
	flags   []string // of the daemon
	daemon  *harness.Daemon
	loads   []*harness.Load
	row     faultRow
	repairs []time.Duration
}

// onEachFaultVariant is onEachVariant, but in mode ipvs on one variant alone: by what rules are written is not what matters
// there, and the kernel with IPVS is slow.
func onEachFaultVariant(t *testing.T, test func(t *testing.T, variant harness.Variant)) {
	t.Helper()
	if mode == harness.IPTables {
		onEachVariant(t, test)
		return
	}
	t.Parallel()
	t.Run(string(harness.NFT), func(t *testing.T) {
		t.Parallel()
		test(t, harness.NFT)
	})
}

// rarely are flags by which the comparison of everything comes later than any test waits: what is repaired before that was noticed.
var rarely = []string{"--iptables-sync-period=1h", "--ipvs-sync-period=1h", "--nftables-sync-period=1h"}

// changing is the number of the Service that changes; see manyServices for the others.
const changing = 7

// newFaultScene makes the World and its manifests. The row of the table is added when the test ends.
func newFaultScene(t *testing.T, variant harness.Variant, fault, injected string) *faultScene {
	t.Helper()
	f := &faultScene{T: t, World: harness.New(t, harness.Options{}), variant: variant}
	// What drains has gone by the time of the comparison.
	f.flags = append([]string{clusterCIDR, "--ipvs-graceful-period=5s"}, rarely...)
	f.row = faultRow{Fault: fault, Injected: injected, Mode: mode, Variant: variant}
	f.Write(t, "nodes.yaml", f.NodeObjects()...)
	manyServices(t, f.World)
	f.change("n1a")
	t.Cleanup(f.tell)
	return f
}

// tell adds the row.
func (f *faultScene) tell() {
	r := f.row
	r.OK = !f.Failed()
	for _, l := range f.loads {
		r.Requests += l.Requests()
		r.Failed += len(l.Failures())
	}
	if len(f.repairs) > 0 {
		r.Repair = slices.Max(f.repairs).Round(10 * time.Millisecond).String()
	}
	f.Logf("%s, %s: %d requests, %d failed, time to repair %s", r.Fault, r.Injected, r.Requests, r.Failed, r.Repair)
	addFault(r)
}

// change gives the Service that changes these endpoints.
func (f *faultScene) change(pods ...string) {
	f.Helper()
	f.Write(f.T, "changing.yaml", harness.Objects(harness.Service("changing", changing), f.Ready(pods...)...)...)
}

// start starts the daemon and the load.
func (f *faultScene) start() {
	f.Helper()
	f.daemon = f.World.Run(f.T, f.variant, f.flags...)
	f.inForce("n1a")
	f.load()
}

// load sends requests to Services of several kinds until the end.
func (f *faultScene) load() {
	f.Helper()
	const pause = 10 * time.Millisecond
	f.loads = append(f.loads,
		f.Client.StartLoad("tcp", clusterIP(1, 4), 1, pause),
		f.Client.StartLoad("udp", vip(4, 6), 1, pause),
		f.Client.StartLoad("tcp", nodePort(f.Node1().IP4, 3), 1, pause),
		f.Pod("n1c").StartLoad("tcp", nodePort(f.Node1().IP6, 2), 1, pause))
	f.enough()
}

// enough waits until each load has made some requests more.
func (f *faultScene) enough() {
	f.Helper()
	for _, l := range f.loads {
		want := max(l.Requests()+15, 60) // as many as noFailures wants, and more
		eventually(f.T, "requests", func() error { return requestsMade(l, want) })
	}
}

// inForce waits until the Service that changes has these endpoints, in both families.
func (f *faultScene) inForce(pods ...string) {
	f.Helper()
	for _, family := range families {
		eventually(f.T, "change", func() error {
			return serversOf(f.Client, "tcp", clusterIP(changing, family), pods...)
		})
	}
}

// repaired waits until the Service that changes has these endpoints, after a fault that has just ended.
func (f *faultScene) repaired(pods ...string) {
	f.Helper()
	end := time.Now()
	f.inForce(pods...)
	f.repairs = append(f.repairs, time.Since(end))
}

// log waits for a line in the daemon's log from the given one on.
func (f *faultScene) log(from int, parts ...string) {
	f.Helper()
	require.NoError(f, f.daemon.WaitForAfter(from, harness.Limit, parts...))
}

// finish ends the load, in which nothing may have failed, and compares what the kernel holds with what a new start writes.
func (f *faultScene) finish() {
	f.Helper()
	f.enough()
	noFailures(f.T, f.loads...)
	if over, err := f.daemon.Exited(); over {
		f.Errorf("the daemon has ended: %v", err)
	}
	f.likeFresh()
}

// preferredSource is the address of its own that a node puts into a route; node2 does not have that of node1.
var preferredSource = regexp.MustCompile(`(?m)^(local \S+ dev kube-ipvs0 proto static.*?) src \S+`)

// likeFresh compares what node1 holds with what a daemon writes on node2, as if that were node1.
func (f *faultScene) likeFresh() {
	f.Helper()
	other := f.Nodes[1]
	launch := f.Launch
	f.Launch = nil
	fresh, err := f.StartDaemon(other, append([]string{"--iptables-backend=" + string(f.variant),
		"--ipvs-vips=" + string(harness.VIPsWith(f.variant)), "--node-name=" + f.Node1().Name}, f.flags...)...)
	f.Launch = launch
	if err == nil {
		err = fresh.WaitFor(harness.StartupTimeout, harness.InSync)
	}
	require.NoError(f, err)
	sameAddress := strings.NewReplacer(other.IP4.String(), f.Node1().IP4.String(), other.IP6.String(), f.Node1().IP6.String())
	comparable := func(held string) string {
		return essence(preferredSource.ReplaceAllString(sameAddress.Replace(held), "$1"))
	}
	eventually(f.T, "the kernel holds what a new start writes", func() error {
		want := comparable(heldOn(f.T, other, f.variant))
		if now := comparable(held(f.T, f.World, f.variant)); now != want {
			return fmt.Errorf("%s", firstDifference(want, now))
		}
		return nil
	})
	assert.NoError(f, fresh.Stop())
}
