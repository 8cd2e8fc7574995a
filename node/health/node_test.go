package health

import (
	"encoding/json"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// ask returns code and body of an answer, with times as seconds since start.
func ask(t *testing.T, n *Node, path string, start time.Time) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	n.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	for name, want := range map[string]string{"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"} {
		if got := w.Header().Get(name); got != want {
			t.Errorf("%s: %s is %q, want %q", path, name, got, want)
		}
	}
	body := w.Body.String()
	for i := range 300 {
		body = strings.ReplaceAll(body, `"`+start.Add(time.Duration(i)*time.Second).Format(time.RFC3339Nano)+`"`,
			time.Duration(i*int(time.Second)).String())
	}
	return w.Code, strings.ReplaceAll(body, `"0001-01-01T00:00:00Z"`, "never")
}

// TestNodeLife walks a node through its life and holds each answer to the byte.
func TestNodeLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		n := NewNode(NodeConfig{Families: plan.Families[:], Timeout: 20 * time.Second})
		answer := func(programmed, now, eligible, healthy string) string {
			family := `{"lastUpdated":` + programmed + `,"healthy":` + healthy + `}`
			return `{"lastUpdated":` + programmed + `,"currentTime":` + now + eligible + `,"healthy":` + healthy +
				`,"status":{"IPv4":` + family + `,"IPv6":` + family + `}}`
		}
		const eligible, leaving = `,"nodeEligible":true`, `,"nodeEligible":false`
		check := func(what, path string, code int, want string) {
			t.Helper()
			if c, body := ask(t, n, path, start); c != code || body != want {
				t.Errorf("%s: %s is %d %s\nwant %d %s", what, path, c, body, code, want)
			}
		}
		healthy := func(what string, want bool) {
			t.Helper()
			if got := n.Healthy(); got != want {
				t.Errorf("%s: healthy is %t", what, got)
			}
		}
		check("at first", "/healthz", 503, answer("never", "0s", eligible, "false"))
		check("at first", "/livez", 200, answer("never", "0s", "", "true"))
		healthy("at first", false)

		time.Sleep(100 * time.Second)
		check("nothing comes", "/livez", 200, answer("never", "1m40s", "", "true"))
		n.Synced()
		n.Queued()
		n.Taken()
		time.Sleep(19 * time.Second)
		check("the first sync lasts", "/livez", 200, answer("never", "1m59s", "", "true"))
		time.Sleep(time.Second)
		check("the first sync lasts too long", "/livez", 503, answer("never", "2m0s", "", "false"))
		n.Programmed()
		check("programmed", "/healthz", 200, answer("2m0s", "2m0s", eligible, "true"))
		healthy("programmed", true)

		time.Sleep(10 * time.Second)
		check("quiet", "/livez", 200, answer("2m0s", "2m10s", "", "true"))
		n.Leaving(true)
		check("about to go", "/healthz", 503, answer("2m0s", "2m10s", leaving, "true"))
		check("about to go", "/livez", 200, answer("2m0s", "2m10s", "", "true"))
		healthy("about to go", true)
		n.Leaving(false)
		check("not to go after all", "/healthz", 200, answer("2m0s", "2m10s", eligible, "true"))

		n.Queued()
		time.Sleep(15 * time.Second)
		n.Queued() // does not make the first one younger
		time.Sleep(5 * time.Second)
		check("late", "/healthz", 503, answer("2m0s", "2m30s", eligible, "false"))
		if got := n.OldestChange(); got != 20*time.Second {
			t.Errorf("the oldest change has waited for %s", got)
		}
		healthy("late", false)
		n.Taken()
		n.Queued()
		check("late and being programmed", "/livez", 503, answer("2m0s", "2m30s", "", "false"))
		n.Programmed()
		check("programmed again", "/healthz", 200, answer("2m30s", "2m30s", eligible, "true"))
		time.Sleep(20 * time.Second)
		check("what came meanwhile is late", "/healthz", 503, answer("2m30s", "2m50s", eligible, "false"))
	})
}

