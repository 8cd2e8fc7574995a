package manifest

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"nodeproxy/source"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil { // They wait most of the time, also on one processor.
		panic(err)
	}
	os.Exit(m.Run())
}

// running is a Source that runs, and what came of it.
type running struct {
	t      *testing.T
	path   string
	source *Source

	mu       sync.Mutex
	batches  []source.Batch
	findings findings
}

func (r *running) Apply(b source.Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, b)
}

func (r *running) report(f source.Finding) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.findings = append(r.findings, f)
}

// state describes everything delivered so far.
func (r *running) state() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all source.Batch
	for _, b := range r.batches {
		all.Merge(b)
	}
	return describe(all)
}

func (r *running) said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.findings.String()
}

func (r *running) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.batches)
}

// start runs a Source on a path until the test ends.
func start(t *testing.T, path string) *running {
	t.Helper()
	r := &running{t: t, path: path}
	s, err := New(Config{Path: path, Report: r.report})
	require.NoError(t, err)
	r.source = s
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx, r) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
	return r
}

// await waits until something holds.
func (r *running) await(what string, holds func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: not within a minute; the state is\n%s\nand reported\n%s", what, r.state(), r.said())
		}
	}
}

func (r *running) awaitState(what, want string) {
	r.t.Helper()
	r.await(what+": "+want, func() bool { return strings.TrimSpace(r.state()) == strings.TrimSpace(want) })
}

func (r *running) awaitSaid(want string) {
	r.t.Helper()
	r.await("a finding: "+want, func() bool { return strings.Contains(r.said(), want) })
}

// at returns the manifest of a Service with a cluster IP, and the line that describes it.
func at(name string, ip int) (manifest, line string) {
	return service(name, fmt.Sprintf("clusterIP: 10.96.0.%d", ip), "ports: [{port: 80}]"),
		fmt.Sprintf("svc default/%s ClusterIP 10.96.0.%d :80/TCP->80\n", name, ip)
}

func TestWatchSaves(t *testing.T) {
	t.Parallel()
	var slowest time.Duration
	write := func(t *testing.T, path, content string) {
		begin := time.Now()
		write(t, path, content)
		slowest = max(slowest, time.Since(begin))
	}
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	m3, l3 := at("web", 3)
	other, otherLine := at("other", 9)
	dir := writeFiles(t, map[string]string{"web.yaml": m1, "other.yaml": other})
	file := filepath.Join(dir, "web.yaml")
	r := start(t, dir)
	r.awaitState("start", otherLine+l1)
	if !r.batches[0].Synced || len(r.batches[0].Services) != 2 {
		t.Errorf("the first batch: %+v", r.batches[0])
	}
	write(t, file, m2) // truncate and write
	r.awaitState("write", otherLine+l2)
	write(t, filepath.Join(dir, ".web.yaml.swp"), m3)
	require.NoError(t, os.Rename(filepath.Join(dir, ".web.yaml.swp"), file)) // write beside, rename over
	r.awaitState("rename over", otherLine+l3)
	require.NoError(t, os.Rename(file, file+"~")) // move away, write anew
	write(t, file, m1)
	r.awaitState("backup and write", otherLine+l1)
	sub, subLine := at("sub", 7)
	write(t, filepath.Join(dir, "a/b/sub.yaml"), sub)
	r.awaitState("a new directory", otherLine+subLine+l1)
	write(t, filepath.Join(dir, "a/b/sub.yaml"), strings.Replace(sub, "sub", "bus", 1))
	r.awaitState("a file in it", strings.Replace(subLine, "sub", "bus", 1)+otherLine+l1)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "a")))
	r.awaitState("the directory removed", otherLine+l1)
	require.NoError(t, os.Rename(file, filepath.Join(dir, "renamed.yaml")))
	before := r.count()
	time.Sleep(100 * time.Millisecond) // No batch is to come, and there is no sign of that.
	if r.count() != before {
		t.Errorf("a file with another name and the same objects makes %d batches", r.count()-before)
	}
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "renamed.yaml")))
	r.awaitState("removed", otherLine)
	for _, b := range r.batches[1:] {
		if b.Synced || len(b.Services) > 2 {
			t.Errorf("more than what changed: %v", b)
		}
		for name := range b.Services {
			if name.Name == "other" {
				t.Error("an object that did not change is delivered again")
			}
		}
	}
	said := r.said()
	if slowest >= quiet { // A file that was empty for so long, as this process had no processor in the middle of writing it, is reported rightly.
		said = emptyFile.ReplaceAllString(said, "")
	}
	if strings.Contains(said, "problem") {
		t.Error(said)
	}
}

