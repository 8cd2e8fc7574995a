package harness

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const sampleScrape = `# HELP nodeproxy_a_total What a is.
# TYPE nodeproxy_a_total counter
nodeproxy_a_total{code="200",path="a\"b\\c"} 3
nodeproxy_a_total{code="503",path=""} 1e+06
# HELP nodeproxy_d_seconds How long.
# TYPE nodeproxy_d_seconds histogram
nodeproxy_d_seconds_bucket{le="+Inf"} 2
nodeproxy_d_seconds_sum 1.5
nodeproxy_d_seconds_count 2
`

func TestParseScrape(t *testing.T) {
	s, err := ParseScrape(sampleScrape)
	require.NoError(t, err)
	if v := s.Sum("nodeproxy_a_total", "code=200", `path=a"b\c`); v != 3 {
		t.Errorf("the first series is %v", v)
	}
	if v := s.Sum("nodeproxy_a_total"); v != 1000003 {
		t.Errorf("all are %v", v)
	}
	if s.Sum("nodeproxy_d_seconds") != 2 || len(s.Labels("nodeproxy_d_seconds")) != 0 || len(s.Labels("nodeproxy_a_total")) != 2 {
		t.Errorf("read as %+v", s)
	}
	for _, bad := range []string{"a{b=c} 1\n", "a 1 2 3\n", "a one\n"} {
		if _, err := ParseScrape(bad); err == nil {
			t.Errorf("%q is taken for metrics", bad)
		}
	}
}

func TestResolve(t *testing.T) {
	s, err := ParseScrape(sampleScrape)
	require.NoError(t, err)
	for query, want := range map[string]bool{
		`sum(rate(nodeproxy_a_total{job="$job",code="503"}[5m]))`:            true,
		`sum by (code, instance) (nodeproxy_a_total{code=~"5..",path!="x"})`: true,
		`nodeproxy_a_total{path=~"$path"}`:                                   true,
		`rate(nodeproxy_d_seconds_bucket[5m]) / nodeproxy_a_total`:           true,
		`nodeproxy_a_total{code="404"}`:                                      false,
		`nodeproxy_a_total{code!~"200|503"}`:                                 false,
		`nodeproxy_a_total{kind=~"$kind"}`:                                   false,
		`sum by (kind) (nodeproxy_a_total)`:                                  false,
		`rate(nodeproxy_d_seconds[5m])`:                                      false,
		`nodeproxy_a_total{code}`:                                            false,
		`vector(0)`:                                                          false,
	} {
		if err := s.Resolve(query); (err == nil) != want {
			t.Errorf("%s: %v", query, err)
		}
	}
}

func TestShows(t *testing.T) {
	s, err := ParseScrape(sampleScrape + `# TYPE nodeproxy_e_seconds histogram
nodeproxy_e_seconds_bucket{le="+Inf"} 0
nodeproxy_e_seconds_sum 0
nodeproxy_e_seconds_count 0
`)
	require.NoError(t, err)
	for query, want := range map[string]bool{
		`histogram_quantile(0.5, rate(nodeproxy_d_seconds_bucket[5m]))`: true,
		`histogram_quantile(0.5, rate(nodeproxy_e_seconds_bucket[5m]))`: false,
		`rate(nodeproxy_e_seconds_bucket[5m])`:                          true,
		`nodeproxy_f`:                                                   false,
	} {
		if err := s.Shows(Panel{Targets: []struct{ Expr string }{{`nodeproxy_a_total`}, {query}}}); (err == nil) != want {
			t.Errorf("%s: %v", query, err)
		}
	}
}
