package cluster

import (
	"bufio"
	"context"
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

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/harness"
)

// TestTakeOver: nodeproxy takes over from a kube-proxy that runs, whatever that one's mode is, without a failed request, and gives
// back to one in mode iptables without any either. Before it is that one's end, it writes nothing.
func TestTakeOver(t *testing.T) {
	for _, variant := range harness.Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, variant)
			l.run(t, "take-over-from-iptables", func(s *scenario) { takeOver(s, "iptables") })
			if variant == harness.NFT { // In mode nftables, kube-proxy has no use for iptables.
				l.run(t, "take-over-from-nftables", func(s *scenario) { takeOver(s, "nftables") })
			}
		})
	}
}

func takeOver(s *scenario, mode string) {
	cluster := s.service(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeNodePort })
	local := s.serviceNamed("local", func(svc *v1.Service) {
		svc.Spec.Type, svc.Spec.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyLocal
	})
	s.pod("n1a", "n2a")
	s.must(s.daemon.Stop())
	stop := s.kubeProxy(mode)
	s.within(30*time.Second, "kube-proxy has programmed its rules", s.programmed)
	for _, svc := range []*v1.Service{cluster, local} { // From here on it has nothing to change.
		s.within(30*time.Second, "kube-proxy works", servers(s.Client, at(svc, 4), "n1a", "n2a"))
	}
	s.load(s.Client, s.nodePort(cluster))
	s.load(s.Client, at(cluster, 4))
	s.load(s.Client, s.nodePort(local))
	s.load(s.World.Pod("n1b").Host, at(cluster, 4))
	s.load(s.Node1().Host, at(cluster, 4))
	stopTalk := s.talk(s.nodePort(cluster))
	begun := time.Now()

	before := s.rules()
	s.waitsInPod()
	next, err := s.StartDaemon(s.Node1(), "--iptables-backend="+string(s.variant), clusterCIDR, "--manifests=", "--kubeconfig="+s.kubeconfig,
		"--healthz-bind-address=127.0.0.1:10266", "--metrics-bind-address=127.0.0.1:10259")
	s.must(err)
	s.daemon = next
	s.must(next.WaitFor(10*time.Second, "another proxy runs here", `other="kube-proxy (process `))
	s.eventually("/readyz says whom it waits for", func() error {
		ready, err := s.Node1().Output("curl", "-s", "http://127.0.0.1:10266/readyz")
		if err == nil && !strings.Contains(ready, `"detail":"nothing is written before this is gone: kube-proxy (process `) {
			err = fmt.Errorf("/readyz: %s", ready)
		}
		return err
	})
	s.eventually("an event says so", func() error { return s.hasEvent(begun, "WaitingForProxy", "kube-proxy") })
	time.Sleep(time.Second)
	if after := s.rules(); after != before {
		s.Errorf("rules changed while kube-proxy ran:\n%s", differences(before, after))
	}
	gone := time.Now()
	stop()
	s.must(next.WaitFor(10*time.Second, harness.InSync))
	took := time.Since(gone)
	s.eventually("nothing of kube-proxy's is left", s.nothingOfKubeProxy)
	s.Logf("took over in %v", took.Round(time.Millisecond))

	// And back.
	s.must(next.Stop())
	if mode == "iptables" {
		stop = s.kubeProxy(mode)
		s.within(30*time.Second, "kube-proxy has taken over", s.programmed)
		stop()
		s.enoughPerSecond(begun)
		s.endLoads()
	} else { // kube-proxy in mode nftables removes the rules of other modes before it has any of its own.
		s.enoughPerSecond(begun)
		s.endLoads()
		load := s.Client.StartLoad("tcp", s.nodePort(cluster), 2, 5*time.Millisecond)
		stop = s.kubeProxy(mode)
		s.within(30*time.Second, "kube-proxy has taken over", s.programmed)
		s.within(30*time.Second, "kube-proxy works", servers(s.Client, s.nodePort(cluster), "n1a", "n2a"))
		load.Stop()
		s.Logf("at the way back, kube-proxy made %d of %d requests fail", len(load.Failures()), load.Requests())
		stop()
	}
	stopTalk()
	s.cleanAndCompare()
}

// waitsInPod starts a nodeproxy with a process namespace of its own, as a pod has it, from where it can't see other processes. It
// has to see all the same that another proxy runs.
func (s *scenario) waitsInPod() {
	s.Helper()
	binary, err := harness.Binary()
	s.must(err)
	cmd := exec.Command("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", binary, "run", clusterCIDR,
		"--kubeconfig="+s.kubeconfig, "--node-name=node1", "--healthz-bind-address=", "--metrics-bind-address=")
	log, err := cmd.StderrPipe()
	s.must(err)
	s.must(s.Node1().Start(cmd))
	late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	lines, seen := bufio.NewScanner(log), ""
	for !strings.Contains(seen, `other="another proxy (listens at `) && lines.Scan() {
		seen += lines.Text() + "\n"
	}
	if lines.Err() != nil || !strings.Contains(seen, `other="another proxy (listens at `) {
		s.Errorf("it does not wait (%v):\n%s", lines.Err(), seen)
	}
	_ = cmd.Process.Kill()
	_, _ = io.Copy(io.Discard, log) // It has ended when nobody holds the other end any more.
	_ = cmd.Wait()
}

// enoughPerSecond fails the test if the loads have made less than 200 requests a second since begun.
func (s *scenario) enoughPerSecond(begun time.Time) {
	s.Helper()
	total, took := 0, time.Since(begun)
	for _, l := range s.loads {
		total += l.Requests()
	}
	if rate := float64(total) / took.Seconds(); rate < 200 {
		s.Errorf("%.0f requests a second; 200 are to be", rate)
	}
}

// kubeProxy starts a kube-proxy on node1. The function that it returns ends it.
func (s *scenario) kubeProxy(mode string) (stop func()) {
	s.Helper()
	config := filepath.Join(s.TempDir(), "config.conf")
	text := strings.NewReplacer("KUBECONFIG", s.kubeconfig, `mode: "iptables"`, "mode: "+mode,
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
			time.Sleep(10 * time.Millisecond)
		}
		ended <- nil
	}()
	return func() {
		s.Helper()
		cancel()
		if err := <-ended; err != nil {
			s.Error(err)
		}
	}
}

var counters = regexp.MustCompile(`\[\d+:\d+\]`)

// rules are all rules on node1 without counters, chain by chain in the order of their names: which chain is listed first says
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
		if strings.Contains(line, "KUBE-") && !strings.Contains(line, "KUBE-FIREWALL") {
			s.Errorf("left by cleanup: %s", line)
		}
	}
	s.startDaemon(s.T)
	if has := s.rules(); sorted(has) != sorted(had) { // In built-in chains, jumps that were there already stay where they are.
		s.Errorf("after the take-over (-), and after a start on a clean node (+):\n%s", differences(had, has))
	}
}
