package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"

	"nodeproxy/source"
)

// flagCases has every flag of kube-proxy 1.36 (kube-proxy --help) that has a field of the configuration file: a value, and
// how the field is then written.
var flagCases = []struct{ flag, value, field, written string }{
	{"proxy-mode", "iptables", "mode", "iptables"},
	{"mode", "nftables", "mode", "nftables"},
	{"hostname-override", "n", "hostnameOverride", "n"},
	{"node-name", "n", "hostnameOverride", "n"},
	{"kubeconfig", "k", "clientConnection.kubeconfig", "k"},
	{"kube-api-content-type", "a/b", "clientConnection.contentType", "a/b"},
	{"kube-api-qps", "7.5", "clientConnection.qps", "7.5"},
	{"kube-api-burst", "8", "clientConnection.burst", "8"},
	{"cluster-cidr", "10.0.0.0/8", "clusterCIDR", "10.0.0.0/8"},
	{"detect-local-mode", "NodeCIDR", "detectLocalMode", "NodeCIDR"},
	{"pod-bridge-interface", "b", "detectLocal.bridgeInterface", "b"},
	{"pod-interface-name-prefix", "p", "detectLocal.interfaceNamePrefix", "p"},
	{"nodeport-addresses", "10.0.0.0/8,11.0.0.0/8", "nodePortAddresses", `["10.0.0.0/8","11.0.0.0/8"]`},
	{"masquerade-all", "true", "iptables.masqueradeAll", "true"},
	{"iptables-masquerade-bit", "3", "iptables.masqueradeBit", "3"},
	{"iptables-localhost-nodeports", "false", "iptables.localhostNodePorts", "false"},
	{"iptables-sync-period", "7s", "iptables.syncPeriod", "7s"},
	{"iptables-min-sync-period", "7s", "iptables.minSyncPeriod", "7s"},
	{"min-sync-period", "7s", "iptables.minSyncPeriod", "7s"},
	{"nftables-masquerade-bit", "3", "nftables.masqueradeBit", "3"},
	{"nftables-sync-period", "7s", "nftables.syncPeriod", "7s"},
	{"nftables-min-sync-period", "7s", "nftables.minSyncPeriod", "7s"},
	{"ipvs-sync-period", "7s", "ipvs.syncPeriod", "7s"},
	{"ipvs-min-sync-period", "7s", "ipvs.minSyncPeriod", "7s"},
	{"ipvs-scheduler", "wrr", "ipvs.scheduler", "wrr"},
	{"ipvs-exclude-cidrs", "10.0.0.0/8", "ipvs.excludeCIDRs", `["10.0.0.0/8"]`},
	{"ipvs-strict-arp", "true", "ipvs.strictARP", "true"},
	{"ipvs-tcp-timeout", "7s", "ipvs.tcpTimeout", "7s"},
	{"ipvs-tcpfin-timeout", "7s", "ipvs.tcpFinTimeout", "7s"},
	{"ipvs-udp-timeout", "7s", "ipvs.udpTimeout", "7s"},
	{"conntrack-max-per-core", "0", "conntrack.maxPerCore", "0"},
	{"conntrack-min", "7", "conntrack.min", "7"},
	{"conntrack-tcp-timeout-established", "7s", "conntrack.tcpEstablishedTimeout", "7s"},
	{"conntrack-tcp-timeout-close-wait", "7s", "conntrack.tcpCloseWaitTimeout", "7s"},
	{"conntrack-tcp-be-liberal", "true", "conntrack.tcpBeLiberal", "true"},
	{"conntrack-udp-timeout", "7s", "conntrack.udpTimeout", "7s"},
	{"conntrack-udp-timeout-stream", "7s", "conntrack.udpStreamTimeout", "7s"},
	{"config-sync-period", "7s", "configSyncPeriod", "7s"},
	{"bind-address", "10.0.0.1", "bindAddress", "10.0.0.1"},
	{"bind-address-hard-fail", "true", "bindAddressHardFail", "true"},
	{"healthz-bind-address", "10.0.0.1:5", "healthzBindAddress", "10.0.0.1:5"},
	{"healthz-bind-address", "::1", "healthzBindAddress", "[::1]:10256"},
	{"healthz-bind-address", "[::1]", "healthzBindAddress", "[::1]:10256"},
	{"healthz-bind-address", "", "healthzBindAddress", ""},
	{"healthz-port", "5", "healthzBindAddress", "0.0.0.0:5"},
	{"healthz-port", "0", "healthzBindAddress", ""},
	{"metrics-bind-address", "10.0.0.1", "metricsBindAddress", "10.0.0.1:10249"},
	{"metrics-bind-address", "", "metricsBindAddress", ""},
	{"metrics-port", "5", "metricsBindAddress", "127.0.0.1:5"},
	{"metrics-port", "0", "metricsBindAddress", ""},
	{"profiling", "true", "enableProfiling", "true"},
	{"show-hidden-metrics-for-version", "1.35", "showHiddenMetricsForVersion", "1.35"},
	{"oom-score-adj", "-7", "oomScoreAdj", "-7"},
	{"feature-gates", "A=true,B=false", "featureGates", `{"A":true,"B":false}`},
	{"windows-service", "true", "windowsRunAsService", "true"},
	{"logging-format", "json", "logging.format", "json"},
	{"log-flush-frequency", "7s", "logging.flushFrequency", "7s"},
	{"v", "7", "logging.verbosity", "7"},
	{"vmodule", "a=5", "logging.vmodule", `[{"filePattern":"a","verbosity":5}]`},
	{"log-text-split-stream", "true", "logging.options.text.splitStream", "true"},
	{"log-text-info-buffer-size", "1Ki", "logging.options.text.infoBufferSize", "1Ki"},
	{"log-json-split-stream", "true", "logging.options.json.splitStream", "true"},
	{"log-json-info-buffer-size", "1Ki", "logging.options.json.infoBufferSize", "1Ki"},
}

