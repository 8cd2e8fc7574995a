package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

// pageCommands are the commands of docs/install/KIND.md by section, in their order, without the comments behind them.
func pageCommands(t *testing.T, kind string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "install", kind+".md"))
	if err != nil {
		t.Fatal(err)
	}
	out, section := map[string][]string{}, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			section = heading
		}
		if code, ok := strings.CutPrefix(line, "    "); ok {
			code, _, _ = strings.Cut(code, " #")
			out[section] = append(out[section], strings.TrimSpace(code))
		}
	}
	return out
}

var pageSections = []string{"Install", "Check", "Roll back", "Uninstall"}

// TestInstallPages runs the nodeproxy install of each page on the objects of such a cluster. What kubectl takes from a file, an earlier command
// has written there.
func TestInstallPages(t *testing.T) {
	t.Parallel()
	for page, cluster := range map[string]string{
		"kubeadm": "kubeadm", "kind": "kubeadm", "minikube": "kubeadm", "k3s": "k3s", "eks": "eks", "talos": "talos", "aks": "aks",
	} {
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			commands := pageCommands(t, page)
			files := map[string][]byte{}
			for _, section := range pageSections {
				if len(commands[section]) == 0 {
					t.Errorf("there is nothing to %s", section)
				}
				for _, command := range commands[section] {
					runPageCommand(t, files, command, filepath.Join("..", "..", "install", "testdata", cluster+".yaml"))
				}
			}
		})
	}
}

func runPageCommand(t *testing.T, files map[string][]byte, command, cluster string) {
	t.Helper()
	words := strings.Fields(command)
	switch words[0] {
	case "nodeproxy":
		i := slices.Index(words, ">")
		if words[1] != "install" || i < 0 {
			t.Fatalf("%s: it is not nodeproxy install to a file", command)
		}
		args := append(slices.Clone(words[1:i]), "--filename="+cluster)
		for n := range args {
			args[n] = strings.NewReplacer("API-SERVER", "10.0.0.9").Replace(args[n])
		}
		out, err := inProcess(args...)
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		files[words[i+1]] = out
		if strings.HasSuffix(words[i+1], ".json") {
			var ops []map[string]any
			if err := json.Unmarshal(out, &ops); err != nil {
				t.Errorf("%s: %v", command, err)
			}
			return
		}
		objects := 0
		for docs := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(out), 4096); ; objects++ {
			var o struct{ Kind string }
			if err := docs.Decode(&o); errors.Is(err, io.EOF) {
				break
			} else if err != nil || o.Kind == "" {
				t.Fatalf("%s: object %d: %+v, %v", command, objects, o, err)
			}
		}
		if objects == 0 || bytes.Contains(out, []byte("localhost/nodeproxy")) {
			t.Errorf("%s: %d objects, or an image other than --image says:\n%s", command, objects, out)
		}
	case "kubectl":
		for n, w := range words {
			file, ok := strings.CutPrefix(w, "--patch-file=")
			if w == "-f" {
				file, ok = words[n+1], true
			}
			if ok && files[file] == nil {
				t.Errorf("%s: no command before has written %s", command, file)
			}
		}
	case "aws", "az", "talosctl", "systemctl", "mkdir", "rm", "echo":
	default:
		t.Errorf("%s: what is this?", command)
	}
}

// inProcess runs a command of nodeproxy and returns what it printed.
func inProcess(args ...string) ([]byte, error) {
	cmd := root()
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	err := cmd.Execute()
	return out.Bytes(), err
}

// TestInstallPrintable: what a Node says of itself, or a DaemonSet of its flags, neither gets to the terminal as an escape sequence nor adds a line.
func TestInstallPrintable(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "install", "testdata", "talos.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	const evil = `\e[2J\e]0;title\a\nAPI server: 192.0.2.1:443`
	for _, replacement := range [][2]string{
		{"Talos (v1.13.0)", `"Talos ` + evil + `"`}, {"- --proxy-mode=nftables", `- "--novelty=` + evil + `"`},
	} {
		if !strings.Contains(string(text), replacement[0]) {
			t.Fatalf("talos.yaml has no %q", replacement[0])
		}
		cmd := root()
		var out, said bytes.Buffer
		cmd.SetArgs([]string{"install", "--filename=-"})
		cmd.SetIn(strings.NewReader(strings.ReplaceAll(string(text), replacement[0], replacement[1])))
		cmd.SetOut(&out)
		cmd.SetErr(&said)
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(said.String(), `\x1b[2J\x1b]0;title\a\nAPI server: 192.0.2.1`) || strings.ContainsAny(said.String(), "\x1b\a\r") ||
			strings.Contains(said.String(), "\nAPI server: 192.0.2.1") {
			t.Errorf("%s: it says\n%q", replacement[0], &said)
		}
	}
}

// TestInstallPagesAgree: where kube-proxy is a DaemonSet that can be patched, the commands are the same, but for those of the distribution.
func TestInstallPagesAgree(t *testing.T) {
	t.Parallel()
	want := pageCommands(t, "kubeadm")
	for _, page := range []string{"kind", "minikube", "eks", "talos"} {
		got := pageCommands(t, page)
		for section, commands := range got {
			got[section] = slices.DeleteFunc(commands, func(c string) bool { return strings.HasPrefix(c, "aws ") || strings.HasPrefix(c, "talosctl ") })
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s.md has the commands\n%q\nwant those of kubeadm.md:\n%q", page, got, want)
		}
	}
	index, err := os.ReadFile("../../docs/install/README.md")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob("../../docs/install/*.md")
	if err != nil || len(pages) < 10 {
		t.Fatalf("%q, %v", pages, err)
	}
	for _, page := range pages {
		if name := filepath.Base(page); name != "README.md" && !bytes.Contains(index, []byte("("+name+")")) {
			t.Errorf("README.md does not lead to %s", name)
		}
	}
}

// TestUnit: the unit for systemd starts nodeproxy with flags that it has, and the page without an orchestrator does what the unit wants.
func TestUnit(t *testing.T) {
	t.Parallel()
	unit, err := os.ReadFile("../../deploy/systemd/nodeproxy.service")
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(unit), "\nExecStart=")
	line, _, _ = strings.Cut(line, "\n")
	words := strings.Fields(line)
	if len(words) < 3 || words[1] != "run" {
		t.Fatalf("ExecStart=%s", line)
	}
	run, _, err := root().Find(words[1:2])
	if err != nil {
		t.Fatal(err)
	}
	if err := run.ParseFlags(words[2:]); err != nil {
		t.Errorf("ExecStart=%s: %v", line, err)
	}
	page := strings.Join(pageCommands(t, "bare-metal")["Install"], "\n")
	for _, path := range []string{words[0], run.Flag("config").Value.String(), run.Flag("manifests").Value.String()} {
		if !strings.Contains(page, path) {
			t.Errorf("the page does not make %s", path)
		}
	}
	if text, err := inProcess("config", "--mode=nftables"); err != nil || !bytes.Contains(text, []byte("mode: nftables")) {
		t.Errorf("config --mode=nftables: %v\n%s", err, text)
	}
}
