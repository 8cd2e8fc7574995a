package main

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// emulators are the programs of qemu for programs of an architecture.
var emulators = map[string]string{"amd64": "qemu-x86_64", "arm64": "qemu-aarch64"}

// emulator returns the program that runs programs of an architecture; none for that of this machine.
func emulator(t *testing.T, arch string) []string {
	t.Helper()
	if arch == runtime.GOARCH {
		return nil
	}
	for _, name := range []string{emulators[arch] + "-static", emulators[arch]} {
		if path, err := exec.LookPath(name); err == nil {
			return []string{path}
		}
	}
	t.Fatalf("there is no %s; make deps installs it", emulators[arch])
	return nil
}

// buildBinary builds nodeproxy as releases do, in a copy of the project.
func buildBinary(t *testing.T, project, arch string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "nodeproxy")
	cmd := exec.Command(filepath.Join(project, "hack", "build-binary"), arch, file)
	cmd.Env = append(os.Environ(), "VERSION=v1.2.3")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("hack/build-binary %s: %v\n%s", arch, err, out)
	}
	return file
}

// TestArchitectures: the programs for all architectures are static, are the same bytes wherever they are built, run, and make the same
// rules of the same manifests.
func TestArchitectures(t *testing.T) {
	nstest.NeedKernel(t) // not for itself, but this takes a minute where nothing has been built yet
	t.Parallel()
	project, err := filepath.Abs("../..")
	require.NoError(t, err)
	elsewhere := filepath.Join(t.TempDir(), "a", "copy")
	tracked, err := exec.Command("git", "-C", project, "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	require.NoError(t, err)
	for _, name := range strings.Split(strings.Trim(string(tracked), "\x00"), "\x00") {
		copyFile(t, filepath.Join(project, name), filepath.Join(elsewhere, name))
	}

	first := map[string]string{}
	for _, arch := range []string{"amd64", "arm64"} {
		binary := buildBinary(t, project, arch)
		content, err := os.ReadFile(binary)
		require.NoError(t, err)
		again, err := os.ReadFile(buildBinary(t, elsewhere, arch))
		if err != nil || !bytes.Equal(content, again) {
			t.Errorf("%s: built in another directory, the program differs (%v)", arch, err)
		}
		if bytes.Contains(content, []byte(project)) {
			t.Errorf("%s: the program names the directory in which it was built", arch)
		}
		f, err := elf.NewFile(bytes.NewReader(content))
		require.NoError(t, err)
		if want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]; f.Machine != want {
			t.Errorf("%s: the program is for %v", arch, f.Machine)
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
				t.Errorf("%s: the program is not static", arch)
			}
		}
		run := func(args ...string) string {
			t.Helper()
			command := append(append(emulator(t, arch), binary), args...)
			cmd := exec.Command(command[0], command[1:]...)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%s: %q: %v\n%s", arch, args, err, stderr.String())
			}
			return string(out)
		}
		if got := run("version"); got != "v1.2.3\n" {
			t.Errorf("%s: version %q", arch, got)
		}
		for _, mode := range []string{"iptables", "ipvs", "nftables"} {
			for _, family := range []string{"ipv4", "ipv6"} {
				rules := run("render", filepath.Join(project, "examples"), "--node-name=node1", "--mode="+mode, "--family="+family,
					"--service-cidr=10.96.0.0/16,fd00:96::/112")
				key := mode + ", " + family
				if first[key] == "" {
					first[key] = rules
				}
				if rules != first[key] || !strings.Contains(rules, "\n") {
					t.Errorf("%s, mode %s: these rules differ from those that another architecture makes:\n%s\n%s", arch, key, rules, first[key])
				}
			}
		}
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	about, err := os.Stat(from)
	if os.IsNotExist(err) || err == nil && about.IsDir() {
		return // removed, but not committed; or another repository
	}
	require.NoError(t, err)
	content, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
	require.NoError(t, os.WriteFile(to, content, about.Mode().Perm()))
}
