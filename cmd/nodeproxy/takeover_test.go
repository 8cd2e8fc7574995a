package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/config"
	"nodeproxy/internal/nstest"
	"nodeproxy/metrics"
	"nodeproxy/source"
	"nodeproxy/source/apiserver"
	"nodeproxy/source/apiserver/apiservertest"
)

// TestWatchOthers: a proxy that starts after this program has acquired the claim is reported in the log, by an event and by a metric, and
// so is its end; unless that is as it was asked for.
func TestWatchOthers(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	log, events := &strings.Builder{}, []string(nil)
	set := metrics.New(metrics.Config{Mode: "iptables"})
	d := &daemon{cfg: &config.Config{}, metrics: set, log: slog.New(slog.NewTextHandler(log, nil))}
	d.event = func(reason, _, text string) { events = append(events, reason+": "+text) }
	looked, cancel := context.WithCancel(t.Context())
	cancel() // It is looked once all the same.
	runs := func() string { return strings.Join(metric(set, "nodeproxy_other_proxy_runs"), "\n") }

	other := fakeKubeProxy(t)
	d.watchOthers(looked, &claim{forced: true}, 0)
	d.cfg.TakeOver = true
	d.watchOthers(looked, &claim{}, 0)
	if log.Len() > 0 || events != nil || runs() != "0" {
		t.Errorf("with --take-over, metric %q, events %q, log: %s", runs(), events, log)
	}

	d.cfg.TakeOver = false
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d.event = func(reason, _, text string) {
		events = append(events, reason+": "+text)
		if runs() != "1" {
			t.Errorf("the metric is %q, want 1", runs())
		}
		_ = other.Process.Kill()
	}
	d.log = slog.New(slog.NewTextHandler(writer(func(line string) {
		log.WriteString(line)
		if strings.Contains(line, "the other proxy is gone") {
			cancel()
		}
	}), nil))
	d.watchOthers(ctx, &claim{}, 0)
	who := fmt.Sprintf("kube-proxy (process %d)", other.Process.Pid)
	if len(events) != 1 || !strings.HasPrefix(events[0], "OtherProxyRuns: ") || !strings.HasSuffix(events[0], who) {
		t.Errorf("events are %q, want one of reason OtherProxyRuns that names %s", events, who)
	}
	if runs() != "0" || strings.Count(log.String(), "level=WARN") != 2 || strings.Count(log.String(), who) != 1 {
		t.Errorf("after its end, the metric is %q; log: %s", runs(), log)
	}
}

type writer func(line string)

func (w writer) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}

