package deploy

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

func TestMain(m *testing.M) {
	os.Exit(harness.Main(m))
}

// project is a path inside the project.
func project(t testing.TB, elements ...string) string {
	t.Helper()
	root, err := harness.ProjectDir()
	require.NoError(t, err)
	return filepath.Join(append([]string{root}, elements...)...)
}

// toolsDir is the directory with helm and kubectl. They are built if they are not there, which takes some minutes the first
// time.
var toolsDir = sync.OnceValues(func() (string, error) { return harness.Made("e2e/deploy/tools/build") })

func tool(t testing.TB, name string) string {
	t.Helper()
	dir, err := toolsDir()
	require.NoError(t, err)
	return filepath.Join(dir, name)
}

// output runs a command, which must succeed, and returns what it printed on stdout.
func output(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := attempt(name, args...)
	require.NoError(t, err)
	return out
}

// attempt is output for a command that may fail. The error has what it printed on stderr.
func attempt(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}
