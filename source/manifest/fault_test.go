package manifest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// twenty is a file of twenty Services with two ports each, and what it stands for. step moves their addresses.
func twenty(step int) (manifest, lines string) {
	var docs []string
	for i := range 20 {
		name := fmt.Sprintf("s%02d", i)
		docs = append(docs, service(name, fmt.Sprintf("clusterIP: 10.96.0.%d", 10+i+step), "ports:", "- name: a", "  port: 80",
			"- name: b", "  port: 8080"))
		lines += fmt.Sprintf("svc default/%s ClusterIP 10.96.0.%d a:80/TCP->80 b:8080/TCP->8080\n", name, 10+i+step)
	}
	return strings.Join(docs, "---\n"), lines
}

// startTwenty runs a Source on a directory with that file, and returns the file and what is in it.
func startTwenty(t *testing.T) (r *running, file, text string) {
	t.Helper()
	text, lines := twenty(0)
	dir := writeFiles(t, map[string]string{"all.yaml": text})
	r = start(t, dir)
	r.awaitState("start", lines)
	return r, filepath.Join(dir, "all.yaml"), text
}

// nothingChanged fails where a batch has taken a Service away or changed one since a number of batches.
func (r *running) nothingChanged(since int, what string) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range r.batches[since:] {
		for name, svc := range b.Services {
			if svc == nil {
				r.t.Errorf("%s: %s is gone", what, name)
			} else {
				r.t.Errorf("%s: %s has changed", what, name)
			}
		}
	}
	r.batches = r.batches[:since:since]
}

// overwrite writes in place: the file is emptied and then written in pieces.
func overwrite(t *testing.T, path string, pause time.Duration, pieces ...string) {
	t.Helper()
	f, err := os.Create(path)
	require.NoError(t, err)
	for i, piece := range pieces {
		if i > 0 {
			time.Sleep(pause) // Who writes is slow.
		}
		_, err := f.WriteString(piece)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
}

// TestCutAtEveryByte cuts a file of twenty documents at every byte, or with -short at one in eleven. No object may leave or change.
func TestCutAtEveryByte(t *testing.T) {
	t.Parallel()
	r, file, text := startTwenty(t)
	before := r.count()
	step := 1
	if testing.Short() {
		step = 11
	}
	for at := len(text) - 1; at >= 0; at -= step {
		require.NoError(t, os.Truncate(file, int64(at)))
		time.Sleep(4 * time.Millisecond) // Some of the states are to be read, and nothing says which were.
	}
	r.awaitSaid("all.yaml:1: ")
	r.nothingChanged(before, "cut")
	write(t, file, text)
	r.await("no fault", func() bool { return len(r.source.Faults()) == 0 })
	r.nothingChanged(before, "whole again")
}

// TestCutForLong leaves a file cut off for longer than it takes until it is read.
func TestCutForLong(t *testing.T) {
	t.Parallel()
	for what, at := range map[string]func(text string) int{
		"nothing left":      func(string) int { return 0 },
		"within a number":   func(text string) int { return strings.LastIndex(text, "8080") + 2 },
		"after a port":      func(text string) int { return strings.LastIndex(text, "- name: b") },
		"within a document": func(text string) int { return strings.LastIndex(text, "ports:") + 3 },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r, file, text := startTwenty(t)
			before := r.count()
			require.NoError(t, os.Truncate(file, int64(at(text))))
			r.awaitSaid("all.yaml:")
			time.Sleep(3 * quiet) // Nothing is to change, also after this time.
			r.nothingChanged(before, what)
		})
	}
}

// TestRewriteInPieces writes a file anew in place, with pauses for longer than it takes until it is read.
func TestRewriteInPieces(t *testing.T) {
	t.Parallel()
	r, file, text := startTwenty(t)
	before := r.count()
	third := len(text) / 3
	overwrite(t, file, 3*quiet, text[:third], text[third:2*third], text[2*third:])
	r.await("no fault", func() bool { return len(r.source.Faults()) == 0 })
	r.nothingChanged(before, "written")
}

