package deploy

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// mostImage is how large the archive may be. Debian's part of it is 5 MB, the rest is the binary.
const mostImage = 16 << 20

// TestImage: the archive is small, the same bytes each time, and the programs in it run.
func TestImage(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{Pods: []int{0}})
	d := startContainerd(t, w, w.Node1())
	archive, err := image()
	require.NoError(t, err)
	first, err := os.ReadFile(archive)
	require.NoError(t, err)
	if len(first) > mostImage {
		t.Errorf("the image has %d bytes, want at most %d", len(first), mostImage)
	}
	again := filepath.Join(w.Dir, "again.tar")
	require.NoError(t, buildImage(again))
	second, err := os.ReadFile(again)
	require.NoError(t, err)
	if !bytes.Equal(first, second) {
		t.Errorf("two builds differ: %d and %d bytes", len(first), len(second))
	}
	checkLibraries(t, first)
	run := func(id string, command ...string) (string, error) { // The container's control groups are the machine's.
		return d.ctr(append([]string{"run", "--rm", "--cgroup=", "--net-host", "--read-only", "--cap-add=CAP_NET_ADMIN",
			imageName, filepath.Base(w.Dir) + "-" + id}, command...)...)
	}
	for id, p := range map[string]struct{ command, says string }{
		"nft":       {"iptables --version", "(nf_tables)"},
		"nft6":      {"ip6tables --version", "(nf_tables)"},
		"legacy":    {"iptables-legacy --version", "(legacy)"},
		"legacy6":   {"ip6tables-legacy-restore --version", "(legacy)"},
		"extension": {"iptables -m recent --help", "--rcheck"},
		"ipset":     {"ipset --version", "protocol version"},
		"modprobe":  {"modprobe --version", "kmod version"},
		"nodeproxy": {"nodeproxy version", ""},
	} {
		out, err := run(id, strings.Fields(p.command)...)
		if err != nil || !strings.Contains(out, p.says) {
			t.Errorf("%s: %v, want %q in\n%s", p.command, err, p.says, out)
		}
	}
	out, err := run("shell", "/bin/sh")
	if err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("there is a shell: %v %s", err, out)
	}
}

// checkLibraries: every library that a program or another library in the image wants is there.
func checkLibraries(t *testing.T, archive []byte) {
	t.Helper()
	there, wanted := map[string]bool{}, map[string][]string{}
	eachFile(t, bytes.NewReader(archive), func(_ string, blob []byte) {
		layer, err := gzip.NewReader(bytes.NewReader(blob))
		if err != nil {
			return // not a layer
		}
		eachFile(t, layer, func(name string, content []byte) {
			there[path.Base(name)] = true
			if f, err := elf.NewFile(bytes.NewReader(content)); err == nil {
				libraries, err := f.ImportedLibraries()
				require.NoError(t, err)
				wanted[name] = libraries
			}
		})
	})
	if len(wanted) < 100 {
		t.Errorf("only %d programs and libraries in the image", len(wanted))
	}
	for name, libraries := range wanted {
		for _, library := range libraries {
			if !there[library] {
				t.Errorf("%s wants %s, which is not in the image", name, library)
			}
		}
	}
}

func eachFile(t *testing.T, archive io.Reader, do func(name string, content []byte)) {
	t.Helper()
	for in := tar.NewReader(archive); ; {
		h, err := in.Next()
		if err == io.EOF {
			return
		}
		require.NoError(t, err)
		content, err := io.ReadAll(in)
		require.NoError(t, err)
		do(h.Name, content)
	}
}