var emptyFile = regexp.MustCompile(`(?m)^problem: .*: the file is empty, as while it is being written.*$`)

func TestWatchBroken(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	o1, ol1 := at("other", 8)
	o2, ol2 := at("other", 9)
	dir := writeFiles(t, map[string]string{"all.yaml": m1 + "---\n" + o1})
	file := filepath.Join(dir, "all.yaml")
	r := start(t, dir)
	r.awaitState("start", ol1+l1)

	// One document of two is broken.
	write(t, file, strings.Replace(m2, "spec:", "spec: {", 1)+"---\n"+o2)
	r.awaitSaid("Service default/web: broken YAML: ")
	r.awaitSaid("; all objects of the file stay as they were")
	r.awaitState("one broken", ol1+l1)
	write(t, file, m2+"---\n"+o2)
	r.awaitState("mended", ol2+l2)

	// So is an object that an API server would refuse.
	write(t, file, strings.Replace(m1, "ports", "type: Nodeport\n  ports", 1)+"---\n"+o1)
	r.awaitSaid(`all.yaml:7: Service default/web: spec.type: "Nodeport" is not one of `)
	r.awaitState("refused", ol2+l2)

	// The whole file is one broken thing.
	write(t, file, "\"\n")
	r.awaitSaid("all.yaml:1: broken YAML: ")
	r.awaitState("all broken", ol2+l2)
	write(t, file, o2)
	r.awaitState("mended, with one object less", ol2)
	write(t, file, "")
	r.awaitSaid("all.yaml:1: the file is empty, as while it is being written; all objects of the file stay as they were")
	require.NoError(t, os.RemoveAll(file))
	r.awaitState("removed", "")
}

