package main

import (
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

// pageCommands are the commands of docs/install/KIND.md by section, in their order, without the comments behind them.
func pageCommands(t *testing.T, kind string) map[string][]string {
	t.Helper()
	text := readFile(t, filepath.Join("..", "..", "docs", "install", kind+".md"))
	out, section := map[string][]string{}, ""
	for line := range strings.Lines(text) {
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
			files := map[string]string{}
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

func runPageCommand(t *testing.T, files map[string]string, command, cluster string) {
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
		out, _, err := inProcess("", args...)
		require.NoError(t, err, "%s", command)
		files[words[i+1]] = out
		if strings.HasSuffix(words[i+1], ".json") {
			var ops []map[string]any
			assert.NoError(t, json.Unmarshal([]byte(out), &ops), "%s", command)
			return
		}
		objects := 0
		for docs := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(out), 4096); ; objects++ {
			var o struct{ Kind string }
			if err := docs.Decode(&o); errors.Is(err, io.EOF) {
				break
			} else if err != nil || o.Kind == "" {
				t.Fatalf("%s: object %d: %+v, %v", command, objects, o, err)
			}
		}
		if objects == 0 || strings.Contains(out, "localhost/nodeproxy") {
			t.Errorf("%s: %d objects, or an image other than --image says:\n%s", command, objects, out)
		}
	case "kubectl":
		for n, w := range words {
			file, ok := strings.CutPrefix(w, "--patch-file=")
			if w == "-f" {
				file, ok = words[n+1], true
			}
			if ok && files[file] == "" {
				t.Errorf("%s: no command before has written %s", command, file)
			}
		}
	case "aws", "az", "talosctl", "systemctl", "mkdir", "rm", "echo":
	default:
		t.Errorf("%s: what is this?", command)
	}
}

// inProcess runs a command of nodeproxy and returns what it prints.
func inProcess(stdin string, args ...string) (stdout, stderr string, err error) {
	cmd := root()
	var out, said strings.Builder
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&said)
	err = cmd.Execute()
	return out.String(), said.String(), err
}

// TestInstallPrintable: what a Node says of itself, or a DaemonSet of its flags, neither gets to the terminal as an escape sequence nor adds a line.
func TestInstallPrintable(t *testing.T) {
	t.Parallel()
	text := readFile(t, filepath.Join("..", "..", "install", "testdata", "talos.yaml"))
	const evil = `\e[2J\e]0;title\a\nAPI server: 192.0.2.1:443`
	for _, replacement := range [][2]string{
		{"Talos (v1.13.0)", `"Talos ` + evil + `"`}, {"- --proxy-mode=nftables", `- "--novelty=` + evil + `"`},
	} {
		if !strings.Contains(text, replacement[0]) {
			t.Fatalf("talos.yaml has no %q", replacement[0])
		}
		_, said, err := inProcess(strings.ReplaceAll(text, replacement[0], replacement[1]), "install", "--filename=-")
		if err != nil || !strings.Contains(said, `\x1b[2J\x1b]0;title\a\nAPI server: 192.0.2.1`) || strings.ContainsAny(said, "\x1b\a\r") ||
			strings.Contains(said, "\nAPI server: 192.0.2.1") {
			t.Errorf("%s: %v; it says\n%q", replacement[0], err, said)
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
}

// TestUnit: the unit for systemd starts nodeproxy with flags that it has, and the page without an orchestrator does what the unit wants.
func TestUnit(t *testing.T) {
	t.Parallel()
	unit := readFile(t, "../../deploy/systemd/nodeproxy.service")
	_, line, _ := strings.Cut(unit, "\nExecStart=")
	line, _, _ = strings.Cut(line, "\n")
	words := strings.Fields(line)
	if len(words) < 3 || words[1] != "run" {
		t.Fatalf("ExecStart=%s", line)
	}
	run, _, err := root().Find(words[1:2])
	require.NoError(t, err)
	assert.NoError(t, run.ParseFlags(words[2:]), "ExecStart=%s", line)
	page := strings.Join(pageCommands(t, "bare-metal")["Install"], "\n")
	has(t, page, words[0], run.Flag("config").Value.String(), run.Flag("manifests").Value.String())
	if text, _, err := inProcess("", "config", "--mode=nftables"); err != nil || !strings.Contains(text, "mode: nftables") {
		t.Errorf("config --mode=nftables: %v\n%s", err, text)
	}
}
