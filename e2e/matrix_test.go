package e2e

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// cell is one question to the data plane: what does this client get at this frontend of this Service?
type cell struct {
	row     row
	other   string // the policy of the traffic that the row is not about; it must not matter
	source  string
	network string
	family  int
	want    string

	client *harness.Host
	to     netip.AddrPort
	sit    situation
}

func (c cell) String() string {
	return fmt.Sprintf("%s %s (other policy %s) %s from %s, %s IPv%d at %s",
		c.row.frontend, c.row.policy, c.other, c.row.situation, c.source, c.network, c.family, c.to)
}

// matrix is one Service for each pair of traffic policies and each situation, and the questions about them.
type matrix struct {
	world *harness.World
	cells []cell
	// atOnce is how many questions are put at a time, and least how many requests are made for each.
	atOnce, least int
	any           bool // not all endpoints need to be seen
}

var policies = []string{"Cluster", "Local"}

func newMatrix(t *testing.T, w *harness.World) *matrix {
	t.Helper()
	return newMatrixOf(t, w, situations, func(string, string) bool { return true })
}

// newMatrixOf is newMatrix for some of the situations, and for the pairs of internal and external policy that are wanted.
func newMatrixOf(t *testing.T, w *harness.World, situations []situation, wanted func(internal, external string) bool) *matrix {
	t.Helper()
	rows, err := parseExpectations()
	require.NoError(t, err)
	m := &matrix{world: w, atOnce: 48, least: leastRequests}
	number := 0
	for _, sit := range situations {
		for _, internal := range policies {
			for _, external := range policies {
				number++
				if !wanted(internal, external) {
					continue
				}
				name := strings.ToLower(fmt.Sprintf("%s-%s-%s", strings.ReplaceAll(sit.name, "+", "-"), internal, external))
				s := harness.Service(name, number, harness.Policies(internal, external))
				w.Write(t, name+".yaml", harness.Objects(s, sit.endpoints(w)...)...)
				for _, r := range rows {
					if r.situation == sit.name {
						m.add(r, sit, harness.AddressesOf(number), internal, external)
					}
				}
			}
		}
	}
	return m
}

// add adds the questions of one row about one Service, if it has the row's policy.
func (m *matrix) add(r row, sit situation, a harness.Addresses, internal, external string) {
	policy, other := external, internal
	if r.frontend == "cluster-ip" {
		policy, other = internal, external
	}
	if policy != r.policy {
		return
	}
	node := m.world.Node1()
	clients := map[string]*harness.Host{
		"pod": m.world.Pod("n1c").Host, "endpoint": m.world.Pod("n1a").Host, "own-node": node.Host,
		"other-node": m.world.Nodes[1].Host, "outside": m.world.Client,
	}
	for _, family := range families {
		to, ok := map[string]netip.AddrPort{
			"cluster-ip":                       netip.AddrPortFrom(a.ClusterIP(family), harness.ServicePort),
			"lb-vip":                           netip.AddrPortFrom(a.VIP(family), harness.ServicePort),
			"external-ip":                      netip.AddrPortFrom(a.ExternalIP(family), harness.ServicePort),
			"node-port":                        netip.AddrPortFrom(node.IP(family), a.NodePort),
			fmt.Sprintf("localhost%d", family): netip.AddrPortFrom(loopback(family), a.NodePort),
		}[r.frontend]
		if !ok {
			continue
		}
		for _, source := range sources {
			if r.cells[source] == "-" {
				continue
			}
			for _, network := range networks {
				m.cells = append(m.cells, cell{
					row: r, other: other, source: source, network: network, family: family, want: expected(r, source),
					client: clients[source], to: to, sit: sit,
				})
			}
		}
	}
}

