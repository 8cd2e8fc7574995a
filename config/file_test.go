package config

import (
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

const header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// writeFile writes a configuration file with the header, and returns its path.
func writeFile(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(header+body), 0o644))
	return path
}

// flagsOf reads a command line.
func flagsOf(t *testing.T, args ...string) *Flags {
	t.Helper()
	f := &Flags{}
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	f.Add(fs)
	require.NoError(t, fs.Parse(args))
	return f
}

// must returns a function for a value that there has to be.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

// nested is a file that gives one field a value.
func nested(field, value string) string {
	out, indent := "", ""
	for _, name := range strings.Split(field, ".") {
		out += "\n" + indent + name + ":"
		indent += "  "
	}
	return strings.TrimPrefix(out, "\n") + " " + value + "\n"
}

// leaves are the paths of all fields.
func leaves(v reflect.Value, path string) []string {
	var out []string
	for name, field := range fieldsOf(v) {
		if isObject(field) {
			out = append(out, leaves(field, join(path, name))...)
		} else {
			out = append(out, join(path, name))
		}
	}
	slices.Sort(out)
	return out
}

type fileCase struct {
	field, value string
	change       func(*Config) // what differs from the defaults
	finding      string        // what is said about it, if anything
}

const (
	windows  = "no effect: it is for Windows; it is ignored"
	oneLog   = "no effect: there is one stream for the log, without a buffer; it is ignored"
	forIPVS  = "no effect: it is for mode ipvs; it is ignored"
	forNFT   = "no effect: it is for mode nftables; it is ignored"
	noPeriod = "no effect: objects are watched; every change is seen at once; it is ignored"
)

// fileCases has every field of KubeProxyConfiguration.
func fileCases() []fileCase {
	nothing := func(*Config) {}
	return append([]fileCase{
		{"mode", "iptables", nothing, ""},
		{"mode", `""`, nothing, ""},
		{"hostnameOverride", "Node-7", func(c *Config) { c.NodeName = "node-7" }, ""},
		{"clientConnection.kubeconfig", "/k", func(c *Config) { c.API.Kubeconfig = "/k" }, ""},
		{"clientConnection.acceptContentTypes", "application/json", func(c *Config) {
			c.API.AcceptContentTypes = "application/json"
		}, ""},
		{"clientConnection.contentType", "application/json", func(c *Config) { c.API.ContentType = "application/json" }, ""},
		{"clientConnection.qps", "50.5", func(c *Config) { c.API.QPS = 50.5 }, ""},
		{"clientConnection.burst", "100", func(c *Config) { c.API.Burst = 100 }, ""},
		{"clusterCIDR", "10.1.0.0/16,fd00:1::/64", func(c *Config) {
			c.Settings.DetectLocal.CIDRs = prefixes("10.1.0.0/16", "fd00:1::/64")
		}, ""},
		{"detectLocalMode", "NodeCIDR", func(c *Config) { c.Settings.DetectLocal.Mode = plan.DetectNodeCIDR }, ""},
		{"detectLocal.bridgeInterface", "cni0\ndetectLocalMode: BridgeInterface", func(c *Config) {
			c.Settings.DetectLocal = plan.DetectLocal{Mode: plan.DetectBridgeInterface, Interface: "cni0"}
		}, ""},
		{"detectLocal.interfaceNamePrefix", "veth\ndetectLocalMode: InterfaceNamePrefix", func(c *Config) {
			c.Settings.DetectLocal = plan.DetectLocal{Mode: plan.DetectInterfaceNamePrefix, Interface: "veth"}
		}, ""},
		{"nodePortAddresses", "[primary]", func(c *Config) { c.Settings.NodePortAddresses.Primary = true }, ""},
		{"nodePortAddresses", "[10.0.0.0/8, 'fd00::/8']", func(c *Config) {
			c.Settings.NodePortAddresses.CIDRs = prefixes("10.0.0.0/8", "fd00::/8")
		}, ""},
		{"iptables.masqueradeBit", "0", func(c *Config) { c.MasqueradeBit = 0 }, ""},
		{"iptables.masqueradeAll", "true", func(c *Config) { c.Settings.MasqueradeAll = true }, ""},
		{"iptables.masqueradeAll", "yes", func(c *Config) { c.Settings.MasqueradeAll = true }, ""},
		{"iptables.localhostNodePorts", "false", func(c *Config) { c.Settings.LocalhostNodePorts = false }, ""},
		{"iptables.minSyncPeriod", "1s", func(c *Config) { c.MinSyncPeriod = time.Second }, ""},
		{"iptables.syncPeriod", "1m", func(c *Config) { c.SyncPeriod = time.Minute }, ""},
		{"logging.format", "json", func(c *Config) { c.LogFormat = "json" }, ""},
		{"logging.verbosity", "5", func(c *Config) { c.LogLevel = "debug" }, ""},
		{"featureGates", "{WinDSR: true}", nothing, "no effect of WinDSR: it is for Windows; it is ignored"},
		{"featureGates", "{KubeProxyIPVS: false, TopologyAwareHints: true}", nothing, ""},
		{"featureGates", "{AllowServiceExternalIPs: true}", nothing, ""},
		{"featureGates", "{AllowServiceExternalIPs: false}", func(c *Config) { c.Settings.IgnoreExternalIPs = true }, ""},
		{"showHiddenMetricsForVersion", `"1.35"`, nothing, "no effect: no metric is hidden; it is ignored"},
		{"configSyncPeriod", "1m", nothing, noPeriod},
		{"configSyncPeriod", "15m", nothing, ""},
		{"portRange", "1-2", nothing, "no effect: no ports are reserved; kube-proxy has no use for it either; it is ignored"},
		{"windowsRunAsService", "true", nothing, windows},
		{"winkernel.networkName", "n", nothing, windows},
		{"winkernel.sourceVip", "10.0.0.1", nothing, windows},
		{"winkernel.enableDSR", "true", nothing, windows},
		{"winkernel.rootHnsEndpointName", "n", nothing, windows},
		{"winkernel.forwardHealthCheckVip", "true", nothing, windows},
		{"logging.flushFrequency", "1s", nothing, "no effect: the log is not buffered; it is ignored"},
		{"logging.flushFrequency", "0", nothing, ""},
		{"logging.vmodule", "[{filePattern: a, verbosity: 5}]", nothing,
			"no effect: log levels are for the whole program; it is ignored"},
		{"logging.options.text.splitStream", "true", nothing, oneLog},
		{"logging.options.text.infoBufferSize", "1Ki", nothing, oneLog},
		{"logging.options.json.splitStream", "true", nothing, oneLog},
		{"logging.options.json.infoBufferSize", "1Ki", nothing, oneLog},
	}, keptCases()...)
}

