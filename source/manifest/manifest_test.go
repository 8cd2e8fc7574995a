package manifest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/source"
	"nodeproxy/source/sourcetest"
)

// What the tests of this package and those of controlplane share.
type findings = sourcetest.Findings

const webSelector = sourcetest.WebSelector

var (
	service, slice, pod       = sourcetest.Service, sourcetest.Slice, sourcetest.Pod
	describe, describeService = sourcetest.Describe, sourcetest.DescribeService
	nameOf, prefixes, same    = sourcetest.Name, sourcetest.Prefixes, sourcetest.Same
)

// writeFiles makes a directory of files. The text of one is given as "name: content".
func writeFiles(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		write(t, filepath.Join(dir, name), content)
	}
	return dir
}

func write(t testing.TB, path, content string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
}

// load loads one manifest; names of files in the findings are without their directory.
func load(t testing.TB, manifest string, change ...func(*Config)) (source.Batch, findings) {
	t.Helper()
	return loadFiles(t, map[string]string{"m.yaml": manifest}, change...)
}

func loadFiles(t testing.TB, files map[string]string, change ...func(*Config)) (source.Batch, findings) {
	t.Helper()
	dir := writeFiles(t, files)
	var f findings
	cfg := Config{Path: dir, Report: f.Report}
	for _, c := range change {
		c(&cfg)
	}
	batch, err := Load(cfg)
	require.NoError(t, err)
	for i := range f {
		f[i].Where = strings.ReplaceAll(f[i].Where, dir+"/", "")
		f[i].Detail = strings.ReplaceAll(f[i].Detail, dir+"/", "")
	}
	return batch, f
}