func loopback(family int) netip.Addr {
	if family == 6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// Enough requests that an endpoint which must not be in the set has a good chance to show, in some cell if not in each;
// and so many at most that one which should be there is missed once in 10^11 cells.
const leastRequests, mostRequests = 12, 100

// ask puts the question and returns what is wrong with the answers, or "".
func (m *matrix) ask(c cell) string {
	set, view, answered := strings.Cut(c.want, "/")
	if !answered {
		return checkSilence(c)
	}
	want := c.sit.cluster
	if set == "local" {
		want = c.sit.local
	}
	seen := map[string]int{}
	for i := 0; i < mostRequests && (i < m.least || !m.any && len(seen) < len(want)); i++ {
		fallOutOfStep(i)
		a := c.client.Ask(c.network, c.to, harness.Patient)
		if a.Outcome != harness.Answered {
			return fmt.Sprintf("request %d: %v, want an answer from one of %v", i+1, a, want)
		}
		if !slices.Contains(want, a.Server) {
			return fmt.Sprintf("request %d: %v, want an answer from one of %v", i+1, a, want)
		}
		source := m.world.Node1().IP(c.family)
		if view == "kept" && a.Server != c.client.Name {
			source = c.client.IP(c.family)
		}
		if a.Source != source {
			return fmt.Sprintf("request %d: %v, want it to see %v", i+1, a, source)
		}
		seen[a.Server]++
	}
	if len(seen) < len(want) && !m.any {
		return fmt.Sprintf("answers from %v after %d requests, want all of %v", seen, mostRequests, want)
	}
	return ""
}

func checkSilence(c cell) string {
	if c.want == "unanswered" { // and lost somewhere, or of no use to a router on the way
		if a := c.client.Ask(c.network, c.to, harness.Brief); a.Outcome != harness.TimedOut && a.Outcome != harness.Unreachable {
			return fmt.Sprintf("%v, want no answer", a)
		}
		return ""
	}
	if c.want == "refused" {
		if a := c.client.Ask(c.network, c.to, harness.Patient); a.Outcome != harness.Refused {
			return fmt.Sprintf("%v, want refused", a)
		}
		return ""
	}
	if a := c.client.Ask(c.network, c.to, harness.Brief); a.Outcome != harness.TimedOut {
		return fmt.Sprintf("%v, want silence", a)
	}
	return ""
}

// run puts all questions, many at a time, and returns what is wrong, by position in m.cells.
func (m *matrix) run() map[int]string {
	var (
		mu    sync.Mutex
		wrong = map[int]string{}
		work  = make(chan int)
		wait  sync.WaitGroup
	)
	for range m.atOnce {
		wait.Go(func() {
			for i := range work {
				if problem := m.ask(m.cells[i]); problem != "" {
					mu.Lock()
					wrong[i] = problem
					mu.Unlock()
				}
			}
		})
	}
	for i := range m.cells {
		work <- i
	}
	close(work)
	wait.Wait()
	return wrong
}

// table renders the outcome: the expectation of each cell, and how many of its questions were answered so. A cell
// stands for TCP and UDP, both families where they apply, and both values of the other policy.
func (m *matrix) table(name string, wrong map[int]string) string {
	type key struct{ frontend, policy, situation, source string }
	asked, right := map[key]int{}, map[key]int{}
	for i, c := range m.cells {
		k := key{c.row.frontend, c.row.policy, c.row.situation, c.source}
		asked[k]++
		if wrong[i] == "" {
			right[k]++
		}
	}
	rows, _ := parseExpectations()
	var b strings.Builder
	fmt.Fprintf(&b, "packet matrix, mode %s, %s: %d of %d questions answered as expected\n",
		mode, name, len(m.cells)-len(wrong), len(m.cells))
	fmt.Fprintf(&b, "%-12s %-8s %-13s", "frontend", "policy", "endpoints")
	for _, source := range sources {
		fmt.Fprintf(&b, " %-18s", source)
	}
	b.WriteString("\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "%-12s %-8s %-13s", r.frontend, r.policy, r.situation)
		for _, source := range sources {
			k := key{r.frontend, r.policy, r.situation, source}
			text := "-"
			if asked[k] > 0 {
				text = fmt.Sprintf("%s %d/%d", expected(r, source), right[k], asked[k])
			}
			fmt.Fprintf(&b, " %-18s", text)
		}
		b.WriteString("\n")
	}
	for _, d := range differences {
		if d.mode == mode {
			fmt.Fprintf(&b, "%s: %s instead of an answer, since %s\n", d.frontend, d.answered, d.why)
		}
	}
	return b.String()
}

var matrixOut sync.Mutex

// publish appends the table to the file that $MATRIX_OUT names, if any.
func publish(t *testing.T, table string) {
	t.Helper()
	path := os.Getenv("MATRIX_OUT")
	if path == "" {
		return
	}
	matrixOut.Lock()
	defer matrixOut.Unlock()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	require.NoError(t, err)
	if _, err := f.WriteString(table + "\n"); err != nil {
		t.Error(err)
	}
	assert.NoError(t, f.Close())
}

// TestPacketMatrix sends packets for every frontend, policy, situation and client; see expectations. "nodeproxy trace" has to predict what
// becomes of each. In mode ipvs, it does so
// with each of the two ways in which addresses of Services become the node's.
func TestPacketMatrix(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		if mode != harness.IPVS {
			testPacketMatrix(t, variant, harness.VIPsWith(variant))
			return
		}
		for _, vips := range []harness.VIPs{harness.VIPRoutes, harness.VIPAddresses} {
			t.Run(string(vips), func(t *testing.T) {
				t.Parallel()
				testPacketMatrix(t, variant, vips)
			})
		}
	})
}

func testPacketMatrix(t *testing.T, variant harness.Variant, vips harness.VIPs) {
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	m := newMatrix(t, w)
	socket := traceSocket(t)
	w.Run(t, variant, clusterCIDR, "--ipvs-vips="+string(vips), "--socket="+socket)
	wrong := m.run()
	m.checkTraces(t, socket, clusterCIDR, "--ipvs-vips="+string(vips))
	name := "variant " + string(variant)
	if mode == harness.IPVS {
		name += ", " + string(vips)
	}
	table := m.table(name, wrong)
	t.Log("\n" + table)
	publish(t, table)
	for _, i := range slices.Sorted(maps.Keys(wrong)) {
		t.Errorf("%s: %s", m.cells[i], wrong[i])
	}
	if len(wrong) > 0 {
		t.Log(w.Node1().Dump(variant))
	}
}
