package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/inspect"
	"nodeproxy/internal/nstest"
)

// TestHistoryDaemon: a running nodeproxy tells why each sync was made, what changed, and what another program had changed.
func TestHistoryDaemon(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	a := newAsked(t)
	a.says(1, "history", "no nodeproxy answers at "+a.socket)
	a.write(inspectedService)
	a.start()
	eventually(t, "the first sync is there", func() bool { return len(a.history("web")) == 1 })
	first := a.history("")[0]
	if why(first) != "start" || !first.Everything || first.ServicePorts.Added != 1 || first.Endpoints.Added != 1 || first.Took.Write <= 0 ||
		first.In.Services != 1 || first.In.EndpointSlices != 1 || first.Written["rule"] == 0 || first.Written["chain"] == 0 {
		t.Errorf("the first sync: %+v", first)
	}
	a.write(strings.Replace(inspectedService, "10.244.1.5", "10.244.1.6", 1))
	eventually(t, "the change is there", func() bool { return len(a.history("web")) == 2 })
	change := a.history("web")[1]
	if why(change) != "change" || change.Everything || change.Endpoints != (inspect.Counts{Added: 1, Removed: 1}) ||
		change.Services[0] != (inspect.ServiceChange{Namespace: "default", Name: "web", Change: "changed", Ports: 1, EndpointsAdded: 1, EndpointsRemoved: 1}) {
		t.Errorf("the change: %+v", change)
	}
	a.says(0, "history none", "No sync that is still known has changed Service default/none.")
	nstest.Exec(t, "iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES")
	eventually(t, "the damage is in the history", func() bool {
		for _, s := range a.history("") {
			if s.Drift > 0 && strings.Contains(s.DriftDetail, "KUBE-SERVICES") && why(s) == "drift" && s.Suspicion != "" {
				return true
			}
		}
		return false
	})
	a.says(0, "history -o wide", " changed by another program: ", "repaired: ", "default/web (new)")
}

func why(s inspect.Sync) string {
	var out []string
	for _, r := range s.Reasons {
		out = append(out, string(r))
	}
	return strings.Join(out, ",")
}

// TestStatusDaemon: the status of a running nodeproxy says that all is well as long as it is, and otherwise what is wrong.
func TestStatusDaemon(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	a := newAsked(t)
	a.write(inspectedService)
	a.start()
	var text string
	eventually(t, "all is well", func() bool {
		var code int
		text, code = a.ask("status")
		return code == 0
	})
	has(t, text, "Program      nodeproxy/", "Mode         iptables (nft), IPv4", "Ready        yes", "In sync      for ",
		"Objects      1 Service, 1 ServicePort, 1 endpoint in use", "Source       "+a.manifests()+", current", "why: ", "Nothing is wrong.")
	a.write(inspectedService + "---\n{")
	eventually(t, "a manifest is broken", func() bool {
		text, code := a.ask("status", "-o", "json")
		var s inspect.Status
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		return code == 1 && !s.Ready && len(s.Missing) == 1 && s.Missing[0].Condition == "whole" && len(s.Wrong) > 0 && s.InSync
	})
}

// TestStatusFromOutside: where no nodeproxy answers by its socket, status says what can be seen, and what to do.
func TestStatusFromOutside(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	a := newAsked(t)
	a.says(1, "status", "There is no answer: no nodeproxy answers at "+a.socket,
		"Nobody answers about the health of a proxy at 127.0.0.1:10256: ", "What to do:")
	proc := t.TempDir()
	for pid, name := range map[string]string{"7": "kube-proxy", "8": "bash"} {
		require.NoError(t, os.MkdirAll(filepath.Join(proc, pid), 0o755))
		writeFile(t, filepath.Join(proc, pid, "comm"), name+"\n")
	}
	if got := proxies(proc); len(got) != 1 || got[0] != "7 (kube-proxy)" {
		t.Errorf("processes: %q", got)
	}
	// One that answers at another socket, and is not ready.
	writeFile(t, filepath.Join(a.manifests(), "broken.yaml"), "{")
	file := filepath.Join(a.dir, "config.yaml")
	writeFile(t, file, "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nhealthzBindAddress: 0.0.0.0:10256\n")
	a.start("--socket=", "--healthz-bind-address=127.0.0.1:10256")
	for _, args := range [][]string{{"status"}, {"status", "--config=" + file}, {"status", "--healthz-bind-address=127.0.0.1:10256"}} {
		eventually(t, "its health says what is missing", func() bool {
			text, code := a.ask(args...)
			return code == 1 && strings.Contains(text, "At 127.0.0.1:10256 answers nodeproxy/") && strings.Contains(text, "It is not ready (whole): ")
		})
	}
	for _, elsewhere := range []string{"127.0.0.1:10257", "[::]:10257"} {
		a.says(1, "status --healthz-bind-address="+elsewhere, "Nobody answers about the health of a proxy at ")
	}
	a.says(1, "status --healthz-bind-address=", "has no address at which to ask about health")
	a.says(2, "status --healthz-bind-address=nonsense")
}

