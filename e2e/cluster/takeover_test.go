package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/harness"
)

// takeOverTest has the modes of kube-proxy and of nodeproxy. In mode nftables, neither has a use for iptables.
type takeOverTest struct {
	from, to harness.Mode
	variants []harness.Variant
}

func (to takeOverTest) name() string { return fmt.Sprintf("take-over-from-%s-by-%s", to.from, to.to) }

var takeOvers = []takeOverTest{
	{harness.IPTables, harness.IPTables, harness.Variants},
	{harness.NFTables, harness.IPTables, []harness.Variant{harness.NFT}},
	{harness.IPTables, harness.NFTables, harness.Variants},
	{harness.NFTables, harness.NFTables, []harness.Variant{harness.NFT}},
	{harness.IPVS, harness.NFTables, []harness.Variant{harness.NFT}},
	{harness.NFTables, harness.IPVS, []harness.Variant{harness.NFT}},
}

// TestTakeOver: nodeproxy takes over from a kube-proxy that runs, whatever the modes of both are, without a failed request, and gives
// back to it without any either; to one in mode nftables with --hand-over-to. As long as kube-proxy runs, nodeproxy writes nothing.
func TestTakeOver(t *testing.T) {
	for _, variant := range harness.Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			testTakeOvers(t, variant, false)
		})
	}
}

// TestTakeOverIPVS is TestTakeOver with mode ipvs on one side, on a kernel that has it. That takes minutes, as IPVS counts a connection that
// has ended for two minutes more; so the direction for which that matters is only tried where NODEPROXY_E2E_SLOW is set.
func TestTakeOverIPVS(t *testing.T) {
	t.Parallel()
	if kernelHasIPVS() {
		testTakeOvers(t, harness.NFT, true)
	} else {
		t.Logf("on the test kernel:\n%s", harness.RunElsewhere(t))
	}
}

func kernelHasIPVS() bool {
	_, err := os.Stat("/proc/net/ip_vs")
	return err == nil
}

func testTakeOvers(t *testing.T, variant harness.Variant, ipvs bool) {
	l := newLab(t, variant)
	for i, to := range takeOvers {
		if to.from == harness.IPVS && os.Getenv("NODEPROXY_E2E_SLOW") == "" {
			continue
		}
		if slices.Contains(to.variants, variant) && ipvs == (to.from == harness.IPVS || to.to == harness.IPVS) {
			l.mode = to.to
			l.run(t, to.name(), func(s *scenario) { takeOver(s, to.from, harness.AddressesOf(20+i).ExternalIP(4)) })
		}
	}
}

