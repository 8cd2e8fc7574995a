package config

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// gateTable is the table of docs/feature-gates.md: a row for each gate that is a service proxy's business.
func gateTable() []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(proxyGates)) {
		g := proxyGates[name]
		out = append(out, fmt.Sprintf("| `%s` | %s | %s | %s |", name, span(g.first, g.last), g.use, g.why))
	}
	return out
}

func span(first, last string) string {
	if first == last {
		return first
	}
	return first + "–" + last
}

// TestFeatureGateTable: docs/feature-gates.md says of each gate what the program does.
func TestFeatureGateTable(t *testing.T) {
	t.Parallel()
	const path = "../docs/feature-gates.md"
	text := must(os.ReadFile(path))(t)
	head, table, _ := strings.Cut(string(text), "| `")
	rows := strings.Split("| `"+strings.TrimSuffix(table, "\n"), "\n")
	want := gateTable()
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(head+strings.Join(want, "\n")+"\n"), 0o644))
		return
	}
	for i := range max(len(rows), len(want)) {
		got, should := "", ""
		if i < len(rows) {
			got = rows[i]
		}
		if i < len(want) {
			should = want[i]
		}
		if got != should {
			t.Errorf("%s (go test ./config -run TestFeatureGateTable -update writes it anew): row %d is\n%s\nwant\n%s", path, i, got, should)
		}
	}
}

// TestEveryFeatureGate: each gate does with each value what the table says of it, and one of another component has no effect.
func TestEveryFeatureGate(t *testing.T) {
	t.Parallel()
	names := append(slices.Collect(maps.Keys(proxyGates)), "InPlacePodVerticalScaling", "OneOfNextYear")
	for _, name := range names {
		gate := gateNamed(name)
		for _, on := range []bool{false, true} {
			c, err := flagsOf(t, fmt.Sprintf("--feature-gates=%s=%t", name, on), "--manifests=m").Config()
			if refused := gate.use == gateFixed && !on; refused != (err != nil) {
				t.Errorf("%s=%t: %v", name, on, err)
			}
			if err != nil {
				continue
			}
			told := false
			for _, f := range c.Findings {
				told = told || f.Field == "--feature-gates" && strings.Contains(f.Detail, "no effect of "+name+": "+gate.why)
			}
			if told != (gate.use == gateIgnored) {
				t.Errorf("%s=%t: told that it has no effect: %t", name, on, told)
			}
			if c.Settings.IgnoreExternalIPs != (name == "AllowServiceExternalIPs" && !on) {
				t.Errorf("%s=%t: external IPs are ignored: %t", name, on, c.Settings.IgnoreExternalIPs)
			}
		}
	}
	for args, want := range map[string]string{
		"--feature-gates=KubeProxyIPVS=false --mode=ipvs": "--mode: ipvs is switched off by --feature-gates=KubeProxyIPVS=false",
		"--feature-gates=kubeProxyIPVS=false":             `--feature-gates: "kubeProxyIPVS" is not a feature gate; there is "KubeProxyIPVS"`,
	} {
		if _, err := flagsOf(t, append(strings.Fields(args), "--manifests=m")...).Config(); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