// keptCases are the fields that are kept for parts of the program to come.
func keptCases() []fileCase {
	minute := time.Minute
	return []fileCase{
		{"bindAddress", "10.0.0.1", func(c *Config) { c.Servers.Bind = netip.MustParseAddr("10.0.0.1") }, ""},
		{"bindAddress", `"::"`, func(c *Config) {
			c.Servers.Bind, c.Servers.Healthz = netip.IPv6Unspecified(), netip.MustParseAddrPort("[::]:10256")
			c.Servers.Metrics = netip.MustParseAddrPort("[::1]:10249")
		}, ""},
		{"bindAddressHardFail", "true", func(c *Config) { c.Servers.HardFail = true }, ""},
		{"enableProfiling", "true", func(c *Config) { c.Servers.Profiling = true }, ""},
		{"healthzBindAddress", "10.0.0.1", func(c *Config) {
			c.Servers.Healthz = netip.MustParseAddrPort("10.0.0.1:10256")
		}, ""},
		{"metricsBindAddress", `"[::1]:99"`, func(c *Config) { c.Servers.Metrics = netip.MustParseAddrPort("[::1]:99") }, ""},
		{"oomScoreAdj", "-5", func(c *Config) { c.OOMScoreAdj = -5 }, ""},
		{"oomScoreAdj", "0", func(c *Config) { c.OOMScoreAdj = 0 }, ""},
		{"conntrack.maxPerCore", "1", func(c *Config) { c.Conntrack.MaxPerCore = 1 }, ""},
		{"conntrack.maxPerCore", "0", func(c *Config) { c.Conntrack.MaxPerCore = 0 }, ""},
		{"conntrack.min", "1", func(c *Config) { c.Conntrack.Min = 1 }, ""},
		{"conntrack.tcpEstablishedTimeout", "1m", func(c *Config) { c.Conntrack.TCPEstablishedTimeout = minute }, ""},
		{"conntrack.tcpCloseWaitTimeout", "1m", func(c *Config) { c.Conntrack.TCPCloseWaitTimeout = minute }, ""},
		{"conntrack.tcpBeLiberal", "true", func(c *Config) { c.Conntrack.TCPBeLiberal = true }, ""},
		{"conntrack.udpTimeout", "1m", func(c *Config) { c.Conntrack.UDPTimeout = minute }, ""},
		{"conntrack.udpStreamTimeout", "1m", func(c *Config) { c.Conntrack.UDPStreamTimeout = minute }, ""},
		{"ipvs.syncPeriod", "1m", func(*Config) {}, forIPVS},
		{"ipvs.minSyncPeriod", "1s", func(*Config) {}, forIPVS},
		{"ipvs.scheduler", "wrr", func(c *Config) { c.IPVS.Scheduler = "wrr" }, forIPVS},
		{"ipvs.excludeCIDRs", "[10.9.0.0/16]", func(c *Config) { c.IPVS.ExcludeCIDRs = prefixes("10.9.0.0/16") }, forIPVS},
		{"ipvs.strictARP", "true", func(c *Config) { c.IPVS.StrictARP = true }, forIPVS},
		{"ipvs.tcpTimeout", "1m", func(c *Config) { c.IPVS.TCPTimeout = minute }, forIPVS},
		{"ipvs.tcpFinTimeout", "1m", func(c *Config) { c.IPVS.TCPFinTimeout = minute }, forIPVS},
		{"ipvs.udpTimeout", "1m", func(c *Config) { c.IPVS.UDPTimeout = minute }, forIPVS},
		{"nftables.masqueradeBit", "3", func(*Config) {}, forNFT},
		{"nftables.masqueradeBit", "14", func(*Config) {}, ""},
		{"nftables.masqueradeAll", "true", func(*Config) {}, forNFT},
		{"nftables.syncPeriod", "1m", func(*Config) {}, forNFT},
		{"nftables.minSyncPeriod", "1s", func(*Config) {}, forNFT},
	}
}