// TestFilesThatCantBeRead holds that no object leaves with a file that is there but can't be read, nor with the directory.
func TestFilesThatCantBeRead(t *testing.T) {
	t.Parallel()
	for what, fault := range map[string]func(t *testing.T, dir string){
		"dangling": func(t *testing.T, dir string) {
			require.NoError(t, os.RemoveAll(filepath.Join(dir, "web.yaml")))
			require.NoError(t, os.Symlink("/does/not/exist", filepath.Join(dir, "web.yaml")))
		},
		"unreadable": func(t *testing.T, dir string) { // Reading it is an I/O error.
			require.NoError(t, os.Symlink("/proc/self/mem", filepath.Join(dir, ".new")))
			require.NoError(t, os.Rename(filepath.Join(dir, ".new"), filepath.Join(dir, "web.yaml")))
		},
		"no file": func(t *testing.T, dir string) {
			require.NoError(t, os.Symlink("/dev/zero", filepath.Join(dir, ".new")))
			require.NoError(t, os.Rename(filepath.Join(dir, ".new"), filepath.Join(dir, "web.yaml")))
		},
		"directory gone":    func(t *testing.T, dir string) { require.NoError(t, os.Rename(dir, dir+".away")) },
		"directory removed": func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(dir)) },
		"another directory": func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(dir, dir+".away"))
			require.NoError(t, os.Mkdir(dir, 0o755))
		},
		"a file in its place": func(t *testing.T, dir string) { require.NoError(t, os.Rename(dir, dir+".away")); write(t, dir, "x") },
		"a link to nowhere": func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(dir, dir+".away"))
			require.NoError(t, os.Symlink("/does/not/exist", dir))
		},
		"subdirectory no link": func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(dir+"/sub", dir+"/.away"))
			require.NoError(t, os.Symlink("/does/not/exist", dir+"/sub"))
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			m1, l1 := at("web", 1)
			m2, l2 := at("other", 2)
			var dir string
			var r *running
			var before int
			for try := 1; ; try++ {
				dir = filepath.Join(t.TempDir(), "manifests")
				write(t, filepath.Join(dir, "web.yaml"), m1)
				write(t, filepath.Join(dir, "sub", "other.yaml"), m2)
				r = start(t, dir)
				r.awaitState("start", l2+l1)
				before = r.count()
				begun := time.Now()
				fault(t, dir)
				// A busy machine may take so long that a file is rightly gone before its directory is; not each time.
				if took := time.Since(begun); took < quiet {
					break
				} else if try == 30 {
					t.Fatalf("it takes %v to make the fault", took)
				}
			}
			r.awaitSaid("problem: " + dir)
			time.Sleep(3 * quiet) // Nothing is to change, also after this time.
			r.nothingChanged(before, what)
			if len(r.source.Faults()) == 0 {
				t.Error("no fault is known")
			}
		})
	}
}

// TestReplacedAfterStartOverBroken: a file that could not be read at the start, and that is removed and written anew, as editors do,
// is not taken for gone in between.
func TestReplacedAfterStartOverBroken(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("other", 2)
	for try := 1; ; try++ {
		dir := writeFiles(t, map[string]string{"other.yaml": m2, "web.yaml": ""})
		file := filepath.Join(dir, "web.yaml")
		r := start(t, dir)
		r.awaitState("what can be read", l2)
		begun := time.Now()
		require.NoError(t, os.RemoveAll(file))
		time.Sleep(25 * time.Millisecond) // It is away for less than quiet.
		write(t, file, m1)
		took := time.Since(begun)
		r.awaitState("mended", l2+l1)
		r.await("whole", func() bool { return r.extent() == source.Whole })
		whole := 0 // the first batch that has everything
		r.mu.Lock()
		batches := r.batches
		r.mu.Unlock()
		for batches[whole].Extent != source.Whole {
			whole++
		}
		if slices.ContainsFunc(batches[:whole+1], func(b source.Batch) bool {
			return b.Services[types.NamespacedName{Namespace: "default", Name: "web"}] != nil
		}) {
			return
		}
		// A busy machine may leave it away for long, or notice late that it is back; not each time.
		if try == 30 {
			t.Fatalf("everything counts as known before the file is there again, %v later", took)
		}
	}
}