// TestEveryFlagSetsItsField and no other, whatever a file has there.
func TestEveryFlagSetsItsField(t *testing.T) {
	t.Parallel()
	all := leaves(reflect.ValueOf(&proxyconfig.KubeProxyConfiguration{}).Elem(), "")
	tested := map[string]bool{}
	files := map[string]*Effective{}
	for _, file := range []string{"testdata/kubeadm.yaml", "testdata/unusual.yaml"} {
		files[file] = must(flagsOf(t, "--config="+file).Effective())(t)
	}
	for _, tc := range flagCases {
		tested[tc.flag] = true
		for file, before := range files {
			after := must(flagsOf(t, "--config="+file, "--"+tc.flag+"="+tc.value).Effective())(t)
			for _, field := range all {
				was, _ := lookup(&before.kp, field)
				is, _ := lookup(&after.kp, field)
				switch {
				case strings.HasSuffix(tc.flag, "-port"): // It depends on the address: TestPortFlags.
				case field == "logging.vmodule" && tc.flag == "vmodule": // Added to the file's, as in kube-proxy.
				case field == tc.field && written(is) != tc.written:
					t.Errorf("%s --%s=%s: %s is %s, want %s", file, tc.flag, tc.value, field, written(is), tc.written)
				case field != tc.field && written(was) != written(is):
					t.Errorf("%s --%s=%s: %s changed from %s to %s", file, tc.flag, tc.value, field, written(was), written(is))
				}
			}
		}
		e := must(flagsOf(t, "--"+tc.flag+"="+tc.value).Effective())(t)
		if got, _ := lookup(&e.kp, tc.field); written(got) != tc.written {
			t.Errorf("--%s=%s: %s is %s, want %s", tc.flag, tc.value, tc.field, written(got), tc.written)
		}
	}
	for name, field := range flagFields {
		if !tested[name] {
			t.Errorf("there is no case for --%s (%s)", name, field)
		}
	}
}

// TestPortFlags are deprecated: they change the port, unless the flag for the address has one.
func TestPortFlags(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ args, want string }{
		{"--healthz-port=5", "0.0.0.0:5"},
		{"--healthz-port=5 --healthz-bind-address=10.0.0.1", "10.0.0.1:5"},
		{"--healthz-port=5 --healthz-bind-address=10.0.0.1:6", "10.0.0.1:6"},
		{"--healthz-port=0 --healthz-bind-address=10.0.0.1:6", ""},
		{"--healthz-port=5 --config=testdata/unusual.yaml", "[fd00::1]:5"},
	} {
		e, err := flagsOf(t, strings.Fields(tc.args)...).Effective()
		if err != nil || e.kp.HealthzBindAddress != tc.want {
			t.Errorf("%s: %q, %v; want %q", tc.args, e.kp.HealthzBindAddress, err, tc.want)
		}
	}
}