// TestEveryFieldOfTheFile has an effect, or is named in a finding that says why not.
func TestEveryFieldOfTheFile(t *testing.T) {
	t.Parallel()
	tested := map[string]bool{"apiVersion": true, "kind": true}
	for _, tc := range fileCases() {
		tested[tc.field] = true
		t.Run(tc.field+"="+tc.value, func(t *testing.T) {
			t.Parallel()
			path := writeFile(t, nested(tc.field, tc.value))
			args := []string{"--config=" + path}
			if !strings.HasPrefix(tc.field, "clientConnection.kubeconfig") {
				args = append(args, "--manifests=m")
			}
			if tc.field != "hostnameOverride" {
				args = append(args, "--node-name=node1")
			}
			got := must(flagsOf(t, args...).Config())(t)
			want := defaults()
			if strings.HasPrefix(tc.field, "clientConnection.kubeconfig") {
				want.Manifests, want.ServiceCIDRsGiven, want.Settings.ServiceCIDRs = "", false, nil
			}
			tc.change(&want)
			var said []string
			for _, f := range got.Findings {
				if f.Severity == source.Problem {
					said = append(said, f.String())
				}
			}
			got.Findings, got.Configz = nil, nil
			if !reflect.DeepEqual(*got, want) {
				t.Errorf("got\n%+v\nwant\n%+v", *got, want)
			}
			var wantSaid []string
			if tc.finding != "" {
				line := 3 + strings.Count(tc.field, ".")
				wantSaid = []string{path + ":" + string(rune('0'+line)) + ": " + tc.field + ": " + tc.finding}
			}
			if !slices.Equal(said, wantSaid) {
				t.Errorf("said\n%s\nwant\n%s", strings.Join(said, "\n"), strings.Join(wantSaid, "\n"))
			}
		})
	}
	for _, field := range leaves(reflect.ValueOf(&proxyconfig.KubeProxyConfiguration{}).Elem(), "") {
		if !tested[field] {
			t.Errorf("there is no case for %s", field)
		}
	}
}