func takeOver(s *scenario, from harness.Mode, external netip.Addr) {
	cluster := s.service(func(svc *v1.Service) {
		svc.Spec.Type, svc.Spec.IPFamilyPolicy = v1.ServiceTypeNodePort, ptr.To(v1.IPFamilyPolicyRequireDualStack)
		svc.Spec.ExternalIPs = []string{external.String()}
	})
	local := s.serviceNamed("local", func(svc *v1.Service) {
		svc.Spec.Type, svc.Spec.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyLocal
	})
	s.pod("n1a", "n2a")
	s.must(s.daemon.Stop())
	if from == harness.IPVS { // In this mode it leaves what refused connections in mode iptables.
		binary, err := harness.Binary()
		s.must(err)
		_, err = s.Node1().Output(binary, "cleanup")
		s.must(err)
	}
	stop := s.kubeProxy(from)
	s.eventually("kube-proxy has programmed its rules", s.programmed)
	s.cleanNFTables() // of the daemon before
	// From here on it has nothing to change. In mode ipvs, a node port comes after the cluster IP.
	for _, svc := range []*v1.Service{cluster, local} {
		s.eventually("kube-proxy works", servers(s.Client, at(svc, 4), "n1a", "n2a"))
	}
	s.eventually("kube-proxy works", servers(s.Client, s.nodePort(cluster), "n1a", "n2a"))
	s.eventually("kube-proxy works", servers(s.Client, s.nodePort(local), "n1a"))
	s.loadAll(cluster, local, external)
	stopTalk := s.talk(s.nodePort(cluster))
	open := s.open(s.nodePort(cluster), at(cluster, 4), s.nodePort(local))
	begun := time.Now()

	before := s.rules()
	s.waitsInPod()
	flags := []string{"--mode=" + string(s.mode), "--iptables-backend=" + string(s.variant), clusterCIDR, "--manifests=",
		"--kubeconfig=" + s.kubeconfig, "--healthz-bind-address=127.0.0.1:10266", "--metrics-bind-address=127.0.0.1:10259"}
	if from == harness.NFTables {
		flags = append(flags, "--hand-over-to=nftables")
	}
	next, err := s.StartDaemon(s.Node1(), flags...)
	s.must(err)
	s.daemon = next
	s.must(next.WaitFor(harness.Limit, "another proxy runs here", ": kube-proxy (process "))
	s.eventually("/readyz says whom it waits for", func() error {
		ready, err := s.Node1().Output("curl", "-s", "http://127.0.0.1:10266/readyz")
		if err == nil && !strings.Contains(ready, `"detail":"nothing is written before this is gone: kube-proxy (process `) {
			err = fmt.Errorf("/readyz: %s", ready)
		}
		return err
	})
	s.eventually("an event says so", func() error { return s.hasEvent(begun, "WaitingForProxy", "kube-proxy") })
	time.Sleep(time.Second) // Nothing is to be written, and there is no sign of that.
	if after := s.rules(); after != before {
		s.Errorf("rules changed while kube-proxy ran:\n%s", differences(before, after))
	}
	gone := time.Now()
	stop()
	s.must(next.WaitFor(harness.Limit, harness.InSync))
	took := time.Since(gone)
	s.eventually("nothing of kube-proxy's is left", s.nothingOfKubeProxy)
	s.Logf("took over in %v", took.Round(time.Millisecond))

	open.goOn("after the take-over")
	if from == harness.NFTables && s.mode != harness.IPVS {
		next = s.comesBack(next, flags)
		open.goOn("after a hand-over to nobody")
	}

	virtual := s.mode == harness.IPVS && from == harness.NFTables // kube-proxy may remove the servers that open connections need
	if virtual {
		stopTalk()
	}
	stop = s.back(from, next)
	if virtual {
		_, _ = open.broken("at the way back")
	} else {
		open.goOn("at the way back")
		stopTalk()
	}
	open.close()
	s.tellRate(begun)
	s.endLoads()
	s.follows(from, cluster, local)
	stop()
	s.cleanAndCompare()
}

// loadAll connects to two Services all the time in every way: from a client outside, from a Pod and from the node.
func (s *scenario) loadAll(cluster, local *v1.Service, external netip.Addr) {
	rate := 2000
	if harness.InGuest() {
		rate = 100
	}
	s.pause = 5 * workers * time.Second / time.Duration(harness.ConnectionRate(rate))
	s.load(s.Client, s.nodePort(cluster))
	s.load(s.Client, at(cluster, 4))
	s.load(s.Client, at(cluster, 6))
	s.load(s.Client, netip.AddrPortFrom(external, 80))
	s.load(s.Client, s.nodePort(local))
	s.load(s.World.Pod("n1b").Host, at(cluster, 4))
	s.load(s.Node1().Host, at(cluster, 4))
}

// comesBack: where nodeproxy starts again after a hand-over, its own rules are in force again, and nothing else's.
func (s *scenario) comesBack(daemon *harness.Daemon, flags []string) *harness.Daemon {
	s.Helper()
	s.must(daemon.Stop())
	if left := s.rules(); !strings.Contains(left, "table ip kube-proxy ") {
		s.Errorf("nothing is handed over:\n%s", left)
	}
	s.more()
	next, err := s.StartDaemon(s.Node1(), flags...)
	s.must(err)
	s.daemon = next
	s.must(next.WaitFor(harness.Limit, harness.InSync))
	s.eventually("nothing of the hand-over is left", s.nothingOfKubeProxy)
	s.more()
	return next
}

// back ends nodeproxy, and starts a kube-proxy in its place.
func (s *scenario) back(to harness.Mode, daemon *harness.Daemon) (stop func()) {
	s.Helper()
	s.must(daemon.Stop())
	s.more()
	stop = s.kubeProxy(to)
	s.eventually("kube-proxy has taken over", s.programmed)
	if to != harness.NFTables {
		s.cleanNFTables()
	}
	s.more()
	return stop
}

