package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
	"nodeproxy/source/apiserver/apiservertest"
)

// configFor is a configuration file for the API server of a kubeconfig.
func configFor(kubeconfig string) string {
	return fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n"+
		"clientConnection: {kubeconfig: %q, contentType: application/json}\n", kubeconfig)
}

// curl asks at a URL in the network namespace of this thread. Any other answer than 200 is an error.
func curl(url string, flags ...string) (string, error) {
	out, err := exec.Command("curl", append([]string{"-sf", "--max-time", "5", url}, flags...)...).Output()
	return string(out), err
}

// ready reports whether the nodeproxy of this thread's network namespace is ready.
func ready() bool {
	_, err := curl("http://127.0.0.1:10256/readyz")
	return err == nil
}

// rejected reports whether the metric says that the configuration file holds something else than what is in force.
func rejected(t *testing.T) bool {
	t.Helper()
	text, err := curl("http://127.0.0.1:10249/metrics")
	require.NoError(t, err)
	_, value, found := strings.Cut(text, "\nnodeproxy_config_rejected ")
	if !found {
		t.Fatal("there is no metric nodeproxy_config_rejected")
	}
	return strings.HasPrefix(value, "1\n")
}

// runs reports whether a process has not ended.
func (p *process) runs() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// TestKubeconfigNotThere: a configuration file that comes to name a kubeconfig that is not there changes nothing. It is told of in the
// log, by one event and by a metric, until the file is mended.
func TestKubeconfigNotThere(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	cluster := apiservertest.New(t)
	file := filepath.Join(t.TempDir(), "config.yaml")
	right := configFor(apiservertest.Kubeconfig(t, cluster.URL))
	writeFile(t, file, right)
	p := startProcess(t, nil, "--config="+file)
	eventually(t, "it is ready", ready)

	for _, path := range []string{"healthz", "livez", "readyz"} { // Each tells whose answer it is.
		if out, err := curl("http://127.0.0.1:10256/"+path, "-i"); err != nil || !strings.Contains(out, "\r\nServer: "+program()+"\r\n") ||
			!strings.Contains(out, `"program":"`+program()+`"`) {
			t.Errorf("/%s: %v: %s", path, err, out)
		}
	}

	missing := filepath.Join(t.TempDir(), "missing")
	writeFile(t, file, configFor(missing))
	says := func(text string) bool {
		return strings.Contains(text, missing) && strings.Contains(text, "the former configuration stays in force")
	}
	eventually(t, "an event says what is wrong", func() bool { return slices.ContainsFunc(cluster.Notes("ConfigRejected"), says) })
	eventually(t, "the log says what is wrong", func() bool { return says(p.log.String()) })
	eventually(t, "the metric is 1, and the node is ready", func() bool { return rejected(t) && ready() })

	writeFile(t, file, right)
	eventually(t, "the metric is 0", func() bool { return !rejected(t) })
	if n := len(cluster.Notes("ConfigRejected")); n != 1 || !ready() {
		t.Errorf("%d events, want 1; ready: %t", n, ready())
	}
	if !p.runs() {
		t.Error("the process has ended")
	}
}

// TestFallBack: where the daemon of a new configuration fails although its trial went well, the former configuration is put in force
// again, that is told, and the new one is tried again.
func TestFallBack(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	tools := newFlakyTools(t)
	before := apiservertest.New(t)
	hold := make(chan struct{})
	after := apiservertest.New(t)
	after.Hold(hold, "services", "nodes", "endpointslices", "servicecidrs")
	file := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, file, configFor(apiservertest.Kubeconfig(t, before.URL)))
	p := startProcess(t, []string{"PATH=" + tools.dir + ":" + os.Getenv("PATH")}, "--config="+file, "--iptables-backend=nft")
	eventually(t, "it is ready", ready)
	calls := tools.calls(t)

	writeFile(t, file, configFor(apiservertest.Kubeconfig(t, after.URL)))
	// Each look at the programs asks each of them twice.
	eventually(t, "the trial finds iptables", func() bool { return after.Lists("services") > 0 && tools.calls(t) == calls+2*len(flakyNames) })
	tools.failOnce(t)
	lists := before.Lists("services")
	close(hold)
	eventually(t, "an event says what is wrong", func() bool { // On a busy machine, there is one before, of objects that have not come yet.
		return slices.ContainsFunc(before.Notes("ConfigRejected"), func(note string) bool {
			return strings.Contains(note, "what it says now can't run") && strings.Contains(note, "version")
		})
	})
	eventually(t, "the former configuration reads objects", func() bool { return before.Lists("services") > lists })
	eventually(t, "the new configuration is in force", func() bool { return ready() && !rejected(t) && after.Lists("services") > 1 })
	if !p.runs() {
		t.Error("the process has ended")
	}
}

// flakyTools are a directory with an iptables-nft and an ip6tables-nft that can be made to fail.
type flakyTools struct{ dir string }

var flakyNames = []string{"iptables-nft", "ip6tables-nft"}

func newFlakyTools(t *testing.T) flakyTools {
	t.Helper()
	f := flakyTools{t.TempDir()}
	for _, name := range flakyNames {
		real, err := exec.LookPath(name)
		require.NoError(t, err)
		script := fmt.Sprintf(`if [ "$1" = --version ]; then
	echo asked >>%[1]s.calls
	if rm %[1]s.fail 2>/dev/null; then exit 1; fi
fi
exec %[2]s "$@"
`, filepath.Join(f.dir, name), real)
		nstest.Script(t, filepath.Join(f.dir, name), script)
	}
	return f
}

// calls returns how often the versions were asked for.
func (f flakyTools) calls(t *testing.T) int {
	t.Helper()
	calls := 0
	for _, name := range flakyNames {
		text := readFile(t, filepath.Join(f.dir, name+".calls"))
		calls += strings.Count(text, "\n")
	}
	return calls
}

// failOnce makes the next question for each version fail.
func (f flakyTools) failOnce(t *testing.T) {
	t.Helper()
	for _, name := range flakyNames {
		writeFile(t, filepath.Join(f.dir, name+".fail"), "")
	}
}

// TestNothingChangesWithoutAMode: where the mode can't work on the node, the start ends with an error before it changes the settings
// of connection tracking.
func TestNothingChangesWithoutAMode(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	const setting = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"
	tools := newFlakyTools(t)
	path := []string{"PATH=" + tools.dir + ":" + os.Getenv("PATH")}
	args := []string{"--manifests=" + t.TempDir(), "--iptables-backend=nft", "--conntrack-tcp-timeout-established=77m"}
	before := command(t, "", "cat", setting)
	tools.failOnce(t)
	p := startProcess(t, path, args...)
	<-p.ended
	if p.ProcessState.ExitCode() != 1 || !strings.Contains(p.log.String(), "mode iptables can't work here") {
		t.Errorf("%v: %s", p.ProcessState, p.log)
	}
	if after := command(t, "", "cat", setting); after != before {
		t.Errorf("the setting has changed from %sto %s", before, after)
	}
	startProcess(t, path, args...) // Now the mode can work.
	eventually(t, "the setting is made", func() bool { return command(t, "", "cat", setting) == "4620\n" })
}
