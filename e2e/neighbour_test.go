package e2e

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// otherProgram is one program that keeps rules in the kernel that nodeproxy programs.
type otherProgram struct {
	name string
	// kind says where its rules come from.
	kind neighbourKind
	// slow says that the program takes minutes on the kernel with IPVS, where system calls are slow; see slowVariable.
	slow bool
	// prepare, if not nil, sets up what an administrator sets up before either program starts.
	prepare func(*beside)
	// start is the neighbour's start, and reload what makes it write its rules again. Neither may fail a request.
	start, reload func(*beside)
	// shares are chains that the neighbour has in common with a service proxy. nodeproxy leaves them to it.
	shares []string
	// instead, if not nil, returns how a question ends beside this neighbour: c.want, or something else.
	instead func(b *beside, c cell) string
	// empties says that a start or reload of the neighbour removes rules of everybody's, on this variant. Then requests fail
	// until nodeproxy has written its own again, and what counts is that it does so, says so, and how long it takes.
	empties func(harness.Variant) bool
	// holds, if not nil, checks what the neighbour is there for.
	holds func(*beside)
}

type neighbourKind string

const (
	theProgram neighbourKind = "the program"
	recorded   neighbourKind = "recorded rules"
	written    neighbourKind = "rules as people write them"
)

// beside is nodeproxy beside a neighbour on node1.
type beside struct {
	*testing.T
	w       *harness.World
	variant harness.Variant
	matrix  *matrix
	room    *harness.Room // see program
	shares  []string
	empties bool
	row     neighbourRow
}

// neighbourRow is a row of the table of neighbours.
type neighbourRow struct {
	order                       string
	questions, requests, failed int
	// Requests from pod to pod, which no Service is part of: what fails of these is the neighbour's own doing.
	without, lost int
}

// slowVariable is the environment variable that, if set, has slow neighbours run in mode ipvs too. What they do to packets for Services
// others do as well, which run in any case: firewalld and nftables.conf drop what they do not know in INPUT, flannel in FORWARD.
const slowVariable = "NODEPROXY_E2E_SLOW"

// The orders in which programs start.
const (
	neighbourFirst = "neighbour first"
	nodeproxyFirst = "nodeproxy first"
)

// TestNeighbours: whichever of nodeproxy and another program starts first, Services answer as they do without the other, no
// request fails while the other starts or writes its rules again, and what is the other's is the same before nodeproxy starts,
// while it runs and after its cleanup.
func TestNeighbours(t *testing.T) {
	t.Parallel()
	for _, n := range neighbours {
		if mode == harness.IPVS && n.slow && os.Getenv(slowVariable) == "" {
			continue
		}
		t.Run(n.name, func(t *testing.T) {
			onVariants(t, harness.Variants, func(t *testing.T, variant harness.Variant) { testNeighbour(t, variant, n) })
		})
	}
}

// testNeighbour tries both orders, each in a World of its own. In mode ipvs, whose rules are as many as ever and whose kernel is slow
// here, each variant has one of them.
func testNeighbour(t *testing.T, variant harness.Variant, n otherProgram) {
	var alone string
	if mode == harness.IPVS && variant == harness.Legacy {
		testNodeproxyFirst(t, variant, n, alone)
		return
	}
	t.Run(neighbourFirst, func(t *testing.T) {
		b := newBeside(t, variant, n, neighbourFirst)
		n.start(b)
		alone = b.others()
		if alone == "" {
			t.Fatal("the neighbour has no rules")
		}
		d := b.run()
		b.untouched(alone, "while nodeproxy runs")
		b.packets(n)
		b.under(d, n, byMode(3, 1), n.reload)
		b.untouched(alone, "after a reload")
		b.leave(d)
		b.untouched(alone, "after nodeproxy cleanup")
		b.report()
	})
	if mode != harness.IPVS {
		testNodeproxyFirst(t, variant, n, alone)
	}
}

// testNodeproxyFirst compares what is the neighbour's with what it was without nodeproxy, if that is known.
func testNodeproxyFirst(t *testing.T, variant harness.Variant, n otherProgram, alone string) {
	t.Run(nodeproxyFirst, func(t *testing.T) {
		b := newBeside(t, variant, n, nodeproxyFirst)
		d := b.run()
		b.under(d, n, 1, n.start)
		if alone == "" {
			alone = b.others()
		}
		b.untouched(alone, "while nodeproxy runs")
		b.packets(n)
		b.under(d, n, byMode(3, 1), n.reload)
		b.leave(d)
		b.untouched(alone, "after nodeproxy cleanup")
		b.report()
	})
}