// TestSupport: a bug report has the state of a running nodeproxy, nothing secret, and can only be read by its owner; without a nodeproxy, it
// has what can be seen.
func TestSupport(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	a := newAsked(t)
	a.write(strings.Replace(inspectedService, "{name: web}", "{name: web, annotations: {note: hush-hush}}", 1))
	read := func(file string) map[string]string {
		t.Helper()
		info, err := os.Stat(file)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("%v, %v", info, err)
		}
		f, err := os.Open(file)
		require.NoError(t, err)
		defer f.Close()
		z, err := gzip.NewReader(f)
		require.NoError(t, err)
		out := map[string]string{}
		for r := tar.NewReader(z); ; {
			h, err := r.Next()
			if err == io.EOF {
				return out
			}
			require.NoError(t, err)
			text, err := io.ReadAll(r)
			require.NoError(t, err)
			out[strings.TrimPrefix(h.Name, "nodeproxy-support/")] = string(text)
		}
	}
	without := filepath.Join(a.dir, "without.tar.gz")
	a.says(0, "support -o "+without, "  status.txt\n", "Written to "+without)
	if got := read(without); !strings.Contains(got["status.txt"], "no nodeproxy answers") || !strings.Contains(got["system.txt"], "== /proc/version\nLinux") || got["log.txt"] != "" {
		t.Errorf("without a nodeproxy: %q", got)
	}
	a.start()
	eventually(t, "web is programmed", func() bool { return len(a.history("web")) == 1 })
	with := filepath.Join(a.dir, "with.tar.gz")
	a.says(0, "support -o "+with)
	got := read(with)
	for file, want := range map[string]string{
		"status.txt": "Mode         iptables (nft)", "services.json": `"name": "web"`, "findings.json": "[", "history.json": `"start"`, "config.json": "mode",
		"metrics.txt": "nodeproxy_build_info", "log.txt": "in sync: the first sync", "iptables-nft.txt": "default/web", "version.txt": "\n",
	} {
		has(t, got[file], want)
	}
	for _, text := range got {
		lacks(t, text, "hush-hush")
	}
	out, err := exec.Command("nodeproxy", "support", "-o", "-", "--socket="+a.socket).Output()
	if z, zipErr := gzip.NewReader(bytes.NewReader(out)); err != nil || zipErr != nil {
		t.Errorf("to standard output: %v, %v", err, zipErr)
	} else if h, err := tar.NewReader(z).Next(); err != nil || h.Name != "nodeproxy-support/version.txt" {
		t.Errorf("to standard output: %+v, %v", h, err)
	}
	hashed := filepath.Join(a.dir, "hashed.tar.gz")
	a.says(0, "support --hash-names -o "+hashed, "names and addresses are replaced by hashes")
	for file, text := range read(hashed) {
		if strings.HasSuffix(file, ".json") && !json.Valid([]byte(text)) {
			t.Errorf("with hashes, %s is no JSON", file)
		}
		lacks(t, text, "default/web", `"web"`, "10.96.0.10", "10.244.1.5")
	}
	a.says(1, "support -o /sys/report.tar.gz", "-o - writes the archive to standard output")
	a.says(1, "support -o "+with, "file exists")
}

// TestLogTail: the log that is kept is bounded, and consists of whole lines, the last ones.
func TestLogTail(t *testing.T) {
	t.Parallel()
	l := &logTail{}
	for i := range 100000 {
		fmt.Fprintf(l, "line %d\n", i)
	}
	text := l.String()
	if len(text) > logKept || len(text) < logKept/2 || !strings.HasPrefix(text, "line ") || !strings.HasSuffix(text, "\nline 99999\n") {
		t.Errorf("%d bytes: %.20q", len(text), text)
	}
}