// TestWatchHalfWritten holds that a file which is broken for a moment only is never reported.
func TestWatchHalfWritten(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	half := strings.Index(m2, "ports: [{") + len("ports: [{")
	for try := 1; ; try++ {
		dir := writeFiles(t, map[string]string{"web.yaml": m1})
		r := start(t, dir)
		r.awaitState("start", l1)
		begun := time.Now()
		overwrite(t, filepath.Join(dir, "web.yaml"), 10*time.Millisecond, "", m2[:half], m2[half:])
		took := time.Since(begun)
		r.awaitState("whole", l2)
		if took >= quiet && try < 100 { // A busy machine has left it broken for long.
			continue
		}
		if strings.Contains(r.said(), "problem") {
			t.Errorf("after %v: %s", took, r.said())
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, b := range r.batches {
			for name, svc := range b.Services {
				if svc == nil {
					t.Errorf("%s was gone for a moment", name)
				}
			}
		}
		return
	}
}

// TestWatchConfigMap swaps a directory as the kubelet does for volumes of ConfigMaps.
func TestWatchConfigMap(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	m3, l3 := at("web", 3)
	dir := writeFiles(t, map[string]string{"..v1/web.yaml": m1})
	require.NoError(t, os.Symlink("..v1", filepath.Join(dir, "..data")))
	require.NoError(t, os.Symlink("..data/web.yaml", filepath.Join(dir, "web.yaml")))
	whole, single := start(t, dir), start(t, filepath.Join(dir, "web.yaml"))
	both := func(what, want string) {
		t.Helper()
		whole.awaitState(what, want)
		single.awaitState(what+", as a single file", want)
	}
	both("start", l1)
	for i, version := range []struct{ manifest, line string }{{m2, l2}, {m3, l3}} {
		name := fmt.Sprintf("..v%d", i+2)
		write(t, filepath.Join(dir, name, "web.yaml"), version.manifest)
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
		both("swap", version.line)
		require.NoError(t, os.RemoveAll(filepath.Join(dir, fmt.Sprintf("..v%d", i+1))))
	}
	if strings.Contains(whole.said()+single.said(), "problem") {
		t.Error(whole.said(), single.said())
	}
}

func TestWatchLink(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	target := writeFiles(t, map[string]string{"x.txt": m1})
	dir := t.TempDir()
	require.NoError(t, os.Symlink(filepath.Join(target, "x.txt"), filepath.Join(dir, "web.yaml")))
	r := start(t, dir)
	r.awaitState("start", l1)
	write(t, filepath.Join(target, "x.txt"), m2)
	r.awaitState("written through the link's target", l2)
}

func TestWatchSingleFile(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	dir := writeFiles(t, map[string]string{"web.yaml": m1, "other.yaml": m2})
	file := filepath.Join(dir, "web.yaml")
	r := start(t, file)
	r.awaitState("start", l1)
	write(t, file, m2)
	r.awaitState("write", l2)
	write(t, filepath.Join(dir, "tmp"), m1)
	require.NoError(t, os.Rename(filepath.Join(dir, "tmp"), file))
	r.awaitState("rename over", l1)
	require.NoError(t, os.RemoveAll(file))
	r.awaitState("removed", "")
	write(t, file, m2)
	r.awaitState("made anew", l2)
}

// TestWatchDirectoryComesAndGoes begins before the directory exists: nothing may be delivered until it does.
func TestWatchDirectoryComesAndGoes(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("web", 2)
	top := t.TempDir()
	dir := filepath.Join(top, "a", "manifests")
	r := start(t, dir)
	r.awaitSaid("there is nothing at this path; nothing is programmed until there is")
	if r.count() != 0 {
		t.Error("something is delivered though there is nothing")
	}
	write(t, filepath.Join(dir, "web.yaml"), m1)
	r.awaitState("made later", l1)
	// All at once: on a busy machine, its file would be gone for long before it.
	require.NoError(t, os.Rename(dir, filepath.Join(top, "removed")))
	require.NoError(t, os.RemoveAll(filepath.Join(top, "removed")))
	r.awaitSaid("there is nothing at this path; all objects of the files below stay as they were")
	r.awaitState("removed", l1)
	write(t, filepath.Join(dir, "web.yaml"), m2)
	r.awaitState("made anew", l2)
	write(t, filepath.Join(dir, "web.yaml"), m1)
	r.awaitState("and watched", l1)
	require.NoError(t, os.Rename(dir, dir+"2"))
	r.await("moved away", func() bool { return len(r.source.Faults()) > 0 })
	r.awaitState("moved away", l1)
	require.NoError(t, os.Rename(dir+"2", dir))
	r.await("moved back", func() bool { return len(r.source.Faults()) == 0 })
	r.awaitState("moved back", l1)
}

func TestUnreadable(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	dir := writeFiles(t, map[string]string{"web.yaml": m1})
	require.NoError(t, os.Mkdir(filepath.Join(dir, "dir.yaml"), 0o755))
	require.NoError(t, os.Symlink("/does/not/exist", filepath.Join(dir, "nowhere.yaml")))
	require.NoError(t, os.Symlink("/dev/zero", filepath.Join(dir, "zero.yaml")))
	require.NoError(t, os.Symlink(dir, filepath.Join(dir, "circle")))
	r := start(t, dir)
	r.awaitState("start", l1)
	r.awaitSaid("zero.yaml: can't be read: not a regular file; it is left out")
}