func newBeside(t *testing.T, variant harness.Variant, n otherProgram, order string) *beside {
	t.Helper()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	b := &beside{T: t, w: w, variant: variant, shares: n.shares, row: neighbourRow{order: order}}
	b.empties = n.empties != nil && n.empties(variant)
	b.matrix = newMatrixOf(t, w, besideSituations(), func(internal, external string) bool { return internal == external })
	if mode == harness.IPVS { // on one processor, on which system calls are slow
		b.matrix.atOnce, b.matrix.least, b.matrix.any = 8, 2, true
		b.matrix.cells = slices.DeleteFunc(b.matrix.cells, func(c cell) bool {
			return c.source == "endpoint" || c.source == "other-node" || c.row.frontend == "external-ip"
		})
	}
	if n.prepare != nil {
		n.prepare(b)
	}
	return b
}

// besideSituations are those with endpoints on this node and others, and without any.
func besideSituations() []situation {
	return slices.DeleteFunc(slices.Clone(situations), func(s situation) bool { return s.name != "local+remote" && s.name != "none" })
}

// run starts nodeproxy.
func (b *beside) run() *harness.Daemon { return b.w.Run(b, b.variant, clusterCIDR) }

// leave ends nodeproxy, and removes what it has written.
func (b *beside) leave(d *harness.Daemon) {
	b.Helper()
	// It tells of what it could not repair at once in other words.
	if n := count(d.Log(), "changed what was written"); (n > 0) != b.empties {
		b.Errorf("nodeproxy found its own rules changed %d times", n)
	}
	require.NoError(b, d.Stop())
	binary, err := harness.Binary()
	require.NoError(b, err)
	output(b.T, b.w, binary+" cleanup")
}

// packets puts the questions of the matrix.
func (b *beside) packets(n otherProgram) {
	b.Helper()
	cells := slices.Clone(b.matrix.cells)
	for i, c := range cells {
		if n.instead != nil {
			cells[i].want = n.instead(b, c)
		}
	}
	asked := *b.matrix
	asked.cells = cells
	wrong := asked.run()
	b.row.questions += len(cells)
	for k, i := range slices.Sorted(maps.Keys(wrong)) {
		if k == 12 {
			b.Errorf("and %d more of %d questions", len(wrong)-k, len(cells))
			break
		}
		b.Errorf("%s: %s", cells[i], wrong[i])
	}
	if len(wrong) > 0 {
		b.Log(b.w.Node1().Dump(b.variant))
	}
	if n.holds != nil {
		n.holds(b)
	}
}

// under has the neighbour do something, some times, while requests are under way.
func (b *beside) under(d *harness.Daemon, n otherProgram, times int, do func(*beside)) {
	b.Helper()
	var loads []*harness.Load
	node := b.w.Node1()
	pause := byMode(5*time.Millisecond, 30*time.Millisecond)
	for _, family := range families {
		if mode == harness.IPVS {
			loads = append(loads,
				b.w.Client.StartLoad("tcp", nodePort(node.IP(family), 1), 1, pause),
				b.w.Pod("n1c").StartLoad([]string{"udp", "tcp"}[family/5], clusterIP(1, family), 1, pause))
			continue
		}
		loads = append(loads,
			b.w.Client.StartLoad("tcp", nodePort(node.IP(family), 1), 1, pause),
			b.w.Client.StartLoad("udp", vip(1, family), 1, pause),
			b.w.Pod("n1c").StartLoad("tcp", clusterIP(1, family), 1, pause),
			node.StartLoad("tcp", clusterIP(1, family), 1, pause))
	}
	open, err := b.w.Client.Converse(clusterIP(1, 4))
	require.NoError(b, err)
	defer open.Close()
	direct := b.w.Pod("n1c").StartLoad("tcp", netip.AddrPortFrom(b.w.Pod("n2a").IP4, 8080), 1, pause)
	for i := range times {
		for _, l := range loads {
			eventually(b.T, "requests", func() error { return requestsMade(l, 15*(i+1)) })
		}
		lines := len(d.Log())
		do(b)
		if b.empties {
			b.repaired(d, lines)
		}
	}
	for _, l := range loads {
		made := l.Requests()
		eventually(b.T, "requests", func() error { return requestsMade(l, max(50, made+10)) })
	}
	if err := open.Echo("still there"); err != nil && !b.empties {
		b.Errorf("a connection that was open before: %v", err)
	}
	direct.Stop()
	b.row.without, b.row.lost = b.row.without+direct.Requests(), b.row.lost+len(direct.Failures())
	if !b.empties {
		noFailures(b.T, loads...)
	}
	whole := b.lastRepair(d)
	for _, l := range loads {
		if b.empties {
			l.Stop()
		}
		b.row.requests += l.Requests()
		b.row.failed += len(l.Failures())
		for _, failed := range l.Failures() {
			if b.empties && failed.Begun.After(whole) {
				b.Errorf("a request that began %v after the repair: %v", failed.Begun.Sub(whole), failed)
			}
		}
	}
}

