package deploy

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

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

// image builds the image, once. It is in the directory of a World of its own, which the harness removes however the tests
// end.
var image = sync.OnceValues(func() (string, error) {
	w, err := harness.Build(harness.Options{Pods: []int{0}})
	if err != nil {
		return "", err
	}
	path := filepath.Join(w.Dir, "image.tar")
	return path, buildImage(path)
})

func buildImage(path string) error {
	root, err := projectDir()
	if err != nil {
		return err
	}
	build := exec.Command(filepath.Join(root, "hack", "build-image"))
	build.Env = append(os.Environ(), "OUTPUT="+path, "IMAGE="+imageName)
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
root = "%s"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
`

// startContainerd starts a containerd that has the image, and ends it with the test.
func startContainerd(t *testing.T, w *harness.World, node *harness.Node) *containerd {
	t.Helper()
	archive, err := image()
	if err != nil {
		t.Fatal(err)
	}
	d := &containerd{node: node, dir: filepath.Join(w.Dir, "containerd")}
	if err := os.Mkdir(d.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(d.dir, "config.toml")
	text := fmt.Sprintf(containerdConfig, filepath.Join(d.dir, "root"))
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(d.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	d.cmd = exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "sh", "-c",
		"mount -t tmpfs tmpfs /run && exec containerd --config "+config)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := node.Start(d.cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("log of containerd, its end:\n%s", text[max(0, len(text)-3000):])
		}
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
		for begun := time.Now(); time.Since(begun) < 3*time.Minute; time.Sleep(20 * time.Millisecond) {
			if os.RemoveAll(d.dir) == nil { // not before the kernel has ended all containers
				return
			}
		}
		t.Errorf("%s can't be removed", d.dir)
	})
	var failure error
	for begun := time.Now(); time.Since(begun) < 3*time.Minute; time.Sleep(100 * time.Millisecond) {
		if _, failure = d.ctr("version"); failure == nil {
			break
		}
	}
	if failure == nil {
		_, failure = d.ctr("images", "import", archive)
	}
	if failure != nil {
		t.Fatal(failure)
	}
	return d
}

// inside makes a command that runs in the namespaces of containerd.
func (d *containerd) inside(name string, args ...string) (*exec.Cmd, error) {
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", d.cmd.Process.Pid)
	text, err := os.ReadFile(children)
	if err != nil {
		return nil, err
	}
	pid := strings.TrimSpace(string(text))
	if _, err := strconv.Atoi(pid); err != nil {
		return nil, fmt.Errorf("unshare has the children %q", pid)
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

// container is a container under way.
type container struct {
	id   string
	d    *containerd
	cmd  *exec.Cmd // ctr run, which ends with it
	log  string    // the file with its output
	done chan struct{}
	err  error // after done
}

// start starts a container with flags of ctr run.
func (d *containerd) start(t *testing.T, id string, flags, command []string) *container {
	t.Helper()
	c := &container{id: id, d: d, log: filepath.Join(d.dir, id+".log"), done: make(chan struct{})}
	args := append([]string{"--namespace=k8s.io", "run", "--rm", "--cgroup="}, flags...)
	var err error
	if c.cmd, err = d.inside("ctr", append(append(args, imageName, id), command...)...); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(c.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	c.cmd.Stdout, c.cmd.Stderr = log, log
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.done)
	}()
	return c
}

func (c *container) output() string {
	text, _ := os.ReadFile(c.log)
	return string(text)
}

// waitFor waits until the container has printed something.
func (c *container) waitFor(timeout time.Duration, text string) error {
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		ended := false
		select {
		case <-c.done:
			ended = true
		default:
		}
		switch out := c.output(); {
		case strings.Contains(out, text):
			return nil
		case ended:
			return fmt.Errorf("container %s ended (%w) without %q:\n%s", c.id, c.err, text, out)
		case time.Since(begun) > timeout:
			return fmt.Errorf("container %s has not printed %q within %v:\n%s", c.id, text, timeout, out)
		}
	}
}

// stop ends the container as the kubelet does. It is an error if it ends otherwise than with exit code 0.
func (c *container) stop() error {
	if _, err := c.d.ctr("tasks", "kill", "--signal=SIGTERM", c.id); err != nil {
		return err
	}
	select {
	case <-c.done:
	case <-time.After(3 * time.Minute):
		return errors.New("it still runs 10s after SIGTERM")
	}
	return c.err
}

// pid is the id of the container's process in the PID namespace of containerd.
func (c *container) pid() (string, error) {
	out, err := c.d.ctr("tasks", "list")
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == c.id {
			return f[1], nil
		}
	}
	return "", fmt.Errorf("no task %s: %w in %q", c.id, err, out)
}

// proc reads a file of /proc about the container's process.
func (c *container) proc(file string) (string, error) {
	pid, err := c.pid()
	if err != nil {
		return "", err
	}
	return c.d.run("cat", filepath.Join("/proc", pid, file))
}