// follows: once a kube-proxy in this mode serves the node again, nothing else does.
func (s *scenario) follows(mode harness.Mode, cluster, local *v1.Service) {
	s.Helper()
	s.gone("n1a")
	for _, to := range []netip.AddrPort{at(cluster, 4), at(cluster, 6), s.nodePort(cluster)} {
		s.eventually("kube-proxy follows", servers(s.Client, to, "n2a"))
	}
	if mode != harness.IPVS { // It sends to other nodes then.
		s.eventually("kube-proxy follows", ends(s.Client, s.nodePort(local), harness.TimedOut))
	}
	s.gone("n2a")
	for _, to := range []netip.AddrPort{at(cluster, 4), at(cluster, 6), s.nodePort(cluster)} {
		s.eventually("kube-proxy follows", ends(s.Client, to, harness.Refused))
	}
	if left := s.rules(); strings.Contains(left, "table ip nodeproxy ") || strings.Contains(left, "table ip6 nodeproxy ") {
		s.Errorf("left at the way back:\n%s", left)
	}
	if mode == harness.NFTables { // What nodeproxy has left in its tables is not in its way.
		metrics, err := s.Node1().Output("curl", "-s", "http://127.0.0.1:10249/metrics")
		s.must(err)
		for line := range strings.Lines(metrics) {
			if strings.HasPrefix(line, "kubeproxy_sync_proxy_rules_nftables_") && strings.Contains(line, "_failures_total") &&
				!strings.HasSuffix(line, "} 0\n") {
				s.Errorf("kube-proxy has %s", line)
			}
		}
	}
	s.pod("n1a", "n2a")
	s.eventually("kube-proxy follows", servers(s.Client, at(cluster, 4), "n1a", "n2a"))
}

// cleanNFTables removes what a nodeproxy in mode nftables has left beside a kube-proxy, if there is something, and nothing else.
func (s *scenario) cleanNFTables() {
	s.Helper()
	binary, err := harness.Binary()
	s.must(err)
	_, err = s.Node1().Output(binary, "cleanup", "--nftables-only")
	s.must(err)
	if left := s.rules(); strings.Contains(left, "table ip nodeproxy ") || strings.Contains(left, "table ip6 nodeproxy ") {
		s.Errorf("left by cleanup --nftables-only:\n%s", left)
	}
}

// Conversations are connections that stay open.
type conversations struct {
	*scenario
	all []*harness.Conversation
}

// open opens as many connections as harness.OpenConnections says.
func (s *scenario) open(to ...netip.AddrPort) *conversations {
	s.Helper()
	c := &conversations{scenario: s}
	for i := range harness.OpenConnections(10 * len(to)) {
		talk, err := s.Client.Converse(to[i%len(to)])
		s.must(err)
		c.all = append(c.all, talk)
	}
	s.Cleanup(c.close)
	return c
}

// goOn fails the test if one of the connections is broken.
func (c *conversations) goOn(when string) {
	c.Helper()
	if broken, first := c.broken(when); broken > 0 {
		c.Errorf("the first: %v", first)
	}
}

// broken returns how many of the connections are, and the error of the first.
func (c *conversations) broken(when string) (broken int, first error) {
	c.Helper()
	for _, talk := range c.all {
		if err := talk.Echo("line"); err != nil {
			if broken++; first == nil {
				first = err
			}
		}
	}
	c.Logf("%s: %d of %d open connections are broken", when, broken, len(c.all))
	return broken, first
}

func (c *conversations) close() {
	for _, talk := range c.all {
		talk.Close()
	}
}

// nothingOfIPVS looks for what mode ipvs has besides rules, which stays until the connections that need it have ended.
func (s *scenario) nothingOfIPVS() error {
	if _, state, has := strings.Cut(s.rules(), ipvsMark); has {
		connections, err := s.Node1().Output("cat", "/proc/net/ip_vs_conn")
		return errors.Join(fmt.Errorf("there is %s%s", state, connections), err)
	}
	return nil
}