// TestRemovedAfterStartOverBroken: where such a file is removed for good, everything is known.
func TestRemovedAfterStartOverBroken(t *testing.T) {
	t.Parallel()
	m2, l2 := at("other", 2)
	dir := writeFiles(t, map[string]string{"other.yaml": m2, "web.yaml": ""})
	r := start(t, dir)
	r.awaitState("what can be read", l2)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "web.yaml")))
	r.await("whole", func() bool { return r.extent() == source.Whole })
	r.await("no fault", func() bool { return len(r.source.Faults()) == 0 })
}

// TestStartWhileBeingWritten: a file that a program writes while this one starts has not only what it has so far.
func TestStartWhileBeingWritten(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("other", 2)
	for try := 1; ; try++ {
		file := filepath.Join(t.TempDir(), "all.yaml")
		text, last, gap := m1+"---\n", time.Now(), time.Duration(0)
		write(t, file, text)
		r := start(t, filepath.Dir(file))
		for r.count() == 0 {
			text += "# more\n"
			write(t, file, text)
			gap, last = max(gap, time.Since(last)), time.Now()
			time.Sleep(quiet / 10) // Who writes is slow.
		}
		extent := r.extent()
		gap = max(gap, time.Since(last))
		write(t, file, text+m2)
		r.awaitState("written", l2+l1)
		if gap >= quiet && try < 100 { // A busy machine has left it alone for long.
			continue
		}
		if extent != source.Partial {
			t.Errorf("the first batch has extent %v", extent)
		}
		r.await("whole", func() bool { return r.extent() == source.Whole })
		r.await("no fault", func() bool { return len(r.source.Faults()) == 0 })
		return
	}
}

// extent is what was said last of how much is known.
func (r *running) extent() source.Extent {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all source.Batch
	for _, b := range r.batches {
		all.Merge(b)
	}
	return all.Extent
}

// TestStartOverBroken holds that a start over files that can't be read says that not everything is known, until it is.
func TestStartOverBroken(t *testing.T) {
	t.Parallel()
	m1, l1 := at("web", 1)
	m2, l2 := at("other", 2)
	for what, broken := range map[string]func(file string){
		"empty":   func(file string) { write(t, file, "") },
		"cut off": func(file string) { write(t, file, "apiVersion: v1\nkind: Service\nmetadata: {na") },
		"cut value": func(file string) {
			text := strings.Replace(m1, "ports", "type: Nodeport\n  ports", 1)
			write(t, file, text[:strings.Index(text, "Nodeport")+len("Node")])
		},
		"refused":   func(file string) { write(t, file, strings.Replace(m1, "ports", "type: Nodeport\n  ports", 1)) },
		"dangling":  func(file string) { require.NoError(t, os.Symlink("/does/not/exist", file)) },
		"I/O error": func(file string) { require.NoError(t, os.Symlink("/proc/self/mem", file)) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dir := writeFiles(t, map[string]string{"other.yaml": m2})
			file := filepath.Join(dir, "web.yaml")
			broken(file)
			r := start(t, dir)
			r.awaitState("what can be read", l2)
			if b := r.batches[0]; !b.Synced || b.Extent != source.Partial {
				t.Errorf("the first batch: synced %v, extent %v", b.Synced, b.Extent)
			}
			faults := r.source.Faults()
			if what == "refused" { // The node does what can be done.
				if len(faults) != 0 {
					t.Errorf("faults: %q", faults)
				}
			} else if len(faults) != 1 || !strings.Contains(faults[0], file) {
				t.Errorf("faults: %q", faults)
			}
			require.NoError(t, os.RemoveAll(file))
			write(t, file, m1)
			r.awaitState("mended", l2+l1)
			r.await("whole", func() bool { // It may have come before the object, when the file was seen to be gone.
				r.mu.Lock()
				defer r.mu.Unlock()
				return slices.ContainsFunc(r.batches[1:], func(b source.Batch) bool { return b.Extent == source.Whole })
			})
			r.await("no fault", func() bool { return len(r.source.Faults()) == 0 })
		})
	}
	t.Run("sound", func(t *testing.T) {
		t.Parallel()
		r := start(t, writeFiles(t, map[string]string{"other.yaml": m2}))
		r.awaitState("start", l2)
		if b := r.batches[0]; b.Extent != source.Unchanged {
			t.Errorf("the first batch has extent %v", b.Extent)
		}
	})
}