// TestListsOfGaps name fields that exist.
func TestListsOfGaps(t *testing.T) {
	t.Parallel()
	for _, field := range slices.Sorted(maps.Keys(noMeaning)) {
		if _, ok := lookup(&proxyconfig.KubeProxyConfiguration{}, field); !ok {
			t.Errorf("there is no field %s", field)
		}
	}
}

// TestKubeadm: what kubeadm writes starts nodeproxy as it starts kube-proxy, and nothing in it calls for a warning.
func TestKubeadm(t *testing.T) {
	t.Parallel()
	got := must(flagsOf(t, "--config=testdata/kubeadm.yaml", "--hostname-override=Node1").Config())(t)
	want := defaults()
	want.Manifests, want.ServiceCIDRsGiven, want.Settings.ServiceCIDRs = "", false, nil
	want.API.Kubeconfig = "/var/lib/kube-proxy/kubeconfig.conf"
	want.Settings.DetectLocal.CIDRs = prefixes("10.244.0.0/16")
	got.Configz = nil
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", *got, want)
	}
}

// TestKubeProxysDefaults as kube-proxy 1.36 writes them are ours, but for the period that it waits between two syncs.
func TestKubeProxysDefaults(t *testing.T) {
	t.Parallel()
	got := must(flagsOf(t, "--config=testdata/kube-proxy-1.36.yaml", "--node-name=node1", "--manifests=m").Config())(t)
	want := defaults()
	want.MinSyncPeriod = time.Second
	var ignored []string
	for _, f := range got.Findings {
		if f.Severity == source.Problem {
			ignored = append(ignored, f.Field)
		}
	}
	got.Findings, got.Configz = nil, nil
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", *got, want)
	}
	if len(ignored) > 0 {
		t.Errorf("without effect are %q", ignored)
	}
}

