package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"nodeproxy/config"
	"nodeproxy/internal/nstest"
	"nodeproxy/metrics"
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
	runs := func() float64 {
		t.Helper()
		families, err := set.Gatherer().Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "nodeproxy_other_proxy_runs" {
				return f.GetMetric()[0].GetGauge().GetValue()
			}
		}
		t.Fatal("there is no metric of it")
		return 0
	}

	other := fakeKubeProxy(t)
	d.watchOthers(looked, &claim{forced: true}, 0)
	d.cfg.TakeOver = true
	d.watchOthers(looked, &claim{}, 0)
	if log.Len() > 0 || events != nil || runs() != 0 {
		t.Errorf("with --take-over, metric %v, events %q, log: %s", runs(), events, log)
	}

	d.cfg.TakeOver = false
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	d.event = func(reason, _, text string) {
		events = append(events, reason+": "+text)
		if runs() != 1 {
			t.Errorf("the metric is %v, want 1", runs())
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
	if runs() != 0 || strings.Count(log.String(), "level=WARN") != 2 || strings.Count(log.String(), who) != 1 {
		t.Errorf("after its end, the metric is %v; log: %s", runs(), log)
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}
