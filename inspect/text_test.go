package inspect

import (
	"strings"
	"testing"
	"time"
)

func TestUse(t *testing.T) {
	t.Parallel()
	for want, ep := range map[string]Endpoint{
		"yes":           {UsedFor: []string{"Cluster"}},
		"no: not ready": {Unused: map[string]string{"Cluster": "not ready", "Local": "not ready"}},
		"under policy Cluster; not under Local: elsewhere": {UsedFor: []string{"Cluster"}, Unused: map[string]string{"Local": "elsewhere"}},
		"not under Cluster: other zone; not under Local: elsewhere": {
			Unused: map[string]string{"Cluster": "other zone", "Local": "elsewhere"},
		},
	} {
		if got := ep.use(); got != want {
			t.Errorf("%+v: %q, want %q", ep, got, want)
		}
	}
}

// TestWriteServicePorts: an empty cell is never empty text, several addresses share a cell, and a cell can't end its row.
func TestWriteServicePorts(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	var out strings.Builder
	if err := WriteServicePorts(&out, []ServicePort{{
		Namespace: "a", Name: "b\nc", Port: "http", Number: 80, Protocol: "TCP", Family: "IPv4", LoadBalancerIPs: []string{"192.0.2.1"},
		ExternalIPs: []string{"192.0.2.2"}, InternalPolicy: "Cluster", Affinity: 90, State: Programmed, Since: now.Add(-2 * time.Hour), Total: 3,
		Counters: &Counters{7, -1, -1, -1, -1},
	}}, true, now); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := `a b\nc 80/TCP(http) <none> 192.0.2.1,192.0.2.2 <none> 0/3 programmed 120m Cluster <none> 90s IPv4 7 <none> <none>`
	if len(lines) != 2 || strings.Join(strings.Fields(lines[1]), " ") != want {
		t.Errorf("%s\nwant the row %s", out.String(), want)
	}
}

func TestSimilar(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"web", "wbe", true}, {"web", "WEB", true}, {"web-frontend", "web", true}, {"web", "shop", false}, {"frontend", "back", false},
	} {
		if got := similar(tt.a, tt.b); got != tt.want {
			t.Errorf("%s, %s: %t", tt.a, tt.b, got)
		}
	}
}
