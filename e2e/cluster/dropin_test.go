package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// kubeadmConfig is what kubeadm writes for kube-proxy, but for the path of its kubeconfig and a mode that is said.
const kubeadmConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
clientConnection:
  burst: 0
  contentType: ""
  kubeconfig: KUBECONFIG
  qps: 0
clusterCIDR: CLUSTER_CIDR
conntrack:
  maxPerCore: 0
  min: null
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
detectLocalMode: ""
healthzBindAddress: ""
iptables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
kind: KubeProxyConfiguration
metricsBindAddress: ""
mode: "iptables"
nodePortAddresses: null
`

// dropIn: kube-proxy's command line and configuration file, unchanged but for the name of the program, start nodeproxy, and it
// does the same: to packets from everywhere, and at its own endpoints.
func dropIn(s *scenario) {
	s.must(s.daemon.Stop())
	defer s.startDaemon(s.T)
	config := filepath.Join(s.TempDir(), "config.conf")
	s.must(os.WriteFile(config, []byte(strings.NewReplacer("KUBECONFIG", s.kubeconfig,
		"CLUSTER_CIDR", harness.ClusterCIDR4.String()+","+harness.ClusterCIDR6.String()).Replace(kubeadmConfig)), 0o644))
	arguments := []string{"--config=" + config, "--hostname-override=node1"}

	cluster := s.service(func(svc *v1.Service) { svc.Spec.Type = v1.ServiceTypeNodePort })
	local := s.serviceNamed("local", func(svc *v1.Service) {
		svc.Spec.Type, svc.Spec.ExternalTrafficPolicy = v1.ServiceTypeNodePort, v1.ServiceExternalTrafficPolicyLocal
	})
	s.pod("n1a", "n2a")
	proxies := map[string]string{}
	binaries, err := Binaries()
	s.must(err)
	proxies["kube-proxy"] = filepath.Join(binaries, "kube-proxy")
	proxies["nodeproxy"], err = harness.Binary()
	s.must(err)
	answers := map[string][]string{}
	for _, name := range []string{"kube-proxy", "nodeproxy"} {
		stop := s.runProxy(proxies[name], arguments)
		s.eventually(name+" is healthy", func() error { // The rules are there from the one before.
			if line := s.get(":10256/healthz"); line != "GET :10256/healthz 200" {
				return errors.New(line)
			}
			return nil
		})
		s.eventually(name+" answers", servers(s.Client, s.nodePort(cluster), "n1a", "n2a"))
		s.eventually(name+" answers", servers(s.Client, at(local, 4), "n1a", "n2a")) // Its endpoints may come later.
		answers[name] = s.behaviour(cluster, local)
		stop()
	}
	if !slices.Equal(answers["kube-proxy"], answers["nodeproxy"]) {
		s.Errorf("kube-proxy:\n%s\nnodeproxy:\n%s", strings.Join(answers["kube-proxy"], "\n"), strings.Join(answers["nodeproxy"], "\n"))
	}
	if !slices.Contains(answers["kube-proxy"], "GET :10256/healthz 200") {
		s.Errorf("kube-proxy was not in order:\n%s", strings.Join(answers["kube-proxy"], "\n"))
	}
}

// runProxy starts a proxy on node1, with the variant's programs under the names that kube-proxy looks for. The function that
// it returns ends it.
func (s *scenario) runProxy(path string, arguments []string) (stop func()) {
	s.Helper()
	programs := s.TempDir()
	s.must(s.variant.Link(programs))
	log, err := os.Create(filepath.Join(programs, "log"))
	s.must(err)
	cmd := exec.Command(path, arguments...)
	cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"))
	cmd.Stdout, cmd.Stderr = log, log
	s.must(s.Node1().Start(cmd))
	ended := false
	stop = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = log.Close()
		}
	}
	s.Cleanup(func() {
		stop()
		if s.Failed() {
			text, _ := os.ReadFile(log.Name())
			s.Logf("%s %s:\n%s", path, strings.Join(arguments, " "), text)
		}
	})
	return stop
}

// behaviour is what a proxy does, in lines that can be compared.
func (s *scenario) behaviour(cluster, local *v1.Service) []string {
	s.Helper()
	var out []string
	clients := []*harness.Host{s.Client, s.Node1().Host, s.World.Pod("n1b").Host, s.World.Pod("n1a").Host}
	for _, svc := range []*v1.Service{cluster, local} {
		for _, to := range []netip.AddrPort{
			at(svc, 4), s.nodePort(svc),
			netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), s.nodePort(svc).Port()),
		} {
			for _, client := range clients {
				if to.Addr().IsLoopback() && client != s.Node1().Host {
					continue
				}
				seen := map[string]bool{}
				for range 30 {
					a := client.Ask("tcp", to, harness.Patient)
					seen[fmt.Sprintf("%s %s from %s", a.Outcome, a.Server, a.Source)] = true
					if a.Outcome != harness.Answered {
						break
					}
				}
				var all []string
				for what := range seen {
					all = append(all, what)
				}
				slices.Sort(all)
				out = append(out, fmt.Sprintf("%s %s from %s: %s", svc.Name, to, client.Name, strings.Join(all, ", ")))
			}
		}
	}
	for _, url := range []string{":10256/healthz", ":10256/livez", ":10249/healthz", ":10249/proxyMode", ":10249/metrics"} {
		out = append(out, s.get(url))
	}
	mode, err := s.Node1().Output("curl", "-s", "http://127.0.0.1:10249/proxyMode")
	s.must(err)
	return append(out, "mode "+mode)
}

// get says how a request to one of a proxy's own endpoints ended.
func (s *scenario) get(url string) string {
	s.Helper()
	code, err := s.Node1().Output("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1"+url)
	if err != nil {
		code = err.Error()
	}
	return "GET " + url + " " + strings.TrimSpace(code)
}