// TestProgress: of a change that is programmed in parts, each part counts, and the rest gets late when no more of it is programmed.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNode(NodeConfig{Timeout: 20 * time.Second})
		n.Queued()
		n.Taken()
		for range 5 {
			time.Sleep(7 * time.Second)
			n.Progressed()
			n.Taken() // nothing has come meanwhile
			if !n.Healthy() {
				t.Error("unhealthy while a large change is being programmed")
			}
		}
		time.Sleep(20 * time.Second)
		if n.Healthy() {
			t.Error("healthy though the rest of a change has not been programmed for 20 s")
		}
		n.Programmed()
		if time.Sleep(time.Hour); !n.Healthy() {
			t.Error("unhealthy when all is programmed")
		}
	})
}

// TestFailedSync: changes that sync after sync fails to program stay as old as they are.
func TestFailedSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNode(NodeConfig{Timeout: 20 * time.Second})
		n.Queued()
		n.Taken()
		n.Programmed()
		for range 3 {
			n.Queued()
			n.Taken()
			time.Sleep(7 * time.Second)
		}
		if n.Healthy() {
			t.Error("healthy with a change that is 21 s old")
		}
		n.Programmed()
		if !n.Healthy() {
			t.Error("unhealthy after a sync that succeeded")
		}
	})
}

func TestReadyz(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watches := []source.Watch{{Resource: "services", Age: -1}, {Resource: "nodes", Age: -1, Failure: "list: no route"}}
		n := NewNode(NodeConfig{Timeout: 20 * time.Second, Watches: func() []source.Watch { return watches }})
		const notSynced, notProgrammed = "synced: not all objects have been delivered yet", "programmed: no sync has succeeded yet"
		check := func(what string, want ...string) {
			t.Helper()
			w := httptest.NewRecorder()
			n.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/readyz", nil))
			if never := slices.Contains(want, notProgrammed); never == strings.Contains(w.Body.String(), `"lastUpdated"`) {
				t.Errorf("%s: %s", what, w.Body)
			}
			var got struct {
				Ready   *bool
				Missing []Missing
				Watches []struct {
					Resource   string
					AgeSeconds float64
					Failure    string
				}
			}
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatalf("%s: %v: %s", what, err, w.Body)
			}
			var lines []string
			for _, m := range got.Missing {
				lines = append(lines, m.Condition+": "+m.Detail)
			}
			if strings.Join(lines, "\n") != strings.Join(want, "\n") {
				t.Errorf("%s: missing\n%s\nwant\n%s", what, strings.Join(lines, "\n"), strings.Join(want, "\n"))
			}
			if got.Ready == nil || *got.Ready != (len(want) == 0) || (w.Code == 200) != *got.Ready || w.Code != 200 && w.Code != 503 {
				t.Errorf("%s: code %d: %s", what, w.Code, w.Body)
			}
			age := watches[0].Age.Seconds()
			if age < 0 {
				age = -1
			}
			if len(got.Watches) != len(watches) || got.Watches[0].AgeSeconds != age {
				t.Errorf("%s: watches are %+v", what, got.Watches)
			}
		}
		check("at first", notSynced, notProgrammed, "fresh: nodes: nothing has come from the source: list: no route")
		n.WaitFor("kube-proxy, process 7")
		watches = []source.Watch{{Resource: "services", Synced: true, Age: time.Second}}
		check("another proxy", "free: nothing is written before this is gone: kube-proxy, process 7", notSynced, notProgrammed)
		n.WaitFor("")
		n.Synced()
		check("synced", notProgrammed)
		n.Queued()
		n.Taken()
		n.Programmed()
		check("programmed")
		n.Queued()
		time.Sleep(20 * time.Second)
		check("late", "in-time: a change has waited to be programmed for 20s; more than 20s is too long")
		n.Taken()
		n.Programmed()
		n.Leaving(true)
		check("about to go")
		watches[0].Age, watches[0].Failure = 5*time.Minute, "watch: refused"
		check("stale", "fresh: services: nothing has come from the source for 5m0s; 5m0s or more is too long: watch: refused")
		watches[0].Age = -1
		check("never heard", "fresh: services: nothing has ever come from the source: watch: refused")
	})
}

func TestAnsweredIsCounted(t *testing.T) {
	t.Parallel()
	got := map[string]int{}
	n := NewNode(NodeConfig{Answered: func(path string, code int) { got[path] = code }})
	for _, path := range []string{"/healthz", "/livez", "/readyz", "/other"} {
		n.Handler().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", path, nil))
	}
	if len(got) != 3 || got["/healthz"] != 503 || got["/livez"] != 200 || got["/readyz"] != 503 {
		t.Errorf("answers are %v", got)
	}
}
