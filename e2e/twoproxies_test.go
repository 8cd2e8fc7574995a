package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// waits is what a daemon logs that waits for another one.
func waits(other *harness.Daemon) []string {
	return []string{"another proxy runs here", fmt.Sprintf("nodeproxy (process %d)", other.PID())}
}

// TestTwoProxies: of two daemons in one network namespace, with one configuration, the second one writes nothing as long as the
// first one runs. It takes over as soon as that one is gone, without a failed request, and gets its addresses.
func TestTwoProxies(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		s := harness.Service("s", 1)
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1a")...)...)
		file := filepath.Join(t.TempDir(), "config.yaml")
		configure := func(masquerade bool) {
			t.Helper()
			text := fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+
				"%s:\n  masqueradeAll: %v\n", section(), masquerade)
			require.NoError(t, os.WriteFile(file+".new", []byte(text), 0o644))
			require.NoError(t, os.Rename(file+".new", file))
		}
		configure(false)
		flags := []string{"--iptables-backend=" + string(variant), "--ipvs-vips=" + string(harness.VIPsWith(variant)), clusterCIDR}
		first := w.Run(t, variant, clusterCIDR)
		loads := []*harness.Load{
			w.Client.StartLoad("tcp", nodePort(w.Node1().IP(4), 1), 2, 3*time.Millisecond),
			w.Pod("n1c").StartLoad("tcp", clusterIP(1, 6), 2, 3*time.Millisecond),
		}
		before := held(t, w, variant)
		second, err := w.StartDaemon(w.Node1(), append(flags, "--config="+file)...)
		require.NoError(t, err)
		require.NoError(t, second.WaitFor(harness.Limit, waits(first)...))

		// Neither a new configuration nor one that goes ends the wait.
		configure(true)
		require.NoError(t, second.WaitFor(harness.Limit, "the configuration file has changed"))
		line := len(second.Log())
		configure(false)
		require.NoError(t, second.WaitForAfter(line, harness.Limit, waits(first)...))
		third, err := w.StartDaemon(w.Node1(), flags...)
		require.NoError(t, err)
		require.NoError(t, third.WaitFor(harness.Limit, waits(first)...))
		require.NoError(t, third.Stop())
		if now := held(t, w, variant); now != before {
			t.Errorf("one that waits has changed something:\n%s", firstDifference(before, now))
		}
		// Only the first one follows the objects, and answers.
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1b")...)...)
		eventually(t, "the first one follows", func() error { return serversOf(w.Client, "tcp", clusterIP(1, 4), "n1b") })
		eventually(t, "the first one is ready", ready(w, "10256"))

		require.NoError(t, first.Kill())
		killed := time.Now()
		require.NoError(t, second.WaitFor(harness.Limit, harness.InSync))
		t.Logf("in sync %v after the end of the first one", time.Since(killed).Round(time.Millisecond))
		w.Write(t, "s.yaml", harness.Objects(s, w.Ready("n1c")...)...)
		eventually(t, "the second one follows", func() error { return serversOf(w.Client, "tcp", clusterIP(1, 4), "n1c") })
		eventually(t, "the second one is ready", ready(w, "10256"))

		// A new configuration in place does not let it wait for itself.
		line = len(second.Log())
		configure(true)
		require.NoError(t, second.WaitForAfter(line, harness.StartupTimeout, harness.InSync))
		more(t, aWhile, loads...)
		noFailures(t, loads...)
	})
}

// ready returns a check that node1 answers at /readyz of a port that it is ready.
func ready(w *harness.World, port string) func() error {
	return func() error {
		answer, err := w.Node1().Output("curl", "-s", "http://127.0.0.1:"+port+"/readyz")
		if err == nil && !strings.Contains(answer, `"ready":true`) {
			err = fmt.Errorf("/readyz: %s", answer)
		}
		return err
	}
}

