package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"

	"nodeproxy/e2e/harness"
)

// configured is a daemon whose configuration is in a file, but for where objects are and what the harness needs.
type configured struct {
	*harness.Daemon
	w    *harness.World
	file string
}

const configHeader = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// good is a configuration that runs.
func good() string { return fmt.Sprintf("%smode: %s\n", configHeader, mode) }

// section is the one of the configuration with the settings of masquerading in the mode under test.
func section() string {
	if mode == harness.NFTables {
		return "nftables"
	}
	return "iptables" // of mode ipvs too
}

// runConfigured starts a daemon over a file.
func runConfigured(t *testing.T, w *harness.World, variant harness.Variant) *configured {
	t.Helper()
	c := &configured{w: w, file: filepath.Join(t.TempDir(), "config.yaml")}
	c.write(t, good())
	w.Launch = func(path string, args ...string) *exec.Cmd {
		return exec.Command(path, slices.DeleteFunc(slices.Clone(args), func(a string) bool { return strings.HasPrefix(a, "--mode=") })...)
	}
	c.Daemon = w.Run(t, variant, clusterCIDR, "--config="+c.file)
	for _, at := range []netip.AddrPort{harness.HealthAddr, healthCheckAt} { // Listening begins beside the first sync.
		eventually(t, at.String()+" answers", func() error {
			code, body, err := w.Node1().Get(at, "/readyz")
			if err == nil && code != 200 {
				err = errors.New(body)
			}
			return err
		})
	}
	return c
}

func (c *configured) write(t *testing.T, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(c.file+".new", []byte(text), 0o644))
	require.NoError(t, os.Rename(c.file+".new", c.file))
}

// probes ask over and over at HTTP endpoints of the node that have to answer 200 all the while.
type probes struct {
	done    chan struct{}
	wait    sync.WaitGroup
	asked   atomic.Int64
	mu      sync.Mutex
	failure []string
}

func probe(w *harness.World, at netip.AddrPort, paths ...string) *probes {
	p := &probes{done: make(chan struct{})}
	for _, path := range paths {
		p.wait.Go(func() {
			for {
				select {
				case <-p.done:
					return
				case <-time.After(2 * time.Millisecond):
				}
				code, body, err := w.Node1().Get(at, path)
				if p.asked.Add(1); err != nil || code != 200 {
					p.mu.Lock()
					p.failure = append(p.failure, fmt.Sprintf("%s%s: %d %s %v", at, path, code, body, err))
					p.mu.Unlock()
				}
			}
		})
	}
	return p
}

func (p *probes) noFailures(t *testing.T) {
	t.Helper()
	close(p.done)
	p.wait.Wait()
	t.Logf("%d probes", p.asked.Load())
	if len(p.failure) > 0 {
		t.Errorf("%d of %d probes failed, the first: %s", len(p.failure), p.asked.Load(), p.failure[0])
	}
}

// reloadWorld has a Service with a health check node port.
func reloadWorld(t *testing.T) *harness.World {
	t.Helper()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	s := harness.Service("s", 1, harness.Policies("Cluster", "Local"), func(s *v1.Service) { s.Spec.HealthCheckNodePort = 32100 })
	w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a", "n2a")...)...)
	return w
}

// healthCheckAt is at a primary address of node1, where health check node ports listen in every mode by default.
var healthCheckAt = netip.MustParseAddrPort("192.168.77.11:32100")