// TestWrongFiles: each mistake is one line with file, line and field.
func TestWrongFiles(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ body, want string }{
		{"iptables:\n  syncPeriod: 30", "FILE:4: iptables.syncPeriod: must be a duration such as 30s, not 30"},
		{"iptables:\n  syncPeriod: 30x", `FILE:4: iptables.syncPeriod: must be a duration such as 30s, not "30x"`},
		{"conntrack: {tcpEstablishedTimeout: [1h]}",
			`FILE:3: conntrack.tcpEstablishedTimeout: must be a duration such as 30s, not ["1h"]`},
		{"logging: {flushFrequency: soon}", `FILE:3: logging.flushFrequency: must be a duration such as 30s, not "soon"`},
		{"logging: {verbosity: -1}", "FILE:3: logging.verbosity: must be a whole number of 32 bits that is not negative, not -1"},
		{"logging: {options: {text: {infoBufferSize: much}}}",
			`FILE:3: logging.options.text.infoBufferSize: can't be read: quantities must match the regular expression ` +
				`'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$': "much"`},
		{"logging: {vmodule: [a]}", `FILE:3: logging.vmodule[0]: must be a mapping of fields, not "a"`},
		{"iptables:\n  masqueradeBit: '14'", `FILE:4: iptables.masqueradeBit: must be a whole number of 32 bits, not "14"`},
		{"iptables:\n  masqueradeBit: 9999999999", "FILE:4: iptables.masqueradeBit: must be a whole number of 32 bits, not 9999999999"},
		{"iptables:\n  masqueradeAll: sometimes", `FILE:4: iptables.masqueradeAll: must be true or false, not "sometimes"`},
		{"iptables: 5", "FILE:3: iptables: must be a mapping of fields, not 5"},
		{"clientConnection: {qps: fast}", `FILE:3: clientConnection.qps: must be a number, not "fast"`},
		{"hostnameOverride: 7", "FILE:3: hostnameOverride: must be a string (quote it), not 7"},
		{"nodePortAddresses: 10.0.0.0/8", `FILE:3: nodePortAddresses: must be a list, not "10.0.0.0/8"`},
		{"featureGates: {A: 1}", "FILE:3: featureGates.A: must be true or false, not 1"},
		{"mode: iptables\n--- \nmode: ipvs", "FILE:5: a second document; a configuration file has one"},
		{"mode: [", "FILE:3: broken YAML: did not find expected node content"},
		{"x: 1\nbindAddress: 2\nmode: {}", "FILE:4: bindAddress: must be a string (quote it), not 2\nFILE:5: mode: must be a string, not {}"},
		{"featureGates: {AllowServiceExternalIP: false}",
			`FILE:3: featureGates: "AllowServiceExternalIP" is not a feature gate; there is "AllowServiceExternalIPs"`},
		{"featureGates: {TopologyAwareHints: false}",
			"FILE:3: featureGates: TopologyAwareHints can't be false: hints for zones are always followed"},
		{"mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}", "FILE:3: mode: ipvs is switched off by featureGates: KubeProxyIPVS=false"},
		{"mode: ebpf", `FILE:3: mode: "ebpf" is not supported; iptables, ipvs and nftables are`},
		{"mode: kernelspace", `FILE:3: mode: "kernelspace" is not supported; iptables, ipvs and nftables are`},
		{"iptables: {masqueradeBit: 32}", "FILE:3: iptables.masqueradeBit: 32 is not within 0-31"},
		{"nftables: {masqueradeBit: -1}", "FILE:3: nftables.masqueradeBit: -1 is not within 0-31"},
		{"iptables: {syncPeriod: 1s, minSyncPeriod: 2s}",
			"FILE:3: iptables.minSyncPeriod: 2s is more than the 1s of FILE:3: iptables.syncPeriod"},
		{"iptables: {minSyncPeriod: 1m}", "FILE:3: iptables.minSyncPeriod: 1m0s is more than the 30s of FILE: iptables.syncPeriod"},
		{"ipvs: {syncPeriod: -1s}", "FILE:3: ipvs.syncPeriod: -1s is not more than 0"},
		{"configSyncPeriod: -1s", "FILE:3: configSyncPeriod: -1s is not more than 0"},
		{"detectLocalMode: BridgeInterface", "FILE: detectLocal.bridgeInterface: required with detectLocalMode: BridgeInterface"},
		{"detectLocalMode: InterfaceNamePrefix\ndetectLocal: {bridgeInterface: cni0}",
			"FILE: detectLocal.interfaceNamePrefix: required with detectLocalMode: InterfaceNamePrefix"},
		{"detectLocalMode: Guess",
			`FILE:3: detectLocalMode: "Guess" is not one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix`},
		{"clusterCIDR: 10.0.0.0/8,11.0.0.0/8", `FILE:3: clusterCIDR: "11.0.0.0/8" is a second range for IPv4; one is possible`},
		{"nodePortAddresses: [primary, any]", `FILE:3: nodePortAddresses: "any" is not a CIDR, "primary", "localhost" or "all"`},
		{"clientConnection: {burst: -1}", "FILE:3: clientConnection.burst: -1 is negative"},
		{"conntrack: {maxPerCore: -1, udpTimeout: -1s}",
			"FILE:3: conntrack.maxPerCore: -1 is negative\nFILE:3: conntrack.udpTimeout: -1s is negative"},
		{"ipvs: {excludeCIDRs: [a]}", `FILE:3: ipvs.excludeCIDRs: "a" is not a CIDR`},
		{"oomScoreAdj: 1001", "FILE:3: oomScoreAdj: 1001 is not within -1000 to 1000"},
		{"bindAddress: me", `FILE:3: bindAddress: "me" is not an IP address`},
		{"healthzBindAddress: localhost:1", `FILE:3: healthzBindAddress: "localhost:1" is not an IP address with a port`},
		{"metricsBindAddress: 10.0.0.1:0", `FILE:3: metricsBindAddress: "10.0.0.1:0" is not an IP address with a port`},
		{"showHiddenMetricsForVersion: v1", `FILE:3: showHiddenMetricsForVersion: "v1" is not a version such as 1.36`},
		{"logging: {format: xml}", `FILE:3: logging.format: "xml" is not one of text, json`},
	} {
		t.Run(tc.body, func(t *testing.T) {
			t.Parallel()
			path := writeFile(t, tc.body+"\n")
			_, err := flagsOf(t, "--config="+path, "--manifests=m").Config()
			if err == nil {
				t.Fatal("it is accepted")
			}
			if got := strings.ReplaceAll(err.Error(), path, "FILE"); got != tc.want {
				t.Errorf("got\n%s\nwant\n%s", got, tc.want)
			}
		})
	}
}

