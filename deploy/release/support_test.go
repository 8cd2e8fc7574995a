package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSupport: docs/support.md says what the tests try, no less and no more.
func TestSupport(t *testing.T) {
	read := func(path string) string {
		t.Helper()
		content, err := os.ReadFile("../../" + path)
		require.NoError(t, err)
		return string(content)
	}
	doc := read("docs/support.md")
	row := func(first string) []string {
		t.Helper()
		for line := range strings.Lines(doc) {
			if cells := strings.Split(line, " | "); strings.TrimPrefix(cells[0], "| ") == first {
				return cells
			}
		}
		t.Fatalf("docs/support.md has no row %s", first)
		return nil
	}

	dirs, err := filepath.Glob("../../testdata/kubernetes/1.*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("%q, %v", dirs, err)
	}
	lowest, highest := filepath.Base(dirs[0]), filepath.Base(dirs[len(dirs)-1])
	if got, want := row("Kubernetes")[1], lowest+" to "+highest; got != want {
		t.Errorf("Kubernetes %s, want %s", got, want)
	}
	if want := `kubeVersion: ">=` + lowest + `.0-0"`; !strings.Contains(read("deploy/chart/Chart.yaml"), want) {
		t.Errorf("the chart does not say %s", want)
	}
	if want := "k8s.io/api v0" + strings.TrimPrefix(highest, "1") + "."; !strings.Contains(read("go.mod"), want) {
		t.Errorf("go.mod has no %s, which is the highest version", want)
	}

	var archs []string
	for _, arch := range strings.Fields(regexp.MustCompile(`(?m)^archs="(.*)"$`).FindStringSubmatch(read("hack/release"))[1]) {
		archs = append(archs, "linux/"+arch)
	}
	if got, want := row("architectures")[1], strings.Join(archs, ", "); got != want {
		t.Errorf("architectures %s, want %s", got, want)
	}

	releases := strings.Fields(regexp.MustCompile(`then set -- ([a-z ]+);`).FindStringSubmatch(read("hack/versions"))[1])
	var named []string
	for _, m := range regexp.MustCompile(`\((\w+)\)`).FindAllStringSubmatch(doc[strings.Index(doc, "| release |"):], -1) {
		named = append(named, m[1])
	}
	slices.Sort(releases)
	slices.Sort(named)
	if !slices.Equal(named, releases) {
		t.Errorf("docs/support.md names the releases %q, hack/versions tries %q", named, releases)
	}
	var versions []string
	for _, m := range regexp.MustCompile(`(?m)^\| (1\.8\.\d+) \|`).FindAllStringSubmatch(doc, -1) {
		versions = append(versions, m[1])
	}
	if got, want := row("iptables")[1], strings.Join(versions, ", ")+","; !strings.HasPrefix(got, want) {
		t.Errorf("iptables %s, want %s", got, want)
	}
}