// TestBadConfigurations: a configuration file that comes to hold what is wrong, or can't run on this node, changes nothing: no
// request fails, the node stays healthy and ready, and its health check node ports answer; the log and a metric say what is wrong
// until it is mended. The process is not started again.
func TestBadConfigurations(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := reloadWorld(t)
		busy := netip.MustParseAddrPort("127.0.0.1:7777")
		require.NoError(t, w.ServeTCP(w.Node1().Netns, "busy", busy))
		c := runConfigured(t, w, variant)
		loads := []*harness.Load{
			w.Client.StartLoad("tcp", nodePort(w.Node1().IP4, 1), 2, 3*time.Millisecond),
			w.Pod("n1c").StartLoad("tcp", clusterIP(1, 6), 2, 3*time.Millisecond),
		}
		health := probe(w, harness.HealthAddr, "/healthz", "/livez", "/readyz")
		checks := probe(w, healthCheckAt, "/")
		rejected := func(want string) func() error {
			return func() error {
				if got := w.Node1().Scrape(t).Sum("nodeproxy_config_rejected"); fmt.Sprint(got) != want {
					return fmt.Errorf("nodeproxy_config_rejected is %v, want %s", got, want)
				}
				return nil
			}
		}
		before := held(t, w, variant)
		for _, tc := range []struct{ name, text, says string }{
			{"cut short", good()[:40], "apiVersion"},
			{"emptied", "", "the file is empty"},
			{"no YAML", good() + section() + ": {", "broken YAML"},
			{"wrong type", good() + section() + ": {masqueradeBit: many}\n", ":4: " + section() + ".masqueradeBit"},
			{"wrong value", good() + "nodePortAddresses: [10.0.0.0/99]\n", ":4: nodePortAddresses"},
			{"unknown mode", configHeader + "mode: ebpf\n", ":3: mode"},
			{"misspelt gate", good() + "featureGates: {AllowServiceExternalIP: false}\n", "AllowServiceExternalIPs"},
			{"mode that can't work", configHeader + "mode: ipvs\nipvs: {scheduler: nosuch}\n", "mode ipvs can't work here"},
			{"busy port", good() + "bindAddressHardFail: true\nmetricsBindAddress: " + busy.String() + "\n", busy.String()},
		} {
			line := len(c.Log())
			c.write(t, tc.text)
			if err := c.WaitForAfter(line, harness.Limit, "level=ERROR", "the former configuration stays in force", tc.says); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			eventually(t, tc.name+" is counted", rejected("1"))
			c.write(t, good())
			eventually(t, tc.name+" is mended", rejected("0"))
		}
		require.NoError(t, os.Remove(c.file))
		eventually(t, "the file is gone", rejected("1"))
		c.write(t, good())
		eventually(t, "the file is back", rejected("0"))
		if now := held(t, w, variant); now != before {
			t.Errorf("what the kernel has is not the same:\n%s", firstDifference(before, now))
		}
		noFailures(t, loads...)
		health.noFailures(t)
		checks.noFailures(t)
		if strings.Contains(strings.Join(c.Log(), "\n"), "continuing with this configuration") {
			t.Error("a configuration has taken the place of the first one")
		}
	})
}

// TestNewConfigurations: a configuration that can run takes effect at once, and while it takes the place of the former one no request
// fails, the node stays healthy and ready, and its health check node ports answer.
func TestNewConfigurations(t *testing.T) {
	onEachVariant(t, func(t *testing.T, variant harness.Variant) {
		w := reloadWorld(t)
		c := runConfigured(t, w, variant)
		loads := []*harness.Load{
			w.Client.StartLoad("tcp", nodePort(w.Node1().IP4, 1), 2, 3*time.Millisecond),
			w.Pod("n1c").StartLoad("tcp", clusterIP(1, 6), 2, 3*time.Millisecond),
		}
		health := probe(w, harness.HealthAddr, "/healthz", "/livez", "/readyz")
		checks := probe(w, healthCheckAt, "/")
		moved := netip.MustParseAddrPort("127.0.0.1:7778")
		for i, more := range []string{
			section() + ": {masqueradeAll: true}\n",
			section() + ": {syncPeriod: 10s, minSyncPeriod: 10ms}\nipvs: {syncPeriod: 10s, minSyncPeriod: 10ms}\n",
			"metricsBindAddress: " + moved.String() + "\n",
			"",
			"bindAddressHardFail: true\nenableProfiling: true\n",
			section() + ": {masqueradeBit: 12}\n",
			"",
		} {
			line := len(c.Log())
			c.write(t, good()+more)
			eventually(t, fmt.Sprintf("%q is in force", more), func() error {
				_, after, _ := strings.Cut(strings.Join(c.Log()[line:], "\n"), "continuing with this configuration")
				if !strings.Contains(after, "level=INFO "+harness.InSync) {
					return errors.New("it is not in sync")
				}
				return nil
			})
			if code, _, err := w.Node1().Get(moved, "/metrics"); (err == nil && code == 200) != (i == 2) {
				t.Errorf("%q: at %s: %d, %v", more, moved, code, err)
			}
		}
		checks.noFailures(t)
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1b")...)...)
		eventually(t, "objects are followed", func() error { return serversOf(w.Client, "tcp", clusterIP(1, 4), "n1b") })
		noFailures(t, loads...)
		health.noFailures(t)
	})
}