// waitsInPod starts a nodeproxy with a process namespace of its own, as a pod has it, from where it can't see other processes. It
// has to see all the same that another proxy runs.
func (s *scenario) waitsInPod() {
	s.Helper()
	binary, err := harness.Binary()
	s.must(err)
	cmd := exec.Command("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", binary, "run", clusterCIDR,
		"--kubeconfig="+s.kubeconfig, "--node-name=node1", "--socket=", "--healthz-bind-address=", "--metrics-bind-address=")
	log, err := cmd.StderrPipe()
	s.must(err)
	s.must(s.Node1().Start(cmd))
	late := time.AfterFunc(harness.Limit, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	lines, seen := bufio.NewScanner(log), ""
	for !strings.Contains(seen, ": another proxy (listens at ") && lines.Scan() {
		seen += lines.Text() + "\n"
	}
	if lines.Err() != nil || !strings.Contains(seen, ": another proxy (listens at ") {
		s.Errorf("it does not wait (%v):\n%s", lines.Err(), seen)
	}
	_ = cmd.Process.Kill()
	_, _ = io.Copy(io.Discard, log) // It has ended when nobody holds the other end any more.
	_ = cmd.Wait()
}

// tellRate logs how many requests a second the loads have made since begun.
func (s *scenario) tellRate(begun time.Time) {
	s.Helper()
	total, took := 0, time.Since(begun)
	for _, l := range s.loads {
		total += l.Requests()
	}
	s.Logf("%d requests, %.0f a second", total, float64(total)/took.Seconds())
}

// kubeProxy starts a kube-proxy on node1. The function that it returns ends it.
func (s *scenario) kubeProxy(mode harness.Mode) (stop func()) {
	s.Helper()
	config := filepath.Join(s.TempDir(), "config.conf")
	text := strings.NewReplacer("KUBECONFIG", s.kubeconfig, `mode: "iptables"`, "mode: "+string(mode),
		"CLUSTER_CIDR", harness.ClusterCIDR4.String()+","+harness.ClusterCIDR6.String()).Replace(kubeadmConfig)
	s.must(os.WriteFile(config, []byte(text), 0o644))
	binaries, err := Binaries()
	s.must(err)
	return s.runProxy(filepath.Join(binaries, "kube-proxy"), []string{"--config=" + config, "--hostname-override=node1"})
}

// talk keeps one connection open and in use until the function that it returns is called.
func (s *scenario) talk(to netip.AddrPort) (stop func()) {
	s.Helper()
	c, err := s.Client.Converse(to)
	s.must(err)
	ctx, cancel := context.WithCancel(s.Context())
	ended := make(chan error, 1)
	go func() {
		defer c.Close()
		for i := 0; ctx.Err() == nil; i++ {
			if err := c.Echo(fmt.Sprintf("line %d", i)); err != nil {
				ended <- fmt.Errorf("the connection that was kept open broke after %d lines: %w", i, err)
				return
			}
			time.Sleep(10 * time.Millisecond) // between two lines
		}
		ended <- nil
	}()
	return func() {
		s.Helper()
		cancel()
		assert.NoError(s, <-ended)
	}
}

var (
	counters = regexp.MustCompile(`\[\d+:\d+\]`)
	setSizes = regexp.MustCompile(` (hashsize|bucketsize|initval) \S+`)
)

// ipvsMark is before what mode ipvs has besides rules.
const ipvsMark = "ipvs: "

// rules are all rules on node1 without counters, and what IPVS has, chain by chain in the order of their names: which chain is listed first says
// nothing.
func (s *scenario) rules() string {
	s.Helper()
	type rule struct{ in, text string }
	var all []rule
	add := func(in, line string) {
		all = append(all, rule{in, counters.ReplaceAllString(strings.TrimSpace(line), "")})
	}
	listed, err := s.Node1().Output("nft", "-s", "list", "ruleset")
	s.must(err)
	table, object := "", ""
	for line := range strings.Lines(listed) {
		indent := len(line) - len(strings.TrimLeft(line, "\t"))
		switch {
		case line == "\n":
		case indent == 0:
			table, object = strings.Trim(line, "{}\n"), ""
		case indent == 1:
			object = strings.Trim(line, "\t{}\n")
			add(table+object, "")
		default:
			add(table+object, line)
		}
	}
	if s.variant == harness.Legacy {
		for _, save := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
			text, err := s.Node1().Output(save)
			s.must(err)
			for line := range strings.Lines(text) {
				switch words := strings.Fields(line); line[0] {
				case '*':
					table = save + " " + words[0]
				case ':':
					add(table+words[0][1:], "")
				case '-':
					add(table+words[1], line)
				}
			}
		}
	}
	if kernelHasIPVS() {
		for _, command := range []string{"ipvsadm --save --numeric", "ipset save", "ip -4 route show table local", "ip -6 route show table local"} {
			words := strings.Fields(command)
			text, err := s.Node1().Output(words[0], words[1:]...)
			s.must(err)
			for line := range strings.Lines(sorted(text)) {
				if words[0] != "ip" || strings.Contains(line, "kube-ipvs0") {
					add(ipvsMark+command, setSizes.ReplaceAllString(line, ""))
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b rule) int { return strings.Compare(a.in, b.in) })
	var out strings.Builder
	for _, r := range all {
		fmt.Fprintf(&out, "%s: %s\n", r.in, r.text)
	}
	return out.String()
}

func sorted(text string) string {
	return strings.Join(slices.Sorted(strings.Lines(text)), "")
}

// differences are the lines that only one of two texts has.
func differences(before, after string) string {
	var out strings.Builder
	for _, side := range []struct{ mark, a, b string }{{"- ", before, after}, {"+ ", after, before}} {
		other := map[string]bool{}
		for line := range strings.Lines(side.b) {
			other[line] = true
		}
		for line := range strings.Lines(side.a) {
			if !other[line] {
				out.WriteString(side.mark + line)
			}
		}
	}
	return out.String()
}

// hasEvent looks for an event about node1 that is not older than since.
func (s *scenario) hasEvent(since time.Time, reason, text string) error {
	list, err := s.cp.Admin.EventsV1().Events(metav1.NamespaceDefault).List(s.Context(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, e := range list.Items {
		late := !e.EventTime.Time.Before(since) // An event of an earlier scenario's daemon is none of this one's.
		if late && e.Reason == reason && e.Regarding.Name == "node1" && strings.Contains(e.Note, text) {
			return nil
		}
	}
	return fmt.Errorf("none of %d events has reason %s and %q", len(list.Items), reason, text)
}

// nothingOfKubeProxy looks for what only a kube-proxy makes.
func (s *scenario) nothingOfKubeProxy() error {
	for _, sign := range []string{"kube-proxy", "KUBE-PROXY-CANARY", "nfacct"} {
		for line := range strings.Lines(s.rules()) {
			if strings.Contains(line, sign) {
				return fmt.Errorf("there is %s", strings.TrimSpace(line))
			}
		}
	}
	return nil
}

// programmed reports whether a kube-proxy on node1 has programmed what there is, for both families.
func (s *scenario) programmed() error {
	metrics, err := s.Node1().Output("curl", "-s", "http://127.0.0.1:10249/metrics")
	if err != nil {
		return err
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		name := `kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="` + family + `"} `
		if _, count, ok := strings.Cut(metrics, name); !ok || strings.HasPrefix(count, "0\n") {
			return fmt.Errorf("no sync of %s yet", family)
		}
	}
	return nil
}

// cleanAndCompare: cleanup leaves nothing but what is shared with the kubelet, and after it nodeproxy makes the very rules that it
// had when it took over.
func (s *scenario) cleanAndCompare() {
	s.Helper()
	binary, err := harness.Binary()
	s.must(err)
	s.startDaemon(s.T)
	s.eventually("nothing of kube-proxy's is left", s.nothingOfKubeProxy)
	if s.mode != harness.IPVS {
		s.within(5*time.Minute, "nothing of mode ipvs is left", s.nothingOfIPVS)
	}
	had := s.rules()
	s.must(s.daemon.Stop())
	listed, err := s.Node1().Output(binary, "cleanup", "--dry-run")
	s.must(err)
	if s.rules() != had {
		s.Error("cleanup --dry-run changes something")
	}
	removed, err := s.Node1().Output(binary, "cleanup")
	s.must(err)
	if listed != removed {
		s.Errorf("cleanup --dry-run listed\n%s\nremoved was\n%s", listed, removed)
	}
	for line := range strings.Lines(s.rules()) {
		if strings.Contains(line, "KUBE-") && !strings.Contains(line, "KUBE-FIREWALL") || strings.HasPrefix(line, ipvsMark) {
			s.Errorf("left by cleanup: %s", line)
		}
	}
	s.startDaemon(s.T)
	if has := s.rules(); sorted(has) != sorted(had) { // In built-in chains, jumps that were there already stay where they are.
		s.Errorf("after the take-over (-), and after a start on a clean node (+):\n%s", differences(had, has))
	}
	if s.mode == harness.NFTables { // A kube-proxy that cleans up takes nothing of this mode's.
		binaries, err := Binaries()
		s.must(err)
		had := s.rules()
		_, err = s.Node1().Output(filepath.Join(binaries, "kube-proxy"), "--cleanup")
		s.must(err)
		if has := s.rules(); has != had {
			s.Errorf("before (-) and after (+) kube-proxy --cleanup:\n%s", differences(had, has))
		}
	}
}
