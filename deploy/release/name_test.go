package main

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	// named are the fields of a manifest, and of the values of a chart, that name an image.
	named = regexp.MustCompile(`(?m)^[ -]*(?:image|repository): ([^ {\n]+)`)
	// reference is what looks like a name of the image anywhere else: with a registry before it, and a tag, a digest or nothing behind.
	reference = regexp.MustCompile(`[a-z0-9][a-z0-9.-]*(?::[0-9]+)?(?:/[a-z0-9._-]+)*/nodeproxy(?::(?:latest|v[0-9])|@sha256)`)
)

// wrongNames returns the files below a project's directory that name another image, and how many names there are at all.
func wrongNames(t *testing.T, project string) (wrong []string, names int) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(project, "deploy/image/name"))
	require.NoError(t, err)
	want := strings.TrimSpace(string(content))
	check := func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, ".png") || filepath.Base(path) == "name" {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var found []string
		for _, m := range named.FindAllStringSubmatch(string(content), -1) {
			if strings.Contains(path, "deploy") {
				found = append(found, m[1])
			}
		}
		found = append(found, reference.FindAllString(string(content), -1)...)
		for _, name := range found {
			if strings.HasPrefix(name, "registry.example.org/") {
				continue // an example of another
			}
			names++
			if name != want && !strings.HasPrefix(name, want+":") && !strings.HasPrefix(name, want+"@") {
				wrong = append(wrong, path+": "+name)
			}
		}
		return nil
	}
	for _, dir := range []string{"deploy", "docs", "hack", "examples", "README.md", "Makefile", "cmd"} {
		if _, err := os.Stat(filepath.Join(project, dir)); os.IsNotExist(err) {
			continue
		}
		require.NoError(t, filepath.WalkDir(filepath.Join(project, dir), check))
	}
	return wrong, names
}

// TestImageName: the image has one name, which hack/image-name tells and changes.
func TestImageName(t *testing.T) {
	wrong, names := wrongNames(t, "../..")
	if len(wrong) > 0 || names < 4 {
		t.Errorf("of %d names of the image, these are not that of deploy/image/name:\n%s", names, strings.Join(wrong, "\n"))
	}

	// A copy, with another name.
	dir := t.TempDir()
	for _, part := range []string{"deploy", "docs", "hack"} {
		require.NoError(t, os.CopyFS(filepath.Join(dir, part), os.DirFS("../../"+part)))
	}
	git := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	git("init", "-q")
	git("add", ".")
	const other = "registry.example.com:5000/team/nodeproxy"
	if out, err := exec.Command(filepath.Join(dir, "hack/image-name"), other).CombinedOutput(); err != nil {
		t.Fatalf("hack/image-name: %v\n%s", err, out)
	}
	told, err := exec.Command(filepath.Join(dir, "hack/image-name")).Output()
	if err != nil || string(told) != other+"\n" {
		t.Errorf("hack/image-name prints %q, %v", told, err)
	}
	if wrong, after := wrongNames(t, dir); len(wrong) > 0 || after < 4 {
		t.Errorf("hack/image-name leaves out\n%s", strings.Join(wrong, "\n"))
	}
	base, err := os.ReadFile(filepath.Join(dir, "deploy/base/daemonset.yaml"))
	if err != nil || !bytes.Contains(base, []byte("image: "+other+":latest\n")) {
		t.Errorf("%v in\n%s", err, base)
	}
	for _, bad := range []string{"", "a b", "registry/name:v1", "registry/name@sha256", "/name", "name/", "a|b"} {
		if out, err := exec.Command(filepath.Join(dir, "hack/image-name"), bad).CombinedOutput(); err == nil {
			t.Errorf("%q is taken as a name: %s", bad, out)
		}
	}
}
