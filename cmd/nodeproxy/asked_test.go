package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/inspect"
)

// asked is a nodeproxy with manifests, whose socket commands ask.
type asked struct {
	*testing.T
	dir, socket string
	env         []string // of the nodeproxy, besides this process's
}

// newAsked makes the directories of a nodeproxy. It does not start it, and has no manifests yet.
func newAsked(t *testing.T) *asked {
	t.Helper()
	dir, err := os.MkdirTemp("", "np") // The path of a socket has to be short, so t.TempDir won't do.
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	a := &asked{T: t, dir: dir, socket: filepath.Join(dir, "run", "socket")}
	require.NoError(t, os.Mkdir(a.manifests(), 0o755))
	return a
}

func (a *asked) manifests() string { return filepath.Join(a.dir, "m") }

// write makes a text the only manifest.
func (a *asked) write(text string) {
	a.Helper()
	writeFile(a.T, filepath.Join(a.manifests(), "web.yaml"), text)
}

func (a *asked) start(flags ...string) *process {
	a.Helper()
	return startProcess(a.T, a.env, append([]string{"--manifests=" + a.manifests(), "--socket=" + a.socket, "--iptables-backend=nft"}, flags...)...)
}

// awaitProgrammed waits until there are ServicePorts, and all are programmed.
func (a *asked) awaitProgrammed() {
	a.Helper()
	eventually(a.T, "everything is programmed", func() bool {
		list := a.services()
		return len(list) > 0 && !slices.ContainsFunc(list, func(sp inspect.ServicePort) bool { return sp.State != inspect.Programmed })
	})
}

// ask returns what a command prints, and its exit code.
func (a *asked) ask(args ...string) (string, int) {
	a.Helper()
	cmd := exec.Command("nodeproxy", append(args, "--socket="+a.socket)...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		a.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// says fails the test unless a command prints all of these texts and ends with this exit code.
func (a *asked) says(code int, command string, texts ...string) {
	a.Helper()
	said, got := a.ask(strings.Fields(command)...)
	if got != code || slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(said, text) }) {
		a.Errorf("nodeproxy %s: exit code %d, want %d and %q:\n%s", command, got, code, texts, said)
	}
}

// askList returns the list that a command prints as JSON; nil if it fails.
func askList[T any](a *asked, args ...string) (list []T) {
	a.Helper()
	text, code := a.ask(append(args, "-o", "json")...)
	if code == 0 {
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			a.Fatalf("%v: %s", err, text)
		}
	}
	return list
}

// services returns the ServicePorts of the nodeproxy; none while it does not answer.
func (a *asked) services() []inspect.ServicePort {
	a.Helper()
	return askList[inspect.ServicePort](a, "get", "services")
}

// service returns the only ServicePort, once the nodeproxy answers.
func (a *asked) service() (sp inspect.ServicePort) {
	a.Helper()
	eventually(a.T, "an answer", func() bool {
		list := a.services()
		if len(list) == 1 {
			sp = list[0]
		}
		return len(list) == 1
	})
	return sp
}

// history returns the syncs that changed a Service; all of them for "".
func (a *asked) history(service string) []inspect.Sync {
	a.Helper()
	args := []string{"history", "--last=0"}
	if service != "" {
		args = append(args, service)
	}
	return askList[inspect.Sync](a, args...)
}
