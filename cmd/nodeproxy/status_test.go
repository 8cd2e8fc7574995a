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

	"nodeproxy/inspect"
	"nodeproxy/internal/nstest"
)

// TestHistoryDaemon: a running nodeproxy tells why each sync was made, what changed, and what another program had changed.
func TestHistoryDaemon(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	a := newAsked(t)
	if text, code := a.ask("history"); code != 1 || !strings.Contains(text, "no nodeproxy answers at "+a.socket) {
		t.Errorf("without a daemon: exit code %d, %s", code, text)
	}
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
	if text, code := a.ask("history", "none"); code != 0 || !strings.Contains(text, "No sync that is still known has changed Service default/none.") {
		t.Errorf("another Service: exit code %d, %s", code, text)
	}
	if out, err := exec.Command("iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	eventually(t, "the damage is in the history", func() bool {
		for _, s := range a.history("") {
			if s.Drift > 0 && strings.Contains(s.DriftDetail, "KUBE-SERVICES") && s.Written["rule"] > 0 && why(s) == "drift" && s.Suspicion != "" {
				return true
			}
		}
		return false
	})
	if text, code := a.ask("history", "-o", "wide"); code != 0 || !strings.Contains(text, " changed by another program: ") || !strings.Contains(text, "repaired: ") || !strings.Contains(text, "default/web (new)") {
		t.Errorf("wide: exit code %d, %s", code, text)
	}
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
	for _, want := range []string{"Program      nodeproxy/", "Mode         iptables (nft), IPv4", "Ready        yes", "In sync      for ",
		"Objects      1 Service, 1 ServicePort, 1 endpoint in use", "Source       " + a.manifests() + ", current", "why: ", "Nothing is wrong."} {
		if !strings.Contains(text, want) {
			t.Errorf("there is no %q in\n%s", want, text)
		}
	}
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
	if text, code := a.ask("status"); code != 1 || !strings.Contains(text, "There is no answer: no nodeproxy answers at "+a.socket) ||
		!strings.Contains(text, "Nobody answers about the health of a proxy at 127.0.0.1:10256: ") || !strings.Contains(text, "What to do:") {
		t.Errorf("exit code %d, %s", code, text)
	}
	proc := t.TempDir()
	for pid, name := range map[string]string{"7": "kube-proxy", "8": "bash"} {
		if err := os.MkdirAll(filepath.Join(proc, pid), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, pid, "comm"), []byte(name+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got := proxies(proc); len(got) != 1 || got[0] != "7 (kube-proxy)" {
		t.Errorf("processes: %q", got)
	}
	// One that answers at another socket, and is not ready.
	if err := os.WriteFile(filepath.Join(a.manifests(), "broken.yaml"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(a.dir, "config.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nhealthzBindAddress: 0.0.0.0:10256\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	a.start("--socket=", "--healthz-bind-address=127.0.0.1:10256")
	for _, args := range [][]string{{"status"}, {"status", "--config=" + file}, {"status", "--healthz-bind-address=127.0.0.1:10256"}} {
		eventually(t, "its health says what is missing", func() bool {
			text, code := a.ask(args...)
			return code == 1 && strings.Contains(text, "At 127.0.0.1:10256 answers nodeproxy/") && strings.Contains(text, "It is not ready (whole): ")
		})
	}
	for _, elsewhere := range []string{"127.0.0.1:10257", "[::]:10257"} {
		if text, code := a.ask("status", "--healthz-bind-address="+elsewhere); code != 1 || !strings.Contains(text, "Nobody answers about the health of a proxy at ") {
			t.Errorf("at another port: exit code %d, %s", code, text)
		}
	}
	if text, code := a.ask("status", "--healthz-bind-address="); code != 1 || !strings.Contains(text, "has no address at which to ask about health") {
		t.Errorf("without a port for health: exit code %d, %s", code, text)
	}
	if text, code := a.ask("status", "--healthz-bind-address=nonsense"); code != 2 {
		t.Errorf("a wrong address: exit code %d, %s", code, text)
	}
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
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for r := tar.NewReader(z); ; {
			h, err := r.Next()
			if err == io.EOF {
				return out
			}
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			out[strings.TrimPrefix(h.Name, "nodeproxy-support/")] = string(text)
		}
	}
	without := filepath.Join(a.dir, "without.tar.gz")
	if text, code := a.ask("support", "-o", without); code != 0 || !strings.Contains(text, "  status.txt\n") || !strings.Contains(text, "Written to "+without) {
		t.Errorf("exit code %d, %s", code, text)
	}
	if got := read(without); !strings.Contains(got["status.txt"], "no nodeproxy answers") || !strings.Contains(got["system.txt"], "== /proc/version\nLinux") || got["log.txt"] != "" {
		t.Errorf("without a nodeproxy: %q", got)
	}
	a.start()
	eventually(t, "web is programmed", func() bool { return len(a.history("web")) == 1 })
	with := filepath.Join(a.dir, "with.tar.gz")
	if text, code := a.ask("support", "-o", with); code != 0 {
		t.Errorf("exit code %d, %s", code, text)
	}
	got := read(with)
	for file, want := range map[string]string{
		"status.txt": "Mode         iptables (nft)", "services.json": `"name": "web"`, "findings.json": "[", "history.json": `"start"`, "config.json": "mode",
		"metrics.txt": "nodeproxy_build_info", "log.txt": "in sync: the first sync", "iptables-nft.txt": "default/web", "version.txt": "\n",
	} {
		if !strings.Contains(got[file], want) {
			t.Errorf("%s has no %q: %.2000s", file, want, got[file])
		}
	}
	for file, text := range got {
		if strings.Contains(text, "hush-hush") {
			t.Errorf("%s has an annotation", file)
		}
	}
	out, err := exec.Command("nodeproxy", "support", "-o", "-", "--socket="+a.socket).Output()
	if z, zipErr := gzip.NewReader(bytes.NewReader(out)); err != nil || zipErr != nil {
		t.Errorf("to standard output: %v, %v", err, zipErr)
	} else if h, err := tar.NewReader(z).Next(); err != nil || h.Name != "nodeproxy-support/version.txt" {
		t.Errorf("to standard output: %+v, %v", h, err)
	}
	hashed := filepath.Join(a.dir, "hashed.tar.gz")
	if text, code := a.ask("support", "--hash-names", "-o", hashed); code != 0 || !strings.Contains(text, "names and addresses are replaced by hashes") {
		t.Errorf("with hashes: exit code %d, %s", code, text)
	}
	for file, text := range read(hashed) {
		if strings.HasSuffix(file, ".json") && !json.Valid([]byte(text)) {
			t.Errorf("with hashes, %s is no JSON", file)
		}
		for _, name := range []string{"default/web", `"web"`, "10.96.0.10", "10.244.1.5"} {
			if strings.Contains(text, name) {
				t.Errorf("with hashes, %s has %s", file, name)
			}
		}
	}
	if text, code := a.ask("support", "-o", "/sys/report.tar.gz"); code != 1 || !strings.Contains(text, "-o - writes the archive to standard output") {
		t.Errorf("where nothing can be written: exit code %d, %s", code, text)
	}
	if text, code := a.ask("support", "-o", with); code != 1 || !strings.Contains(text, "file exists") {
		t.Errorf("over a file that exists: exit code %d, %s", code, text)
	}
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
