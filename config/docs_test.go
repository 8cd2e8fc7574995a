package config

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
)

// refusedValues has a value that is refused for each field that refuses any value of its type.
var refusedValues = map[string]string{
	"apiVersion": "v1", "kind": "Config", "mode": "ebpf", "bindAddress": "node1", "clientConnection.burst": "-1",
	"clusterCIDR": "10.0.0.0", "configSyncPeriod": "-1s", "detectLocalMode": "Auto", "detectLocal.bridgeInterface": "a/b",
	"detectLocal.interfaceNamePrefix": "a/b", "featureGates": "{KubeProxyIpvs: false}", "healthzBindAddress": "node1:10256",
	"metricsBindAddress": "0.0.0.0:10256", "nodePortAddresses": "[10.0.0.1]", "oomScoreAdj": "-1001",
	"showHiddenMetricsForVersion": "latest", "logging.format": "xml",
	"iptables.masqueradeBit": "32", "iptables.syncPeriod": "-1s", "iptables.minSyncPeriod": "1m",
	"nftables.masqueradeBit": "32", "nftables.syncPeriod": "-1s", "nftables.minSyncPeriod": "1m",
	"ipvs.syncPeriod": "-1s", "ipvs.minSyncPeriod": "1m", "ipvs.excludeCIDRs": "[10.0.0.1]", "ipvs.scheduler": "Random",
	"ipvs.tcpTimeout": "-1s", "ipvs.tcpFinTimeout": "-1s", "ipvs.udpTimeout": "-1s",
	"conntrack.maxPerCore": "-1", "conntrack.min": "-1", "conntrack.tcpEstablishedTimeout": "-1s",
	"conntrack.tcpCloseWaitTimeout": "-1s", "conntrack.udpTimeout": "-1s", "conntrack.udpStreamTimeout": "-1s",
}

// refusal returns what is said of a refused value.
func refusal(t *testing.T, field, value string) string {
	t.Helper()
	body := header + nested(field, value)
	switch field {
	case "apiVersion", "kind":
		lines := strings.SplitAfter(header, "\n")
		body = strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, field+":") }), "") + field + ": " + value + "\n"
	case "detectLocal.bridgeInterface":
		body += "detectLocalMode: BridgeInterface\n"
	case "detectLocal.interfaceNamePrefix":
		body += "detectLocalMode: InterfaceNamePrefix\n"
	}
	path := writeFile(t, "")
	require.NoError(t, os.WriteFile(path, []byte(body), 0o644))
	_, err := flagsOf(t, "--config="+path, "--manifests=m", "--node-name=node1").Config()
	if err == nil {
		t.Fatalf("%s: %s is accepted", field, value)
	}
	_, said, ok := strings.Cut(err.Error(), ": "+field+": ")
	if !ok || strings.Contains(said, "\n") {
		t.Fatalf("%s: %s: %v", field, value, err)
	}
	return strings.ReplaceAll(strings.ReplaceAll(said, path, "FILE"), "|", "\\|")
}