// repaired waits until nodeproxy has repaired what has been done, or found that it has to try again.
func (b *beside) repaired(d *harness.Daemon, lines int) {
	b.Helper()
	require.NoError(b, d.WaitForAfter(lines, harness.Limit, "repair"))
	if count(d.Log()[lines:], hasRepaired) == 0 {
		require.NoError(b, d.WaitForAfter(lines, harness.Limit, harness.InSync))
	}
	time.Sleep(500 * time.Millisecond) // A second part of what was done may show only now.
	harness.Settle(b)
}

// hasRepaired is in the line about what a sync, or a comparison beside syncs, has repaired.
const hasRepaired = "it has been repaired"

// lastRepair is when the last sync or comparison ended that repaired something.
func (b *beside) lastRepair(d *harness.Daemon) time.Time {
	b.Helper()
	var last time.Time
	repairing := false
	for _, line := range d.Log() {
		repairing = repairing || strings.Contains(line, "repair")
		if strings.Contains(line, hasRepaired) || repairing && strings.Contains(line, harness.InSync) {
			repairing = repairing && !strings.Contains(line, harness.InSync)
			word, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
			at, err := time.Parse(time.RFC3339Nano, word)
			require.NoError(b, err)
			last = at
		}
	}
	return last
}

// untouched compares what is the neighbour's with what it was.
func (b *beside) untouched(was, when string) {
	b.Helper()
	if now := b.others(); now != was {
		b.Errorf("what is the neighbour's has changed %s: %s", when, firstDifference(was, now))
		b.Logf("was:\n%s\nis:\n%s", was, now)
	}
}

func (b *beside) report() {
	b.Logf("%s, mode %s: %d questions, %d requests during start and reload, %d failed; %d requests from pod to pod, %d failed",
		b.Name(), mode, b.row.questions, b.row.requests, b.row.failed, b.row.without, b.row.lost)
}

var (
	// ownChain and ownSet are the names of what nodeproxy keeps in any mode.
	ownChain = regexp.MustCompile(`^KUBE-((SERVICES|EXTERNAL-SERVICES|NODEPORTS|POSTROUTING|MARK-MASQ|FORWARD|PROXY-FIREWALL|` +
		`FIREWALL|SHORT-CIRCUIT|SOURCE-RANGES-FIREWALL|LOAD-BALANCER)$|(SVC|SVL|EXT|FW|SEP|IPVS|NODE-PORT))`)
	ownSet     = regexp.MustCompile(`^KUBE-(6-)?(CLUSTER|LOAD|EXTERNAL|IPVS|HEALTH|LOOP|NODE|NO|NP)-`)
	ownTable   = regexp.MustCompile(`^table ip6? nodeproxy(-\S+)? \{$`)
	ruleTarget = regexp.MustCompile(` -[jg] (\S+)`)
	// builtInRule is a line with a rule in a built-in chain.
	builtInRule = regexp.MustCompile(`(?m)^\s*-[AI] (PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING) .*\n`)
	// xtablesHeader begins a table of nf_tables that iptables has made.
	xtablesHeader = regexp.MustCompile(`^table ip6? (raw|mangle|nat|filter|security) \{$`)
)

func (b *beside) own(chain string) bool {
	return ownChain.MatchString(chain) && !slices.Contains(b.shares, chain)
}

// others returns all rules, sets and addresses of node1 that are not nodeproxy's.
func (b *beside) others() string {
	b.Helper()
	var out []string
	for _, tool := range []string{"iptables", "ip6tables"} {
		out = append(out, b.otherRules(tool)...)
	}
	out = append(out, b.otherTables()...)
	var sets []string
	for _, line := range strings.Split(ipSets(b.T, b.w), "\n") {
		if f := strings.Fields(line); len(f) > 1 && !ownSet.MatchString(f[1]) {
			sets = append(sets, line)
		}
	}
	out = append(out, sets...)
	for _, what := range []string{"addr", "rule"} {
		for _, family := range []string{"-4", "-6"} {
			for _, line := range strings.Split(output(b.T, b.w, "ip -o "+family+" "+what), "\n") {
				if line != "" && !strings.Contains(line, " kube-ipvs0 ") && !strings.Contains(line, " lookup 2496") && b.unusual(line) {
					out = append(out, strings.Join(strings.Fields(line), " "))
				}
			}
		}
	}
	return strings.Join(out, "\n")
}

// unusual leaves out the lines that every node has.
func (b *beside) unusual(line string) bool {
	for _, usual := range []string{" lo ", " eth0 ", " " + harness.PodInterfacePrefix, "lookup local", "lookup main", "lookup default"} {
		if strings.Contains(line, usual) {
			return false
		}
	}
	return true
}