// TestLenientFiles: fields that are unknown or given twice are warned of, with file, line and field, as by kube-proxy, and the rest
// of the file counts.
func TestLenientFiles(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ body, want string }{
		{"udpIdleTimeout: 250ms", "FILE:3: udpIdleTimeout: unknown field; it is ignored"},
		{"iptables:\n  masqueradebit: 1", `FILE:4: iptables.masqueradebit: unknown field; there is "masqueradeBit"; it is ignored`},
		{"portRange: ''\nportRange: ''", "FILE:3: portRange: given twice, on line 4 too; the last one counts"},
		{"iptables: {masqueradeAll: true}\niptables: {localhostNodePorts: true}",
			"FILE:3: iptables: given twice, on line 4 too; the last one counts"},
		{"featureGates:\n  AllowServiceExternalIPs: false\n  AllowServiceExternalIPs: true",
			"FILE:4: featureGates.AllowServiceExternalIPs: given twice, on line 5 too; the last one counts"},
		{"logging: {vmodule: [{file: a}]}", `FILE:3: logging.vmodule[0].file: unknown field; it is ignored`},
	} {
		path := writeFile(t, tc.body+"\nclusterCIDR: 10.0.0.0/8\n")
		c, err := flagsOf(t, "--config="+path, "--manifests=m").Config()
		if err != nil {
			t.Errorf("%s: %v", tc.body, err)
			continue
		}
		var told []string
		for _, f := range c.Findings {
			if f.Severity == source.Problem && !strings.HasPrefix(f.Detail, "no effect") {
				told = append(told, strings.ReplaceAll(f.String(), path, "FILE"))
			}
		}
		if len(told) != 1 || told[0] != tc.want {
			t.Errorf("%s: told %q, want %q", tc.body, told, tc.want)
		}
		if len(c.Settings.DetectLocal.CIDRs) != 1 || c.Settings.MasqueradeAll || c.Settings.IgnoreExternalIPs {
			t.Errorf("%s: the rest of the file does not count: %+v", tc.body, c.Settings)
		}
	}
}

// TestFilesOfAnotherKind are refused as a whole.
func TestFilesOfAnotherKind(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ content, want string }{
		{"", "FILE: the file is empty; it must hold a KubeProxyConfiguration"},
		{"---\n---\n", "FILE: the file is empty; it must hold a KubeProxyConfiguration"},
		{"- a\n", "FILE:1: this is not a KubeProxyConfiguration"},
		{"a: b: c\n", "FILE:1: broken YAML: mapping values are not allowed in this context"},
		{"mode: iptables\n", `FILE: apiVersion: must be "kubeproxy.config.k8s.io/v1alpha1", not ""` + "\n" +
			`FILE: kind: must be "KubeProxyConfiguration", not ""`},
		{"apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration\n",
			`FILE:1: apiVersion: must be "kubeproxy.config.k8s.io/v1alpha1", not "kubeproxy.config.k8s.io/v1alpha2"`},
	} {
		path := filepath.Join(t.TempDir(), "config.yaml")
		require.NoError(t, os.WriteFile(path, []byte(tc.content), 0o644))
		_, err := flagsOf(t, "--config="+path, "--manifests=m").Config()
		if err == nil || strings.ReplaceAll(err.Error(), path, "FILE") != tc.want {
			t.Errorf("%q: got\n%v\nwant\n%s", tc.content, err, tc.want)
		}
	}
	if _, err := flagsOf(t, "--config=/nowhere/x", "--manifests=m").Config(); err == nil ||
		err.Error() != "--config: open /nowhere/x: no such file or directory" {
		t.Errorf("a missing file: %v", err)
	}
	// JSON is YAML.
	path := filepath.Join(t.TempDir(), "config.json")
	text := `{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","iptables":{"masqueradeBit":7}}`
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	if c, err := flagsOf(t, "--config="+path, "--manifests=m").Config(); err != nil || c.MasqueradeBit != 7 {
		t.Errorf("JSON: %+v, %v", c, err)
	}
}
