package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// imageName is what the manifests call the image; see hack/image-name.
var imageName = func() string {
	name, err := os.ReadFile("../../deploy/image/name")
	if err != nil {
		panic(err)
	}
	return strings.TrimSpace(string(name)) + ":latest"
}()

// image builds the image, once. It is in the directory of a World of its own, with its root file system, which the harness removes however
// the tests end.
var image = sync.OnceValues(func() (string, error) {
	w, err := harness.Build(harness.Options{Pods: []int{0}})
	if err != nil {
		return "", err
	}
	path := filepath.Join(w.Dir, "image.tar")
	return path, buildImage(path, "PARTS="+w.Dir)
})

func buildImage(path string, env ...string) error {
	root, err := harness.ProjectDir()
	if err != nil {
		return err
	}
	build := exec.Command(filepath.Join(root, "hack", "build-image"))
	build.Env = append(append(os.Environ(), "OUTPUT="+path, "IMAGE="+imageName), env...)
	if binary := os.Getenv("NODEPROXY_BIN"); binary != "" {
		if binary, err = filepath.Abs(binary); err != nil {
			return err
		}
		build.Env = append(build.Env, "NODEPROXY_BIN="+binary)
	}
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("hack/build-image: %w\n%s", err, out)
	}
	return nil
}

// containerd is a containerd in the network namespace of a node, so that a container without a network namespace of its own is in
// the node's, as with hostNetwork. It is the first process of a PID namespace and has a mount namespace with an empty
// /run: when it ends, however that comes about, the kernel ends its containers and removes its mounts.
type containerd struct {
	node *harness.Node
	dir  string
	cmd  *exec.Cmd
}

const containerdConfig = `version = 2
root = "%[1]s/root"
disabled_plugins = [%[2]s"io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + pauseImage + `"
disable_cgroup = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "%[1]s/cni"
bin_dir = "/usr/lib/cni"
`

// startContainerd starts a containerd that has the image, and ends it with the test.
func startContainerd(t *testing.T, w *harness.World, node *harness.Node) *containerd {
	t.Helper()
	archive, err := image()
	require.NoError(t, err)
	d := newContainerd(t, w, node, `"io.containerd.grpc.v1.cri", `)
	require.NoError(t, d.boot(""))
	require.NoError(t, d.importImages(archive))
	return d
}

// newContainerd makes a containerd without these plugins. It ends with the test.
func newContainerd(t *testing.T, w *harness.World, node *harness.Node, without string) *containerd {
	t.Helper()
	d := &containerd{node: node, dir: filepath.Join(w.Dir, "containerd")}
	require.NoError(t, os.Mkdir(d.dir, 0o755))
	require.NoError(t, os.WriteFile(d.file("config.toml"), fmt.Appendf(nil, containerdConfig, d.dir, without), 0o644))
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(d.file("log"))
			t.Logf("log of containerd, its end:\n%s", text[max(0, len(text)-3000):])
		}
		d.kill()
		// Not before the kernel has ended all containers.
		assert.NoError(t, eventually(3*time.Minute, func() error { return os.RemoveAll(d.dir) }), "%s can't be removed", d.dir)
	})
	return d
}

func (d *containerd) file(name string) string { return filepath.Join(d.dir, name) }

func (d *containerd) appendTo(name string) (*os.File, error) {
	return os.OpenFile(d.file(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
}

// boot starts containerd after some commands, and waits until it answers.
func (d *containerd) boot(before string) error {
	log, err := d.appendTo("log")
	if err != nil {
		return err
	}
	defer log.Close()
	d.cmd = exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "sh", "-ec",
		"mount -t tmpfs tmpfs /run\n"+before+"\nexec containerd --config "+d.file("config.toml"))
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.node.Start(d.cmd); err != nil {
		return err
	}
	return eventually(3*time.Minute, func() error {
		_, err := d.ctr("version")
		return err
	})
}

func (d *containerd) importImages(archives ...string) error {
	for _, archive := range archives {
		if _, err := d.ctr("images", "import", archive); err != nil {
			return err
		}
	}
	return nil
}

// kill ends containerd and all containers at once, as a power failure does.
func (d *containerd) kill() {
	if d.cmd != nil && d.cmd.Process != nil {
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
		d.cmd = nil
	}
	// runc would have removed the control groups of what still ran.
	left := map[string]bool{}
	for _, kind := range []string{"containers", "sandboxes"} {
		paths, _ := filepath.Glob(d.file("root/io.containerd.grpc.v1.cri/" + kind + "/*"))
		for _, path := range paths {
			left[filepath.Base(path)] = true
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, _ fs.DirEntry, _ error) error { // Others come and go meanwhile.
		if left[filepath.Base(path)] {
			_ = eventually(time.Minute, func() error { return os.Remove(path) }) // not before the last process is gone
			return fs.SkipDir
		}
		return nil
	})
}

// inside makes a command that runs in the namespaces of containerd.
func (d *containerd) inside(name string, args ...string) (*exec.Cmd, error) {
	if d.cmd == nil {
		return nil, errors.New("containerd does not run")
	}
	pid, err := harness.Child(d.cmd)
	if err != nil {
		return nil, err
	}
	return exec.Command("nsenter", append([]string{"--target", pid, "--mount", "--pid", "--net", "--", name}, args...)...), nil
}

// ctr runs ctr, and returns what it printed.
func (d *containerd) ctr(args ...string) (string, error) {
	return d.run("ctr", append([]string{"--namespace=k8s.io"}, args...)...)
}

func (d *containerd) run(name string, args ...string) (string, error) {
	cmd, err := d.inside(name, args...)
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out.String())
	}
	return out.String(), nil
}