// otherRules returns the rules of a program of the variant: chains in order of name, policies that are not ACCEPT, and rules.
func (b *beside) otherRules(tool string) []string {
	b.Helper()
	var chains, rules []string
	table := ""
	for _, line := range strings.Split(output(b.T, b.w, b.variant.Tool(tool)+"-save"), "\n") {
		f := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = tool + " " + line[1:] + " "
		case strings.HasPrefix(line, ":"):
			if f[1] != "ACCEPT" && !b.own(f[0][1:]) {
				chains = append(chains, table+f[0]+" "+f[1])
			}
		case strings.HasPrefix(line, "-A "):
			target := ruleTarget.FindStringSubmatch(line)
			if !b.own(f[1]) && (target == nil || !b.own(target[1])) {
				rules = append(rules, table+line)
			}
		}
	}
	slices.Sort(chains)
	chainOf := func(rule string) string { return strings.Join(strings.Fields(rule)[:4], " ") }
	slices.SortStableFunc(rules, func(a, b string) int { return strings.Compare(chainOf(a), chainOf(b)) })
	return append(chains, rules...)
}

// otherTables returns the tables of nf_tables that are not iptables'.
func (b *beside) otherTables() []string {
	var out []string
	skip := false
	for _, line := range strings.Split(output(b.T, b.w, "nft --stateless list ruleset"), "\n") {
		if strings.HasPrefix(line, "table ") {
			skip = xtablesHeader.MatchString(line) || ownTable.MatchString(line)
		}
		if !skip && line != "" && !strings.HasPrefix(line, "# ") {
			out = append(out, line)
		}
	}
	return out
}

// nodeAddr is the first address of node1 of a family.
func (b *beside) nodeAddr(family int) netip.Addr { return b.w.Node1().IP(family) }

// script runs shell commands on node1, with the programs of this machine.
func (b *beside) script(text string) string {
	b.Helper()
	out, err := b.w.Node1().Output("sh", "-ec", text)
	require.NoError(b, err)
	return out
}

// program runs shell commands on node1 in a Room, with the programs that e2e/neighbours/build has brought.
func (b *beside) program(text string) string {
	b.Helper()
	if b.room == nil {
		b.room = b.w.NewRoom(b, b.w.Node1().Netns, b.variant)
	}
	out, err := b.room.Output(text)
	require.NoError(b, err)
	return out
}

// restore gives rules to iptables-restore, for both families. What is in braces is replaced by the family's addresses, and a line
// that begins with "4 " or "6 " is for one family only.
func (b *beside) restore(rules string) {
	b.Helper()
	for _, family := range families {
		tool := b.variant.Tool(map[int]string{4: "iptables", 6: "ip6tables"}[family]) + "-restore"
		if _, err := b.w.Node1().OutputWithInput(b.text(rules, family), tool, "-w", "--noflush"); err != nil {
			b.Fatalf("%v\n%s", err, b.text(rules, family))
		}
	}
}

// text is a template for one family.
func (b *beside) text(template string, family int) string {
	podCIDRs := b.w.Node1().PodCIDRs()
	values := map[int][]string{
		4: {"{pods}", harness.ClusterCIDR4.String(), "{here}", podCIDRs[0].String(), "{v}", "4", "{p}", "", "{inet}", "inet", "{reject}", "icmp-port-unreachable",
			"{multicast}", "224.0.0.0/4", "{services}", harness.ServiceCIDR4.String(), "{lbs}", harness.VIPRange4.String(),
			"{externals}", harness.ExternalIPs4.String()},
		6: {"{pods}", harness.ClusterCIDR6.String(), "{here}", podCIDRs[1].String(), "{v}", "6", "{p}", "inet6:", "{inet}", "inet6", "{reject}", "icmp6-port-unreachable",
			"{multicast}", "ff00::/8", "{services}", harness.ServiceCIDR6.String(), "{lbs}", harness.VIPRange6.String(),
			"{externals}", harness.ExternalIPs6.String()},
	}[family]
	for _, host := range append(slices.Clone(b.w.Node1().Pods), b.w.Nodes[1].Pods...) {
		values = append(values, "{"+host.Name+"}", host.IP(family).String())
	}
	values = append(values, "{node}", b.nodeAddr(family).String(), "{kube-dns}",
		map[int]string{4: "10.96.0.10", 6: "fd00:10:96::a"}[family])
	var out strings.Builder
	other := map[int]string{4: "6 ", 6: "4 "}[family]
	for _, line := range strings.Split(template, "\n") {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, other) {
			continue
		}
		line = strings.TrimPrefix(line, fmt.Sprint(family, " "))
		out.WriteString(strings.NewReplacer(values...).Replace(line) + "\n")
	}
	return out.String()
}