// TestWaitEnds: a daemon that waits answers that it lives and is not ready, and why, where it can be reached; its end is a clean
// one. One that is to take over goes ahead at once, and the next one waits for it.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	variant := harness.NFT
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
	first := w.Run(t, variant, clusterCIDR, "--healthz-bind-address=127.0.0.1:10256")
	flags := []string{"--iptables-backend=" + string(variant), "--healthz-bind-address=127.0.0.1:10266",
		"--metrics-bind-address=127.0.0.1:10259", clusterCIDR}
	second, err := w.StartDaemon(w.Node1(), flags...)
	require.NoError(t, err)
	require.NoError(t, second.WaitFor(harness.Limit, waits(first)...))
	for _, want := range [][2]string{
		{"10266/livez", "\n200"}, {"10266/healthz", "\n503"}, {"10266/readyz", "\n503"},
		{"10266/readyz", fmt.Sprintf(`"nothing is written before this is gone: nodeproxy (process %d)"`, first.PID())},
		{"10259/metrics", "\nnodeproxy_waiting_for_proxy 1\n"},
	} {
		eventually(t, "a daemon that waits answers", func() error {
			answer, err := w.Node1().Output("curl", "-s", "-w", "\n%{http_code}", "http://127.0.0.1:"+want[0])
			if err == nil && !strings.Contains(answer, want[1]) {
				err = fmt.Errorf("%s: %s, want %q", want[0], answer, want[1])
			}
			return err
		})
	}
	require.NoError(t, second.Stop())
	// Where an address of the first one is in the way of one for all addresses, the others are listened at.
	second, err = w.StartDaemon(w.Node1(), "--iptables-backend="+string(variant), clusterCIDR)
	require.NoError(t, err)
	require.NoError(t, second.WaitFor(harness.Limit, waits(first)...))
	for _, host := range []string{w.Node1().IP4.String(), "[" + w.Node1().IP6.String() + "]"} {
		eventually(t, "a probe of the node's address is answered", func() error {
			answer, err := w.Node1().Output("curl", "-s", "http://"+host+":10256/readyz")
			if err == nil && !strings.Contains(answer, `"condition":"free"`) {
				err = fmt.Errorf("/readyz at %s: %s", host, answer)
			}
			return err
		})
	}
	require.NoError(t, second.Stop())

	third := w.Run(t, variant, append(flags, "--take-over")...)
	require.NoError(t, third.WaitFor(harness.Limit, "going ahead, as --take-over asks", fmt.Sprintf("nodeproxy (process %d)", first.PID())))
	require.NoError(t, first.Stop())
	eventually(t, "the claim of the first one is taken", func() error {
		sockets, err := w.Node1().Output("cat", "/proc/net/unix")
		if err == nil && !strings.Contains(sockets, " @nodeproxy\n") {
			err = errors.New("nobody has it")
		}
		return err
	})
	fourth, err := w.StartDaemon(w.Node1(), "--iptables-backend="+string(variant), clusterCIDR)
	require.NoError(t, err)
	require.NoError(t, fourth.WaitFor(harness.Limit, waits(third)...))
	require.NoError(t, third.Stop())
	require.NoError(t, fourth.WaitFor(harness.StartupTimeout, harness.InSync))
	eventually(t, "the metric falls", func() error {
		answer, err := w.Node1().Output("curl", "-s", "http://127.0.0.1:10249/metrics")
		if err == nil && !strings.Contains(answer, "\nnodeproxy_waiting_for_proxy 0\n") {
			err = fmt.Errorf("/metrics: %.300s", answer)
		}
		return err
	})
}

// TestOtherProxyStarts: a daemon tells of a kube-proxy that starts beside it, and of its end; not of a nodeproxy that waits.
func TestOtherProxyStarts(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n1a")...)...)
	first := w.Run(t, harness.NFT, clusterCIDR)
	ip := w.Node1().IP4.String()
	second, err := w.StartDaemon(w.Node1(), "--iptables-backend=nft", "--healthz-bind-address="+ip+":10266",
		"--metrics-bind-address="+ip+":10249", clusterCIDR)
	require.NoError(t, err)
	require.NoError(t, second.WaitFor(harness.Limit, waits(first)...))

	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "kube-proxy")
	require.NoError(t, os.Symlink(sleep, path))
	kubeProxy := exec.Command(path, "600")
	require.NoError(t, w.Node1().Start(kubeProxy))
	t.Cleanup(func() { _ = kubeProxy.Process.Kill(); _ = kubeProxy.Wait() })
	require.NoError(t, first.WaitFor(harness.Limit, "another proxy runs beside this one", fmt.Sprintf("kube-proxy (process %d)", kubeProxy.Process.Pid)))
	metric := func(want string) func() error {
		return func() error {
			answer, err := w.Node1().Output("curl", "-s", "http://127.0.0.1:10249/metrics")
			if err == nil && !strings.Contains(answer, "\nnodeproxy_other_proxy_runs "+want+"\n") {
				err = fmt.Errorf("nodeproxy_other_proxy_runs is not %s", want)
			}
			return err
		}
	}
	eventually(t, "the metric says so", metric("1"))
	require.NoError(t, kubeProxy.Process.Kill())
	require.NoError(t, first.WaitFor(harness.Limit, "the other proxy is gone"))
	eventually(t, "the metric falls", metric("0"))
	for _, line := range first.Log() {
		if strings.Contains(line, fmt.Sprintf("process %d", second.PID())) {
			t.Errorf("a nodeproxy that waits is taken for a proxy: %s", line)
		}
	}
	require.NoError(t, second.Stop())
}
