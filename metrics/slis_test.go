package metrics

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// TestSLIs: names, types and labels are those of Kubernetes' components; values are those of the last answers, and of all.
func TestSLIs(t *testing.T) {
	t.Parallel()
	s := New(Config{Mode: iptables})
	for path, codes := range map[string][]int{"/healthz": {503, 200, 200}, "/livez": {200, 503}, "/other": {200}} {
		for _, code := range codes {
			s.Answered(path, code)
		}
	}
	w := httptest.NewRecorder()
	s.SLIHandler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics/slis", nil))
	text := w.Body.String()
	const want = `# HELP kubernetes_healthcheck What a health check answered last: 1 for success, 0 for failure.
# TYPE kubernetes_healthcheck gauge
kubernetes_healthcheck{name="nodeproxy",type="healthz"} 1
kubernetes_healthcheck{name="nodeproxy",type="livez"} 0
# HELP kubernetes_healthchecks_total Answers of health checks, by outcome: success or error.
# TYPE kubernetes_healthchecks_total counter
kubernetes_healthchecks_total{name="nodeproxy",status="error",type="healthz"} 1
kubernetes_healthchecks_total{name="nodeproxy",status="error",type="livez"} 1
kubernetes_healthchecks_total{name="nodeproxy",status="success",type="healthz"} 2
kubernetes_healthchecks_total{name="nodeproxy",status="success",type="livez"} 1
`
	if text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	if problems, err := promlint.New(strings.NewReader(text)).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}
