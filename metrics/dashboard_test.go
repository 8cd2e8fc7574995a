package metrics

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const dashboardFile = "../deploy/dashboard/nodeproxy.json"

// dashboard is what is read of a Grafana dashboard.
type dashboard struct {
	Panels []struct {
		ID          int
		Type, Title string
		Targets     []struct{ Expr string }
		GridPos     struct{ H, W, X, Y int }
	}
	Templating struct {
		List []struct {
			Name, Type string
			Definition string
		}
	}
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	require.NoError(t, err)
	var d dashboard
	require.NoError(t, json.Unmarshal(text, &d), "%s", dashboardFile)
	return d
}

var (
	metricName = regexp.MustCompile(`\b(?:kubeproxy|nodeproxy|process|go|rest_client)_[a-z0-9_]+`)
	selector   = regexp.MustCompile(`([a-z0-9_]+)\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`^([a-z_]+)(?:=~|!~|!=|=)"[^"]*"$`)
	grouping   = regexp.MustCompile(`by \(([^)]*)\)`)
	variable   = regexp.MustCompile(`\$(\w+)`)
)

// scraped is what a live Set shows: the labels of each series name as Prometheus has it, histograms as their three.
func scraped(t *testing.T, mode string) map[string][]string {
	t.Helper()
	s := inUse(mode)
	r := NewRESTClient()
	r.requests.WithLabelValues("200", "GET", "host").Inc()
	s.CollectRESTClient(r)
	out := map[string][]string{}
	for name, m := range gather(t, s) {
		labels := []string{"job", "instance"} // Prometheus adds these.
		for _, l := range m.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		if m.GetMetric()[0].Histogram == nil {
			out[name] = labels
			continue
		}
		out[name+"_bucket"] = append(slices.Clone(labels), "le")
		out[name+"_sum"], out[name+"_count"] = labels, labels
	}
	return out
}

// byPackets are metrics that only mode ipvs has: the rules of the other modes see the first packet of a connection only.
var byPackets = regexp.MustCompile(`nodeproxy_service_(packets|bytes)_total`)

// TestDashboardQueries: every metric and every label that the dashboard asks for is in a scrape, in any mode, but for byPackets.
func TestDashboardQueries(t *testing.T) {
	t.Parallel()
	d := readDashboard(t)
	var queries []string
	variables := []string{"__rate_interval"}
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
		if v.Definition != "" {
			queries = append(queries, v.Definition)
		}
	}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			queries = append(queries, target.Expr)
		}
	}
	for _, mode := range Modes() {
		series := scraped(t, mode)
		for _, query := range queries {
			if mode != ipvs && byPackets.MatchString(query) {
				continue
			}
			checkQuery(t, query, series)
		}
	}
	for _, query := range queries {
		for _, v := range variable.FindAllStringSubmatch(query, -1) {
			if !slices.Contains(variables, v[1]) {
				t.Errorf("there is no variable %s: %s", v[1], query)
			}
		}
		if n := strings.Count(query, "("); n != strings.Count(query, ")") {
			t.Errorf("parentheses do not match: %s", query)
		}
	}
	if len(queries) < 40 {
		t.Errorf("only %d queries were found", len(queries))
	}
}

func checkQuery(t *testing.T, query string, series map[string][]string) {
	t.Helper()
	names := metricName.FindAllString(query, -1)
	if len(names) == 0 {
		t.Errorf("there is no metric in %s", query)
	}
	var labels []string
	for _, name := range names {
		if series[name] == nil {
			t.Errorf("there is no %s: %s", name, query)
		}
		labels = append(labels, series[name]...)
	}
	for _, sel := range selector.FindAllStringSubmatch(query, -1) {
		for m := range strings.SplitSeq(sel[2], ",") {
			label := matcher.FindStringSubmatch(m)
			if label == nil || !slices.Contains(series[sel[1]], label[1]) {
				t.Errorf("%s has no label for %s: %s", sel[1], m, query)
			}
		}
	}
	for _, by := range grouping.FindAllStringSubmatch(query, -1) {
		for label := range strings.SplitSeq(by[1], ", ") {
			if !slices.Contains(labels, label) {
				t.Errorf("no metric has label %s: %s", label, query)
			}
		}
	}
}

// TestDashboardLayout: panels have ids of their own, do not overlap, and are grouped in the rows that there should be.
func TestDashboardLayout(t *testing.T) {
	t.Parallel()
	ids := map[int]bool{}
	type cell struct{ x, y int }
	taken := map[cell]string{}
	var rows []string
	for _, p := range readDashboard(t).Panels {
		if ids[p.ID] {
			t.Errorf("%s: the id %d is another's", p.Title, p.ID)
		}
		ids[p.ID] = true
		if p.Type == "row" {
			rows = append(rows, p.Title)
		} else if len(p.Targets) == 0 {
			t.Errorf("%s asks for nothing", p.Title)
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other, ok := taken[cell{x, y}]; ok || x >= 24 {
					t.Fatalf("%s is where %q is, or outside", p.Title, other)
				}
				taken[cell{x, y}] = p.Title
			}
		}
	}
	want := []string{"Overview", "Sync latency", "Network programming latency", "Services and endpoints", "Staleness", "Failures",
		"Connection tracking", "Drift", "Traffic by Service", "Process"}
	if !slices.Equal(rows, want) {
		t.Errorf("rows are %q, want %q", rows, want)
	}
}