// fieldTable is the table of the fields of a KubeProxyConfiguration: a row for each.
func fieldTable(t *testing.T) string {
	t.Helper()
	var usual values
	usual.defaults()
	var b strings.Builder
	b.WriteString("| field | default | flags | effect | refused, for example |\n|---|---|---|---|---|\n")
	for _, field := range leaves(reflect.ValueOf(&proxyconfig.KubeProxyConfiguration{}).Elem(), "") {
		value, _ := lookup(&usual.kp, field)
		shown := written(value)
		if shown != "" && shown != "null" {
			shown = "`" + shown + "`"
		} else {
			shown = ""
		}
		var flags []string
		for _, name := range slices.Sorted(maps.Keys(flagFields)) {
			if flagFields[name] == field {
				flags = append(flags, "`--"+name+"`")
			}
		}
		refused := ""
		if value, ok := refusedValues[field]; ok {
			refused = "`" + value + "`: " + refusal(t, field, value)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", field, shown, strings.Join(flags, ", "), effectOf(t, field), refused)
	}
	return b.String()
}

// effectOf says what a field does, by the lists that TestEveryFieldOfTheFile holds the program to.
func effectOf(t *testing.T, field string) string {
	t.Helper()
	group, _, _ := strings.Cut(field, ".")
	switch group {
	case "apiVersion", "kind":
		return "required"
	case "featureGates":
		return "see [feature-gates.md](feature-gates.md)"
	case "iptables":
		// The settings of mode iptables have no place of their own in a Config, so it shows in which modes they count.
		var in []string
		for _, mode := range Modes() {
			if !reflect.DeepEqual(configWith(t, mode, field), configWith(t, mode, "")) {
				in = append(in, mode)
			}
		}
		return map[bool]string{true: "in modes ", false: "in mode "}[len(in) > 1] + strings.Join(in, " and ")
	case "ipvs", "nftables":
		return "in mode " + group
	}
	for name, why := range noMeaning {
		if field == name || strings.HasPrefix(field, name+".") {
			return "none: " + why
		}
	}
	return "yes"
}

// configWith returns the configuration of a mode, with the value that a field has in fileCases, if there is a field.
func configWith(t *testing.T, mode, field string) *Config {
	t.Helper()
	path := writeFile(t, "mode: "+mode+"\n")
	if i := slices.IndexFunc(fileCases(), func(tc fileCase) bool { return tc.field == field }); i >= 0 {
		path = writeFile(t, "mode: "+mode+"\n"+nested(field, fileCases()[i].value))
	}
	c := must(flagsOf(t, "--config="+path, "--manifests=m", "--node-name=node1").Config())(t)
	c.Findings, c.Configz = nil, nil
	return c
}

// ignoredText lists the flags of kube-proxy that the help leaves out.
func ignoredText() string {
	var deprecated, ignored []string
	for name, other := range deprecatedFlags {
		deprecated = append(deprecated, fmt.Sprintf("`--%s` (use `%s`)", name, other))
	}
	var f Flags
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	f.Add(fs)
	fs.VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden && deprecatedFlags[flag.Name] == "" {
			ignored = append(ignored, "`--"+flag.Name+"`")
		}
	})
	slices.Sort(deprecated)
	slices.Sort(ignored)
	return "Deprecated, and honoured: " + strings.Join(deprecated, ", ") + ".\n\nAccepted because kube-proxy has or had them, without effect: " +
		strings.Join(ignored, ", ") + ".\n"
}

// TestConfigurationFields: docs/configuration.md says of each field of a KubeProxyConfiguration what it does and what is refused, and
// lists the flags that the help leaves out. UPDATE=1, as "make docs" sets it, writes both anew.
func TestConfigurationFields(t *testing.T) {
	t.Parallel()
	const path = "../docs/configuration.md"
	data := must(os.ReadFile(path))(t)
	text := string(data)
	for name, want := range map[string]string{"fields": fieldTable(t), "hidden flags": ignoredText()} {
		head, rest, found := strings.Cut(text, "<!-- "+name+": make docs writes this -->\n")
		got, tail, ended := strings.Cut(rest, "<!-- end -->")
		if !found || !ended {
			t.Fatalf("%s has no part %q", path, name)
		}
		if got != want && os.Getenv("UPDATE") == "" {
			t.Errorf("%s: the part %q is not what the program does; \"make docs\" mends it", path, name)
		}
		text = head + "<!-- " + name + ": make docs writes this -->\n" + want + "<!-- end -->" + tail
	}
	if os.Getenv("UPDATE") != "" {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
}

// TestEffectiveHasAllFlags: what is printed tells the value of every flag that has one, as a field or, where there is no field
// for it, as a comment.
func TestEffectiveHasAllFlags(t *testing.T) {
	t.Parallel()
	var f Flags
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	f.Add(fs)
	values := map[string]string{"string": "value", "bool": "true", "duration": "7m0s", "int32": "7"}
	seen := 0
	fs.VisitAll(func(flag *pflag.Flag) {
		if flagFields[flag.Name] != "" || flag.Hidden || commandFlags[flag.Name] || flag.Name == "config" {
			return // TestEveryFlagSetsItsField has the first ones.
		}
		seen++
		value := values[flag.Value.Type()]
		e := must(flagsOf(t, "--"+flag.Name+"="+value).Effective())(t)
		text := must(e.YAML())(t)
		if want := "\n#   --" + flag.Name + "=" + value + "\n"; !strings.Contains(string(text), want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	})
	if seen < 10 {
		t.Errorf("only %d flags were found", seen)
	}
}
