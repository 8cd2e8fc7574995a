package config

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

// gateTable is the table of docs/feature-gates.md: a row for each gate that is a service proxy's business, and a row for each
// span of releases with the others.
func gateTable() []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(proxyGates)) {
		g := proxyGates[name]
		out = append(out, fmt.Sprintf("| `%s` | %s | %s | %s |", name, span(g.first, g.last), g.use, g.why))
	}
	byReleases := map[string]string{}
	for releases, names := range otherGates {
		byReleases[span(releases[0], releases[1])] = "`" + strings.Join(strings.Fields(names), "` `") + "`"
	}
	for _, releases := range slices.Sorted(maps.Keys(byReleases)) {
		out = append(out, fmt.Sprintf("| %s | %s |", releases, byReleases[releases]))
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
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rows, tail := "", []string{}, []string{}
	for line := range strings.Lines(string(text)) {
		switch line = strings.TrimSuffix(line, "\n"); {
		case strings.HasPrefix(line, "| `"), strings.HasPrefix(line, "| 1."):
			rows = append(rows, line)
		case len(rows) == 0:
			head += line + "\n"
		default:
			tail = append(tail, line)
		}
	}
	want := gateTable()
	if *update {
		proxy := len(proxyGates)
		all := head + strings.Join(want[:proxy], "\n") + "\n" + strings.Join(tail, "\n") + "\n" + strings.Join(want[proxy:], "\n") + "\n"
		if err := os.WriteFile(path, []byte(all), 0o644); err != nil {
			t.Fatal(err)
		}
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

// TestEveryFeatureGate: each gate does with each value what the table says of it.
func TestEveryFeatureGate(t *testing.T) {
	t.Parallel()
	if len(knownGates) < 250 {
		t.Fatalf("only %d gates are known", len(knownGates))
	}
	for name, gate := range knownGates {
		if other, twice := proxyGates[name]; twice && gate != other {
			t.Errorf("%s is in two lists", name)
		}
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
		"--feature-gates=Nonsense=true":                   `--feature-gates: "Nonsense" is not a feature gate of kube-proxy 1.33 to 1.37`,
	} {
		if _, err := flagsOf(t, append(strings.Fields(args), "--manifests=m")...).Config(); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
