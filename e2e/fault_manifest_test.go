package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// manifestFault is something that happens to the file of all manifests while requests are under way.
type manifestFault struct {
	injected string
	// inject does it; mend makes the file what it was before, where that is more than writing it anew.
	inject, mend func(s *manifestScene)
	// green is set where /readyz may say that the node is ready.
	green bool
}

// manifestScene is a faultScene of which all objects are in one file, on a small file system, with a daemon that may not read
// what it has no permission for.
type manifestScene struct {
	*faultScene
	dir, file, text string
}

// documents is how many the file has: Nodes, Services and EndpointSlices.
const documents = 20

// leftFor is how long a fault lasts: longer than a file is given to settle.
const leftFor = 4 * time.Second

var manifestFaults = []manifestFault{
	{injected: fmt.Sprintf("a file of %d documents cut off at every byte, one after the other", documents), inject: func(s *manifestScene) {
		for at := len(s.text) - 1; at >= 0; at-- {
			require.NoError(s, os.Truncate(s.file, int64(at)))
			time.Sleep(2 * time.Millisecond) // Some of the states are to be read, and nothing says which were.
		}
	}},
	{injected: "cut off within a number, and left so", inject: func(s *manifestScene) {
		at := regexp.MustCompile(`port: \d\d`).FindAllStringIndex(s.text, -1)
		require.NoError(s, os.Truncate(s.file, int64(at[len(at)-1][1]-1)))
	}},
	{injected: "cut off at the end of a line within a document, and left so", inject: func(s *manifestScene) {
		require.NoError(s, os.Truncate(s.file, int64(strings.LastIndex(s.text, "ports:")+len("ports:\n"))))
	}},
	{injected: "emptied, and left so", inject: func(s *manifestScene) { require.NoError(s, os.Truncate(s.file, 0)) }},
	{injected: "no room on the disk to write it anew", inject: func(s *manifestScene) {
		require.NoError(s, os.Truncate(s.file, 0))
		s.fill(fullRun)
		if err := os.WriteFile(s.file, []byte(s.text), 0o644); !errors.Is(err, syscall.ENOSPC) {
			s.Errorf("writing on a full disk: %v", err)
		}
	}, mend: func(s *manifestScene) { s.empty(fullRun) }},
	{injected: "a dangling symbolic link in its place", inject: func(s *manifestScene) {
		require.NoError(s, os.Symlink("/does/not/exist", s.file+".new"))
		require.NoError(s, os.Rename(s.file+".new", s.file))
	}, mend: func(s *manifestScene) { // Not by removing it first: that would be the removal of a file.
		require.NoError(s, os.WriteFile(s.file+".new", []byte(s.text), 0o644))
		require.NoError(s, os.Rename(s.file+".new", s.file))
	}},
	{injected: "no permission to read it", inject: func(s *manifestScene) {
		require.NoError(s, os.Chmod(s.file, 0))
		require.NoError(s, os.Truncate(s.file, int64(len(s.text)/2)))
	}, mend: func(s *manifestScene) { require.NoError(s, os.Chmod(s.file, 0o644)) }},
	{injected: "the directory gone", inject: func(s *manifestScene) { require.NoError(s, os.Rename(s.dir, s.dir+".away")) },
		mend: func(s *manifestScene) { require.NoError(s, os.Rename(s.dir+".away", s.dir)) }},
	{injected: "an empty directory in its place", inject: func(s *manifestScene) {
		require.NoError(s, os.Rename(s.dir, s.dir+".away"))
		require.NoError(s, os.Mkdir(s.dir, 0o755))
	}, mend: func(s *manifestScene) {
		require.NoError(s, os.Remove(s.dir))
		require.NoError(s, os.Rename(s.dir+".away", s.dir))
	}},
	{injected: "written anew in place, in 8 pieces with pauses of 0.4 s", green: true, inject: func(s *manifestScene) {
		out, err := os.Create(s.file)
		require.NoError(s, err)
		const pieces = 8
		for i := range pieces {
			_, err := out.WriteString(s.text[len(s.text)*i/pieces : len(s.text)*(i+1)/pieces])
			require.NoError(s, err)
			time.Sleep(400 * time.Millisecond) // Who writes is slow.
		}
		require.NoError(s, out.Close())
	}},
	{injected: "cut off in the middle, and a start over that", inject: func(s *manifestScene) {
		require.NoError(s, os.Truncate(s.file, int64(len(s.text)/2)))
		s.restart()
	}},
	{injected: "emptied, and a start over that", inject: func(s *manifestScene) {
		require.NoError(s, os.Truncate(s.file, 0))
		s.restart()
	}},
}

// TestFaultManifests: whatever becomes of the file of manifests, no request fails, the node says that it is not ready, and why,
// and when the file is whole again, it is.
func TestFaultManifests(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		s := newManifestScene(t, variant)
		s.start()
		for _, fault := range manifestFaults {
			s.suffer(fault)
		}
		s.flags = append(s.flags, "--manifests="+s.Manifests) // The other node's daemon reads what this one has read.
		s.finish()
	})
}