// fakeKubeProxy starts a program of that name, which does nothing, in the network namespace of this thread.
func fakeKubeProxy(t *testing.T) *exec.Cmd {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	path := filepath.Join(t.TempDir(), "kube-proxy")
	if err == nil {
		err = os.Symlink(sleep, path)
	}
	cmd := exec.Command(path, "600")
	nstest.EndWith(t, cmd)
	if err == nil {
		err = cmd.Start()
	}
	require.NoError(t, err)
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

// clientOfFake returns a fake API server, a configuration for it, and a client of it.
func clientOfFake(t *testing.T) (*apiservertest.Server, *config.Config, *apiserver.Client) {
	t.Helper()
	server := apiservertest.New(t)
	cfg := &config.Config{NodeName: "n1"}
	cfg.API.Master, cfg.API.AcceptContentTypes, cfg.API.QPS = server.URL, "application/json", -1
	client, err := newClient(cfg, nil)
	require.NoError(t, err)
	return server, cfg, client
}

// TestWatchDaemonSet: as long as kube-proxy's DaemonSet wants this node, a finding, one event and the status say so, and what to do; without the
// right to read it, nothing does.
func TestWatchDaemonSet(t *testing.T) {
	t.Parallel()
	server, cfg, client := clientOfFake(t)
	lines := make(chan string, 100)
	log := slog.New(slog.NewTextHandler(writer(func(line string) { lines <- line }), &slog.HandlerOptions{Level: slog.LevelDebug}))
	reports := make(chan source.Finding, 100)
	d := &daemon{cfg: cfg, client: client, log: log, report: func(f source.Finding) { reports <- f }}
	const kubeProxy = `{"spec": {"template": {"spec": {"containers": [{"name": "kube-proxy"}], "nodeSelector": {"os": %q}}}}}`
	node := &v1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
	node.Name, node.Labels = "n1", map[string]string{"os": "linux"}
	server.ServeObject("/api/v1/nodes/n1", node)
	server.ServeObject(apiserver.KubeProxyPath, http.StatusForbidden)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { d.watchDaemonSet(ctx, time.Millisecond) })
	defer running.Wait()
	defer cancel()

	if line := <-lines; !strings.Contains(line, "level=DEBUG") || !strings.Contains(line, "it is not known whether") {
		t.Errorf("without the right: %s", line)
	}
	server.ServeObject(apiserver.KubeProxyPath, json.RawMessage(fmt.Sprintf(kubeProxy, "linux")))
	f := <-reports
	const want = `DaemonSet kube-system/kube-proxy: it selects this node, as after "kubeadm upgrade", and kube-proxy gets the place of nodeproxy's pod when ` +
		"that is next replaced; keep it off: nodeproxy install -o kube-proxy-off > off.json; kubectl -n kube-system patch daemonset kube-proxy --type=json --patch-file=off.json"
	if f.String() != want || f.Event != "KubeProxyWantsNode" || f.Severity != source.Problem {
		t.Errorf("got %q, event %q, severity %v; want %q", f, f.Event, f.Severity, want)
	}
	if labelled := daemonSetFinding(map[string]string{"service-proxy": "nodeproxy"}); !strings.Contains(labelled.Effect, "install --migrate -o kube-proxy-off") {
		t.Errorf("while nodes are switched over: %s", labelled)
	}
	if list := d.neighbours.all(); len(list) != 1 || list[0].What != want || !list[0].Problem || len(d.lasting.all()) != 1 {
		t.Errorf("neighbours %+v, findings %v", list, d.lasting.all())
	}
	server.ServeObject(apiserver.KubeProxyPath, json.RawMessage(fmt.Sprintf(kubeProxy, "windows")))
	if line := <-lines; !strings.Contains(line, "does not want this node any more") {
		t.Errorf("the next line of the log: %s", line)
	}
	if len(d.neighbours.all()) > 0 || len(d.lasting.all()) > 0 || len(reports) > 0 || len(lines) > 0 {
		t.Errorf("afterwards: neighbours %v, findings %v, %d more reports, %d more lines", d.neighbours.all(), d.lasting.all(), len(reports), len(lines))
	}
}

// TestOtherHasTables: nothing is handed over where a kube-proxy runs that has tables already.
func TestOtherHasTables(t *testing.T) {
	nstest.Enter(t)
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	program, err := os.ReadFile(sleep)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "kube-proxy")
	require.NoError(t, os.WriteFile(path, program, 0o755))
	kubeProxy := exec.Command(path, "600")
	require.NoError(t, kubeProxy.Start())
	end := sync.OnceFunc(func() {
		_ = kubeProxy.Process.Kill()
		_ = kubeProxy.Wait()
	})
	defer end()
	d := &daemon{cfg: &config.Config{}, log: slog.New(slog.DiscardHandler)}
	if other := d.other(); other != nil {
		t.Errorf("without tables: %s", other)
	}
	nstest.Exec(t, "nft", "add", "table", "ip6", "kube-proxy")
	if other := d.other(); other == nil || other.PID != kubeProxy.Process.Pid {
		t.Errorf("with a table: %v", other)
	}
	end()
	if other := d.other(); other != nil {
		t.Errorf("at its end: %s", other)
	}
}

// TestComesBack: an end is only a restart where kube-proxy's DaemonSet is there, and does not want the node.
func TestComesBack(t *testing.T) {
	t.Parallel()
	server, cfg, client := clientOfFake(t)
	node := &v1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
	node.Name, node.Labels = "n1", map[string]string{"os": "linux"}
	server.ServeObject("/api/v1/nodes/n1", node)
	kubeProxy := func(os string) json.RawMessage {
		return json.RawMessage(`{"spec": {"template": {"spec": {"containers": [{"name": "kube-proxy"}], "nodeSelector": {"os": "` + os + `"}}}}}`)
	}
	for _, tc := range []struct {
		name      string
		daemonSet any
		client    *apiserver.Client
		want      bool
	}{
		{"no API server", nil, nil, false},
		{"no DaemonSet", http.StatusNotFound, client, false},
		{"no right to read it", http.StatusForbidden, client, false},
		{"it wants the node", kubeProxy("linux"), client, false},
		{"it wants others", kubeProxy("windows"), client, true},
	} {
		server.ServeObject(apiserver.KubeProxyPath, tc.daemonSet)
		d := &daemon{cfg: cfg, client: tc.client}
		if got := d.comesBack(); got != tc.want {
			t.Errorf("%s: comes back: %t, want %t", tc.name, got, tc.want)
		}
	}
}
