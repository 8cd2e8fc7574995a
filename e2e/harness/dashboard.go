package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Dashboard is what is read of a Grafana dashboard.
type Dashboard struct {
	Panels     []Panel
	Templating struct{ List []struct{ Definition string } }
}

// Panel is a panel of a dashboard, or the title of a row of them, which asks for nothing.
type Panel struct {
	Title   string
	Targets []struct{ Expr string }
}

// ReadDashboard reads a Grafana dashboard.
func ReadDashboard(file string) (Dashboard, error) {
	var d Dashboard
	text, err := os.ReadFile(file)
	if err != nil {
		return d, err
	}
	if err := json.Unmarshal(text, &d); err != nil {
		return d, fmt.Errorf("%s: %w", file, err)
	}
	return d, nil
}

// DashboardQueries reads the queries out of a Grafana dashboard: those of its panels and those of its variables.
func DashboardQueries(file string) ([]string, error) {
	d, err := ReadDashboard(file)
	var out []string
	for _, v := range d.Templating.List {
		if v.Definition != "" {
			out = append(out, v.Definition)
		}
	}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			out = append(out, target.Expr)
		}
	}
	return out, err
}

// Shows returns an error if, with no more than this scrape, a panel would have nothing to show: where one of its queries does not resolve, or
// asks for a quantile of a histogram in which nothing was observed.
func (s *Scrape) Shows(p Panel) error {
	for _, target := range p.Targets {
		if err := s.Resolve(target.Expr); err != nil {
			return err
		}
		if !strings.Contains(target.Expr, "histogram_quantile(") {
			continue
		}
		for _, sel := range querySelector.FindAllStringSubmatch(target.Expr, -1) {
			if name := strings.TrimSuffix(sel[1], "_bucket"); s.Sum(name) == 0 {
				return fmt.Errorf("nothing is observed in %s", name)
			}
		}
	}
	return nil
}

var (
	// What is scraped has one of these at its beginning; functions of the query language have not.
	querySelector = regexp.MustCompile(`\b((?:kubeproxy|nodeproxy|process|go|rest_client)_[a-z0-9_]+)(?:\{([^}]*)\})?`)
	queryMatcher  = regexp.MustCompile(`^([a-z_]+)(=~|!~|!=|=)"([^"]*)"$`)
	queryGroups   = regexp.MustCompile(`\bby \(([^)]*)\)`)
)

// targetLabels are those that Prometheus adds.
var targetLabels = []string{"job", "instance"}

// Resolve returns an error if Prometheus, with no more than this scrape, would have nothing for some part of a query: where no
// series matches a selector, or none of those that match has a label that the query groups by or a variable stands for.
func (s *Scrape) Resolve(query string) error {
	var seen []Series
	for _, sel := range querySelector.FindAllStringSubmatch(query, -1) {
		series, err := s.matching(sel[1], sel[2])
		if err != nil {
			return fmt.Errorf("%w: %s", err, query)
		}
		seen = append(seen, series...)
	}
	if len(seen) == 0 {
		return fmt.Errorf("there is no metric in %s", query)
	}
	for _, by := range queryGroups.FindAllStringSubmatch(query, -1) {
		for label := range strings.SplitSeq(by[1], ",") {
			label = strings.TrimSpace(label)
			has := func(x Series) bool { _, ok := x.Labels[label]; return ok }
			if !slices.Contains(targetLabels, label) && !slices.ContainsFunc(seen, has) {
				return fmt.Errorf("no metric has label %s: %s", label, query)
			}
		}
	}
	return nil
}

// matching returns the series of a name that all matchers let through; it is an error if there is none.
func (s *Scrape) matching(name, matchers string) ([]Series, error) {
	left := slices.Clone(s.Series[name])
	for text := range strings.SplitSeq(matchers, ",") {
		m := queryMatcher.FindStringSubmatch(strings.TrimSpace(text))
		if m == nil && text != "" {
			return nil, fmt.Errorf("%q is no matcher of labels", text)
		}
		if m == nil || slices.Contains(targetLabels, m[1]) {
			continue
		}
		left = slices.DeleteFunc(left, func(x Series) bool {
			value, has := x.Labels[m[1]]
			if !has || strings.HasPrefix(m[3], "$") { // a variable, of which any value will do
				return !has
			}
			same := value == m[3]
			if strings.HasSuffix(m[2], "~") {
				same = regexp.MustCompile("^(?:" + m[3] + ")$").MatchString(value)
			}
			return same == strings.HasPrefix(m[2], "!")
		})
	}
	if len(left) == 0 {
		return nil, fmt.Errorf("there is no %s{%s}", name, matchers)
	}
	return left, nil
}