func newManifestScene(t *testing.T, variant harness.Variant) *manifestScene {
	s := &manifestScene{faultScene: newFaultScene(t, variant, "manifests", "all of the above, the change of a Service afterwards")}
	files, err := filepath.Glob(filepath.Join(s.Manifests, "*.yaml"))
	require.NoError(s, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(s, err)
		if base := filepath.Base(file); base != "changing.yaml" && base != "none.yaml" {
			s.text += string(text)
			require.NoError(s, os.Remove(file))
		}
	}
	for i := range 2 {
		s.text += fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: more-%d}\nspec:\n  clusterIP: 10.96.200.%d\n  ports:\n  - port: 8080\n",
			i, i+1)
	}
	if n := strings.Count(s.text, "---\n"); n != documents {
		t.Fatalf("%d documents", n)
	}
	s.WriteText(t, "all.yaml", s.text)
	s.fullDisks()
	launch := s.Launch
	s.Launch = func(path string, args ...string) *exec.Cmd {
		cmd := launch(path, args...)
		for i, arg := range cmd.Args { // Root may read anything, but for these capabilities.
			cmd.Args[i] = strings.Replace(arg, "exec /proc/self/fd/3",
				"exec setpriv --bounding-set=-dac_override,-dac_read_search /proc/self/fd/3", 1)
		}
		return cmd
	}
	return s
}

func (s *manifestScene) start() {
	s.Helper()
	s.faultScene.start()
	s.locate()
}

// locate finds the manifests as the daemon sees them.
func (s *manifestScene) locate() {
	s.dir = s.seen(fullManifests)
	s.file = filepath.Join(s.dir, "all.yaml")
}

// restart ends the daemon, and starts one that reads the same files.
func (s *manifestScene) restart() {
	s.Helper()
	held, err := os.ReadFile(s.file)
	require.NoError(s, err)
	require.NoError(s, os.WriteFile(filepath.Join(s.Manifests, "all.yaml"), held, 0o644))
	require.NoError(s, s.daemon.Stop())
	s.daemon, err = s.StartDaemon(s.Node1(), append([]string{"--iptables-backend=" + string(s.variant),
		"--ipvs-vips=" + string(harness.VIPsWith(s.variant))}, s.flags...)...)
	require.NoError(s, err)
	require.NoError(s, s.daemon.WaitFor(harness.StartupTimeout, harness.InSync))
	require.NoError(s, os.WriteFile(filepath.Join(s.Manifests, "all.yaml"), []byte(s.text), 0o644))
	s.locate()
}

// ready returns what /readyz says: the code, and the first thing that is missing.
func (s *manifestScene) ready() (code, missing string) {
	s.Helper()
	answer, err := s.Node1().Output("curl", "-s", "-w", " %{http_code}", "http://127.0.0.1:10256/readyz")
	if err != nil {
		return "", err.Error()
	}
	if _, detail, found := strings.Cut(answer, `"detail":"`); found {
		missing, _, _ = strings.Cut(detail, `"`)
		missing = strings.ReplaceAll(missing, fullManifests+"/", "")
	}
	return answer[len(answer)-3:], missing
}

// suffer lets a fault happen, and adds its row.
func (s *manifestScene) suffer(fault manifestFault) {
	s.Helper()
	row := faultRow{Fault: "manifests", Injected: fault.injected, Mode: mode, Variant: s.variant}
	requests, failed := s.counts()
	fault.inject(s)
	begin := time.Now()
	code, missing := "200", ""
	for ; code != "503" && time.Since(begin) < harness.Limit && !fault.green; time.Sleep(20 * time.Millisecond) {
		code, missing = s.ready()
	}
	if code != "503" && !fault.green {
		s.Errorf("%s: /readyz says %s", fault.injected, code)
	}
	if !fault.green {
		if sum := s.Node1().Scrape(s.T).Sum("nodeproxy_manifests_faulty"); sum != 1 {
			s.Errorf("%s: nodeproxy_manifests_faulty is %v", fault.injected, sum)
		}
	}
	time.Sleep(leftFor) // Nothing is to change as long as the fault lasts.
	if fault.mend != nil {
		fault.mend(s)
	}
	require.NoError(s, os.WriteFile(s.file, []byte(s.text), 0o644))
	end := time.Now()
	eventually(s.T, "/readyz when the file is whole again", func() error {
		if code, missing := s.ready(); code != "200" {
			return fmt.Errorf("%s: %s", code, missing)
		}
		return nil
	})
	row.Repair = fmt.Sprintf("/readyz 200 after %v, before: %s %s", time.Since(end).Round(10*time.Millisecond), code, missing)
	s.enough()
	now, bad := s.counts()
	row.Requests, row.Failed, row.OK = now-requests, bad-failed, !s.Failed() && bad == failed
	s.Logf("%s: %d requests, %d failed; %s", fault.injected, row.Requests, row.Failed, row.Repair)
	addFault(row)
}

// counts are the requests made so far, and those that failed.
func (s *manifestScene) counts() (requests, failed int) {
	for _, l := range s.loads {
		requests += l.Requests()
		failed += len(l.Failures())
	}
	return requests, failed
}