// TestFlagsOfKubeProxy are all there, with a dash or an underscore in their names.
func TestFlagsOfKubeProxy(t *testing.T) {
	t.Parallel()
	var f Flags
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	f.Add(fs)
	const all = `config write-config-to cleanup init-only feature-gates kubeconfig master kube-api-content-type kube-api-burst
		kube-api-qps hostname-override bind-address healthz-bind-address metrics-bind-address bind-address-hard-fail profiling
		show-hidden-metrics-for-version proxy-mode iptables-masquerade-bit masquerade-all iptables-localhost-nodeports
		iptables-sync-period iptables-min-sync-period ipvs-sync-period ipvs-min-sync-period ipvs-scheduler ipvs-exclude-cidrs
		ipvs-strict-arp ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout detect-local-mode pod-bridge-interface
		pod-interface-name-prefix cluster-cidr nodeport-addresses oom-score-adj conntrack-max-per-core conntrack-min
		conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait conntrack-tcp-be-liberal conntrack-udp-timeout
		conntrack-udp-timeout-stream config-sync-period healthz-port metrics-port v vmodule logging-format log-flush-frequency
		log-text-split-stream log-text-info-buffer-size log-json-split-stream log-json-info-buffer-size boot-id-file
		machine-id-file windows-service
		logtostderr alsologtostderr log-dir log-file log-file-max-size stderrthreshold one-output skip-headers skip-log-headers
		add-dir-header log-backtrace-at`
	for _, name := range strings.Fields(all) {
		if fs.Lookup(name) == nil {
			t.Errorf("there is no flag --%s", name)
		}
		if fs.Lookup(strings.ReplaceAll(name, "-", "_")) == nil {
			t.Errorf("--%s can't have underscores", name)
		}
	}
}

// TestWrongTypes: a flag of the wrong type is refused with its name.
func TestWrongTypes(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{"--iptables-masquerade-bit=many", "--kube-api-qps=fast", "--conntrack-min=1.5", "--v=-1",
		"--iptables-sync-period=30", "--masquerade-all=maybe", "--feature-gates=A", "--oom-score-adj=9999999999",
		"--log-text-info-buffer-size=much", "--vmodule=a", "--nonsense=1"} {
		var f Flags
		fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
		f.Add(fs)
		name, _, _ := strings.Cut(arg, "=")
		if err := fs.Parse([]string{arg}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", arg, err)
		}
	}
}

// TestOriginInErrors: an error names the flag or the field of the file, whichever it came from.
func TestOriginInErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ body, args, want string }{
		{"iptables: {masqueradeBit: 40}", "", "FILE:3: iptables.masqueradeBit: 40 is not within 0-31"},
		{"iptables: {masqueradeBit: 4}", "--iptables-masquerade-bit=40", "--iptables-masquerade-bit: 40 is not within 0-31"},
		{"iptables: {masqueradeBit: 40}", "--iptables-masquerade-bit=4", ""},
		{"iptables: {minSyncPeriod: 9s}", "--iptables-sync-period=3s",
			"FILE:3: iptables.minSyncPeriod: 9s is more than the 3s of --iptables-sync-period"},
		{"iptables: {syncPeriod: 3s}", "--min-sync-period=9s",
			"--min-sync-period: 9s is more than the 3s of FILE:3: iptables.syncPeriod"},
		{"mode: iptables", "--detect-local-mode=BridgeInterface",
			"FILE: detectLocal.bridgeInterface: required with --detect-local-mode=BridgeInterface"},
		{"detectLocalMode: BridgeInterface", "--pod-bridge-interface=a/b",
			`--pod-bridge-interface: "a/b" can't be the name of a network interface, or begin one`},
		{"mode: ipvs", "--proxy-mode=iptables", ""},
		{"mode: iptables", "--iptables-sync-period=0s", "--iptables-sync-period: 0s is not more than 0"},
		{"mode: iptables", "--cleanup --init-only",
			"--cleanup: can't be combined with --init-only"},
		{"mode: iptables", "--iptables-backend=both", `--iptables-backend: "both" is for cleanup alone`},
		{"mode: iptables", "--iptables-backend=both --cleanup", ""},
		{"mode: iptables", "--kubeconfig=k",
			"--manifests: can't be combined with --kubeconfig or --master: objects come from one place"},
	} {
		path := writeFile(t, tc.body+"\n")
		args := append([]string{"--config=" + path, "--manifests=m"}, strings.Fields(tc.args)...)
		_, err := flagsOf(t, args...).Config()
		got := ""
		if err != nil {
			got = strings.ReplaceAll(err.Error(), path, "FILE")
		}
		if got != tc.want {
			t.Errorf("%s %s: got\n%s\nwant\n%s", tc.body, tc.args, got, tc.want)
		}
	}
}

// TestFindings: what is overridden, ignored, deprecated or left unused is said once.
func TestFindings(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		body, args string
		want       []string
	}{
		{"", "--cluster-cidr=10.0.0.0/8", nil},
		{"", "", []string{"note: FILE: clusterCIDR: not given; traffic from pods can't be distinguished from other traffic, so none is " +
			"masqueraded because it comes from elsewhere"}},
		{"", "--cluster-cidr=10.0.0.0/8 --mode=nftables --service-metrics=5", nil},
		{"", "--cluster-cidr=10.0.0.0/8 --mode=nftables --iptables-sync-period=1m --masquerade-all", nil},
		{"clusterCIDR: 10.0.0.0/8\nmode: nftables\niptables: {masqueradeAll: true, masqueradeBit: 3, minSyncPeriod: 0s}", "", []string{
			"problem: FILE:5: iptables.masqueradeAll: no effect: it is for modes iptables and ipvs; it is ignored",
			"problem: FILE:5: iptables.masqueradeBit: no effect: it is for modes iptables and ipvs; it is ignored"}},
		{"clusterCIDR: 10.0.0.0/8\nmode: nftables\nnftables: {syncPeriod: 1m}", "--iptables-sync-period=2m", []string{
			"problem: FILE:5: nftables.syncPeriod: 1m0s here, 2m0s by --iptables-sync-period; the flag overrides the file"}},
		{"clusterCIDR: 10.0.0.0/8", "--detect-local-mode=NodeCIDR", []string{"note: FILE:3: clusterCIDR: not used with " +
			"--detect-local-mode=NodeCIDR; traffic of pods is recognised without it"}},
		{"clusterCIDR: 10.0.0.0/8", "--cluster-cidr=11.0.0.0/8", []string{"problem: FILE:3: clusterCIDR: 10.0.0.0/8 here, " +
			"11.0.0.0/8 by --cluster-cidr; the flag overrides the file"}},
		{"clusterCIDR: 10.0.0.0/8\niptables:\n  masqueradeBit: 4", "--iptables-masquerade-bit=4", nil},
		{"clusterCIDR: 10.0.0.0/8\nhostnameOverride: ''", "--hostname-override=x", nil},
		{"clusterCIDR: 10.0.0.0/8\nclientConnection: {kubeconfig: k}", "", []string{"problem: FILE:4: " +
			"clientConnection.kubeconfig: --manifests is given too; objects come from the manifests alone"}},
		{"clusterCIDR: 10.0.0.0/8", "--conntrack-min=5 --conntrack-max-per-core=0 --profiling=false", nil},
		{"clusterCIDR: 10.0.0.0/8", "--logtostderr --healthz-port=7 --ipvs-strict-arp", []string{
			"problem: --ipvs-strict-arp: no effect: it is for mode ipvs; it is ignored",
			"problem: --logtostderr: it has no meaning here; it is ignored",
			"problem: --healthz-port: deprecated; use --healthz-bind-address"}},
	} {
		path := writeFile(t, tc.body+"\n")
		args := append([]string{"--config=" + path, "--manifests=m"}, strings.Fields(tc.args)...)
		c := must(flagsOf(t, args...).Config())(t)
		var got []string
		for _, f := range c.Findings {
			got = append(got, strings.ReplaceAll(f.Severity.String()+": "+f.String(), path, "FILE"))
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s %s: got\n%s\nwant\n%s", tc.body, tc.args, strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
		}
	}
}

// TestLogLevelOverVerbosity: --log-level overrides the file's logging.verbosity, as every flag overrides the file, and a
// finding says so; -v on the command line counts beside it.
func TestLogLevelOverVerbosity(t *testing.T) {
	t.Parallel()
	const overridden = "logging.verbosity: 4 here, 0 by --log-level; the flag overrides the file"
	for _, tc := range []struct {
		file string
		args []string
		want string // the level
		says bool
	}{
		{"4", nil, "debug", false},
		{"4", []string{"--log-level=info"}, "info", true},
		{"4", []string{"--log-level=debug"}, "debug", false},
		{"2", []string{"--log-level=warn"}, "warn", false},
		{"2", []string{"--log-level=warn", "-v=4"}, "debug", false},
		{"4", []string{"--log-level=info", "-v=2"}, "info", false},
	} {
		args := append([]string{"--config=" + writeFile(t, "logging: {verbosity: "+tc.file+"}\n"), "--manifests=x", "--node-name=n"}, tc.args...)
		c := must(flagsOf(t, args...).Config())(t)
		if c.LogLevel != tc.want {
			t.Errorf("verbosity %s with %q: level %s, want %s", tc.file, tc.args, c.LogLevel, tc.want)
		}
		said := slices.ContainsFunc(c.Findings, func(f source.Finding) bool { return strings.HasSuffix(f.String(), overridden) })
		if said != tc.says {
			t.Errorf("verbosity %s with %q: said %v, want %v: %v", tc.file, tc.args, said, tc.says, c.Findings)
		}
	}
}
