package config

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logs "k8s.io/component-base/logs/api/v1"
)

// Flags are a command line. They are kept as they were given, to be applied again whenever the configuration file changes.
type Flags struct {
	values values
	args   []arg
	// read is the content of the configuration file that is in force.
	read []byte
}

// arg is one flag of the command line.
type arg struct{ name, value string }

// Add defines the flags in fs. Their names, meaning and defaults are kube-proxy's where it has them, and underscores in a name
// are equivalent to dashes.
func (f *Flags) Add(fs *pflag.FlagSet) {
	fs.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	f.values.defaults()
	f.values.flags().VisitAll(func(flag *pflag.Flag) {
		flag.Value = &recorded{Value: flag.Value, name: flag.Name, args: &f.args}
		if flag.DefValue == "[]" || flag.DefValue == "0s" {
			flag.DefValue = "" // The help leaves it out.
		}
		fs.AddFlag(flag)
	})
}

// WriteConfigTo returns the value of --write-config-to.
func (f *Flags) WriteConfigTo() string { return f.values.own.writeConfigTo }

// recorded keeps what a flag was set to, in the order of the command line.
type recorded struct {
	pflag.Value
	name string
	args *[]arg
}

func (r *recorded) Set(text string) error {
	if err := r.Value.Set(text); err != nil {
		return err
	}
	*r.args = append(*r.args, arg{r.name, text})
	return nil
}

// apply applies a command line to v. It returns the flag that gave each field its value, and each flag without a field.
func (v *values) apply(args []arg) (given map[string]string, err error) {
	fs := v.flags()
	given = map[string]string{}
	for _, a := range args {
		if err := fs.Set(a.name, a.value); err != nil {
			return nil, fmt.Errorf("--%s: %w", a.name, err)
		}
		given["--"+a.name] = "--" + a.name
		if field := flagFields[a.name]; field != "" {
			given[field] = "--" + a.name
		}
	}
	v.complete(given)
	return given, nil
}

// flagFields maps flags to the fields of KubeProxyConfiguration that they set.
var flagFields = map[string]string{
	"mode": "mode", "proxy-mode": "mode", "node-name": "hostnameOverride", "hostname-override": "hostnameOverride",
	"kubeconfig": "clientConnection.kubeconfig", "kube-api-content-type": "clientConnection.contentType",
	"kube-api-qps": "clientConnection.qps", "kube-api-burst": "clientConnection.burst",
	"cluster-cidr": "clusterCIDR", "detect-local-mode": "detectLocalMode", "nodeport-addresses": "nodePortAddresses",
	"pod-bridge-interface": "detectLocal.bridgeInterface", "pod-interface-name-prefix": "detectLocal.interfaceNamePrefix",
	"masquerade-all": "iptables.masqueradeAll", "iptables-masquerade-bit": "iptables.masqueradeBit",
	"iptables-localhost-nodeports": "iptables.localhostNodePorts", "iptables-sync-period": "iptables.syncPeriod",
	"iptables-min-sync-period": "iptables.minSyncPeriod", "min-sync-period": "iptables.minSyncPeriod",
	"nftables-masquerade-bit": "nftables.masqueradeBit", "nftables-sync-period": "nftables.syncPeriod",
	"nftables-min-sync-period": "nftables.minSyncPeriod",
	"ipvs-sync-period":         "ipvs.syncPeriod", "ipvs-min-sync-period": "ipvs.minSyncPeriod", "ipvs-scheduler": "ipvs.scheduler",
	"ipvs-exclude-cidrs": "ipvs.excludeCIDRs", "ipvs-strict-arp": "ipvs.strictARP", "ipvs-tcp-timeout": "ipvs.tcpTimeout",
	"ipvs-tcpfin-timeout": "ipvs.tcpFinTimeout", "ipvs-udp-timeout": "ipvs.udpTimeout",
	"conntrack-max-per-core": "conntrack.maxPerCore", "conntrack-min": "conntrack.min",
	"conntrack-tcp-timeout-established": "conntrack.tcpEstablishedTimeout",
	"conntrack-tcp-timeout-close-wait":  "conntrack.tcpCloseWaitTimeout",
	"conntrack-tcp-be-liberal":          "conntrack.tcpBeLiberal", "conntrack-udp-timeout": "conntrack.udpTimeout",
	"conntrack-udp-timeout-stream": "conntrack.udpStreamTimeout", "config-sync-period": "configSyncPeriod",
	"bind-address": "bindAddress", "bind-address-hard-fail": "bindAddressHardFail", "profiling": "enableProfiling",
	"healthz-bind-address": "healthzBindAddress", "metrics-bind-address": "metricsBindAddress",
	"show-hidden-metrics-for-version": "showHiddenMetricsForVersion", "oom-score-adj": "oomScoreAdj",
	"feature-gates": "featureGates", "windows-service": "windowsRunAsService",
	"logging-format": "logging.format", "log-flush-frequency": "logging.flushFrequency", "v": "logging.verbosity",
	"vmodule": "logging.vmodule", "log-text-split-stream": "logging.options.text.splitStream",
	"log-text-info-buffer-size": "logging.options.text.infoBufferSize",
	"log-json-split-stream":     "logging.options.json.splitStream",
	"log-json-info-buffer-size": "logging.options.json.infoBufferSize",
}

// flagOf returns the shortest flag for a field, if there is one.
func flagOf(field string) string {
	var names []string
	for name, f := range flagFields {
		if f == field {
			names = append(names, name)
		}
	}
	sort.Slice(names, func(i, j int) bool {
		return len(names[i]) < len(names[j]) || len(names[i]) == len(names[j]) && names[i] < names[j]
	})
	if len(names) == 0 {
		return ""
	}
	return "--" + names[0]
}

// flags returns the flags bound to v, whose values are their defaults.
func (v *values) flags() *pflag.FlagSet {
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	fs.SortFlags = false
	v.sourceFlags(fs)
	v.ruleFlags(fs)
	v.serverFlags(fs)
	v.conntrackFlags(fs)
	v.ipvsFlags(fs)
	v.nftablesFlags(fs)
	v.logFlags(fs)
	v.ignoredFlags(fs)
	return fs
}

// sourceFlags are the flags for where things are read and written.
func (v *values) sourceFlags(fs *pflag.FlagSet) {
	kp, own := &v.kp, &v.own
	text(fs, &own.configFile, "config", "file with a KubeProxyConfiguration; flags override it")
	text(fs, &own.writeConfigTo, "write-config-to", "write the effective configuration to this file, and exit")
	text(fs, &kp.HostnameOverride, "node-name", "name of this node's Node object; by default the host's name")
	text(fs, &kp.HostnameOverride, "hostname-override", "same as --node-name")
	text(fs, &own.manifests, "manifests",
		"file or directory of YAML or JSON with Services, EndpointSlices, Endpoints, Pods and Nodes, watched in place of an API server")
	text(fs, &kp.ClientConnection.Kubeconfig, "kubeconfig",
		"kubeconfig file that says how to reach the API server; without it and --master, a pod uses its service account")
	text(fs, &own.master, "master", "URL of the API server; overrides the one in --kubeconfig")
	text(fs, &kp.ClientConnection.ContentType, "kube-api-content-type", "MIME type of requests to the API server")
	fs.Float32Var(&kp.ClientConnection.QPS, "kube-api-qps", kp.ClientConnection.QPS,
		"maximum number of requests to the API server per second, on average")
	fs.Int32Var(&kp.ClientConnection.Burst, "kube-api-burst", kp.ClientConnection.Burst,
		"maximum number of requests to the API server at once")
	fs.DurationVar(&kp.ConfigSyncPeriod.Duration, "config-sync-period", kp.ConfigSyncPeriod.Duration,
		"no effect: objects are watched")
	text(fs, &own.serviceCIDR, "service-cidr",
		"range from which a Service in the manifests gets its cluster IP if it names none; a comma-separated pair for dual stack")
	text(fs, &own.nodePortRange, "service-node-port-range",
		"range from which a Service in the manifests gets its node ports if it names none")
	fs.BoolVar(&own.cleanup, "cleanup", false, "remove what kube-proxy and nodeproxy keep in the kernel, and exit; see nodeproxy cleanup")
	fs.BoolVar(&own.takeOver, "take-over", own.takeOver,
		"write rules at once even if a kube-proxy or another nodeproxy runs on this node; by default nodeproxy waits until it has ended")
	fs.BoolVar(&own.initOnly, "init-only", false, "load kernel modules and set sysctls, which takes more privileges than anything else, and exit")
}

// ruleFlags are the flags for the rules.
func (v *values) ruleFlags(fs *pflag.FlagSet) {
	kp := &v.kp
	text(fs, (*string)(&kp.Mode), "mode", "how to program the kernel: "+strings.Join(Modes(), ", "))
	text(fs, (*string)(&kp.Mode), "proxy-mode", "same as --mode")
	text(fs, &v.own.iptablesBackend, "iptables-backend",
		"variant of iptables: nft, legacy, or auto for the one that already holds rules (modes iptables and ipvs)")
	text(fs, &kp.ClusterCIDR, "cluster-cidr",
		"range of pod addresses, for --detect-local-mode=ClusterCIDR; a comma-separated pair for dual stack")
	text(fs, (*string)(&kp.DetectLocalMode), "detect-local-mode",
		"how to recognise traffic from pods: ClusterCIDR (by --cluster-cidr), NodeCIDR (by the Node object), "+
			"BridgeInterface (by --pod-bridge-interface) or InterfaceNamePrefix (by --pod-interface-name-prefix)")
	text(fs, &kp.DetectLocal.BridgeInterface, "pod-bridge-interface", "bridge that pods are attached to, for --detect-local-mode=BridgeInterface")
	text(fs, &kp.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix",
		"prefix of the names of the pods' interfaces, for --detect-local-mode=InterfaceNamePrefix")
	fs.StringSliceVar(&kp.NodePortAddresses, "nodeport-addresses", kp.NodePortAddresses,
		"ranges of the node's addresses where node ports answer, \"primary\" for those of its Node object, \"localhost\" or \"all\"; "+
			"by default all, and in mode nftables primary")
	fs.BoolVar(&kp.IPTables.MasqueradeAll, "masquerade-all", kp.IPTables.MasqueradeAll, "masquerade all traffic to cluster IPs")
	fs.Int32Var(kp.IPTables.MasqueradeBit, "iptables-masquerade-bit", *kp.IPTables.MasqueradeBit,
		"bit of the packet mark that asks for masquerading, 0-31 (modes iptables and ipvs)")
	fs.BoolVar(kp.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", *kp.IPTables.LocalhostNodePorts,
		"let node ports answer on 127.0.0.1 too, which needs the sysctl route_localnet (mode iptables)")
	fs.BoolVar(&v.own.resetTCP, "reset-tcp", v.own.resetTCP,
		"reset TCP connections to endpoints that are gone, unless a Service's annotation nodeproxy.io/reset-tcp says otherwise "+
			"(modes iptables and nftables)")
	period := &kp.IPTables.MinSyncPeriod.Duration
	fs.DurationVar(period, "min-sync-period", *period, "same as --iptables-min-sync-period")
	fs.DurationVar(period, "iptables-min-sync-period", *period, "minimum time between two changes of the rules; 0 for none (modes iptables and nftables)")
	fs.DurationVar(&kp.IPTables.SyncPeriod.Duration, "iptables-sync-period", kp.IPTables.SyncPeriod.Duration,
		"how often the kernel is compared with what it should hold, even if nothing changed (modes iptables and nftables)")
	fs.Var(cliflag.NewMapStringBool(&kp.FeatureGates), "feature-gates",
		"kube-proxy's feature gates, as NAME=true or NAME=false; AllowServiceExternalIPs=false ignores spec.externalIPs")
}

// serverFlags are the flags for the process and its HTTP endpoints.
func (v *values) serverFlags(fs *pflag.FlagSet) {
	kp := &v.kp
	text(fs, &kp.BindAddress, "bind-address", "this node's IP address; 0.0.0.0 or :: for those of its Node object")
	fs.BoolVar(&kp.BindAddressHardFail, "bind-address-hard-fail", kp.BindAddressHardFail,
		"exit if the health check server or the metrics server can't listen at its address")
	text(fs, &kp.HealthzBindAddress, "healthz-bind-address", "IP address and port of the health check server; empty for none")
	text(fs, &kp.MetricsBindAddress, "metrics-bind-address", "IP address and port of the metrics server; empty for none")
	fs.Int32Var(&v.own.healthzPort, "healthz-port", v.own.healthzPort, "deprecated: see --healthz-bind-address")
	fs.Int32Var(&v.own.metricsPort, "metrics-port", v.own.metricsPort, "deprecated: see --metrics-bind-address")
	text(fs, &v.own.socket, "socket", "unix socket, for root only, through which other commands, such as status and explain, ask the running nodeproxy; empty for none")
	text(fs, &v.own.ui, "ui", "serve a page with the Services at /ui/ of the metrics server: node for clients on this node at a loopback address, "+
		"true for everybody who can reach the server, false for nobody")
	fs.BoolVar(&kp.EnableProfiling, "profiling", kp.EnableProfiling, "serve /debug/pprof at the metrics server")
	text(fs, &kp.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "no effect: no metric is hidden")
	fs.Int32Var(kp.OOMScoreAdj, "oom-score-adj", *kp.OOMScoreAdj,
		"oom_score_adj of this process: how readily the kernel kills it when memory runs out, -1000 to 1000")
	fs.Int32Var(&v.own.serviceMetrics, "service-metrics", v.own.serviceMetrics,
		"maximum number of Service ports with traffic metrics; 0 for none, -1 for 1000 in modes ipvs and nftables and "+
			"none in mode iptables, where reading them takes up to a second with 10,000 Services")
	text(fs, &v.own.sysctlDir, "sysctl-dir",
		"directory below which sysctls are written; in an unprivileged container, DIR if the node's /proc/sys/net is mounted at DIR/net")
	_ = fs.MarkHidden("healthz-port")
	_ = fs.MarkHidden("metrics-port")
}

func (v *values) conntrackFlags(fs *pflag.FlagSet) {
	c := &v.kp.Conntrack
	fs.Int32Var(c.MaxPerCore, "conntrack-max-per-core", *c.MaxPerCore,
		"maximum number of tracked connections per CPU core; 0 leaves the kernel's limit as it is")
	fs.Int32Var(c.Min, "conntrack-min", *c.Min,
		"minimum for the limit of tracked connections, whatever --conntrack-max-per-core comes to")
	fs.DurationVar(&c.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", c.TCPEstablishedTimeout.Duration,
		"how long the kernel tracks idle TCP connections; 0 leaves its setting as it is")
	fs.DurationVar(&c.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", c.TCPCloseWaitTimeout.Duration,
		"how long the kernel tracks TCP connections in state CLOSE_WAIT; 0 leaves its setting as it is")
	fs.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", c.TCPBeLiberal,
		"take packets outside the TCP window for valid (sysctl nf_conntrack_tcp_be_liberal)")
	fs.DurationVar(&c.UDPTimeout.Duration, "conntrack-udp-timeout", c.UDPTimeout.Duration,
		"how long the kernel tracks UDP flows without an answer; 0 leaves its setting as it is")
	fs.DurationVar(&c.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", c.UDPStreamTimeout.Duration,
		"how long the kernel tracks UDP flows with packets in both directions; 0 leaves its setting as it is")
}

func (v *values) nftablesFlags(fs *pflag.FlagSet) {
	c := &v.kp.NFTables
	const in = " (mode nftables)"
	fs.Int32Var(c.MasqueradeBit, "nftables-masquerade-bit", *c.MasqueradeBit, "bit of the packet mark that asks for masquerading, 0-31"+in)
	fs.DurationVar(&c.SyncPeriod.Duration, "nftables-sync-period", c.SyncPeriod.Duration,
		"how often the kernel is compared with what it should hold, even if nothing changed; by default --iptables-sync-period"+in)
	fs.DurationVar(&c.MinSyncPeriod.Duration, "nftables-min-sync-period", c.MinSyncPeriod.Duration,
		"minimum time between two changes of the kernel; by default --iptables-min-sync-period"+in)
}

func (v *values) ipvsFlags(fs *pflag.FlagSet) {
	c := &v.kp.IPVS
	const in = " (mode ipvs)"
	fs.DurationVar(&c.SyncPeriod.Duration, "ipvs-sync-period", c.SyncPeriod.Duration,
		"how often the kernel is compared with what it should hold, even if nothing changed"+in)
	fs.DurationVar(&c.MinSyncPeriod.Duration, "ipvs-min-sync-period", c.MinSyncPeriod.Duration,
		"minimum time between two changes of the kernel; 0 for none"+in)
	text(fs, &c.Scheduler, "ipvs-scheduler", "IPVS scheduler, which chooses an endpoint; empty for rr"+in)
	fs.StringSliceVar(&c.ExcludeCIDRs, "ipvs-exclude-cidrs", c.ExcludeCIDRs, "ranges whose virtual servers are left alone"+in)
	fs.BoolVar(&c.StrictARP, "ipvs-strict-arp", c.StrictARP,
		"keep other interfaces from answering ARP requests for addresses of Services, by arp_ignore=1 and arp_announce=2"+in)
	fs.DurationVar(&c.TCPTimeout.Duration, "ipvs-tcp-timeout", c.TCPTimeout.Duration,
		"how long IPVS remembers idle TCP connections; 0 leaves the kernel's setting as it is"+in)
	fs.DurationVar(&c.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", c.TCPFinTimeout.Duration,
		"how long IPVS remembers TCP connections after a FIN; 0 leaves the kernel's setting as it is"+in)
	fs.DurationVar(&c.UDPTimeout.Duration, "ipvs-udp-timeout", c.UDPTimeout.Duration,
		"how long IPVS remembers UDP flows; 0 leaves the kernel's setting as it is"+in)
	text(fs, &v.own.ipvsVIPs, "ipvs-vips",
		"how addresses of Services become local: routes for one local route per range of cluster IPs, addresses for one address per Service"+in)
	fs.DurationVar(&v.own.ipvsGrace, "ipvs-graceful-period", v.own.ipvsGrace,
		"how long connections may last to an endpoint that no EndpointSlice lists any more"+in)
}

func (v *values) logFlags(fs *pflag.FlagSet) {
	c := &v.kp.Logging
	text(fs, &v.own.logLevel, "log-level", "lowest level that is logged: debug, info, warn or error")
	fs.Uint32VarP((*uint32)(&c.Verbosity), "v", "v", uint32(c.Verbosity),
		"kube-proxy's log level; 4 or more is --log-level=debug")
	text(fs, &c.Format, "logging-format", "format of the log: text or json")
	fs.DurationVar(&c.FlushFrequency.Duration.Duration, "log-flush-frequency", c.FlushFrequency.Duration.Duration,
		"no effect: the log is not buffered")
	fs.Var(logs.VModuleConfigurationPflag(&c.VModule), "vmodule", "no effect: log levels are for the whole program")
	const stream = "no effect: there is one stream"
	fs.BoolVar(&c.Options.Text.SplitStream, "log-text-split-stream", c.Options.Text.SplitStream, stream)
	fs.Var(&c.Options.Text.InfoBufferSize, "log-text-info-buffer-size", stream)
	fs.BoolVar(&c.Options.JSON.SplitStream, "log-json-split-stream", c.Options.JSON.SplitStream, stream)
	fs.Var(&c.Options.JSON.InfoBufferSize, "log-json-info-buffer-size", stream)
	for _, name := range []string{"vmodule", "log-flush-frequency", "log-text-split-stream", "log-text-info-buffer-size",
		"log-json-split-stream", "log-json-info-buffer-size"} {
		_ = fs.MarkHidden(name)
	}
}

// ignoredFlags adds flags of kube-proxy, or of older releases of it, that have no effect.
func (v *values) ignoredFlags(fs *pflag.FlagSet) {
	v.own.ignored = map[string]*string{}
	for _, name := range slices.Sorted(maps.Keys(ignoredFlags)) {
		v.own.ignored[name] = new(string)
		value := fs.VarPF((*anything)(v.own.ignored[name]), name, "", "no effect")
		value.Hidden = true
		if ignoredFlags[name] == "bool" {
			value.NoOptDefVal = "true"
		}
	}
	fs.BoolVar(&v.kp.WindowsRunAsService, "windows-service", v.kp.WindowsRunAsService, "no effect: not on Linux")
	_ = fs.MarkHidden("windows-service")
}

// anything is the value of a flag without effect.
type anything string

func (a *anything) Set(text string) error { *a = anything(text); return nil }
func (a *anything) String() string        { return string(*a) }
func (a *anything) Type() string          { return "string" }

func text(fs *pflag.FlagSet, value *string, name, usage string) {
	fs.StringVar(value, name, *value, usage)
}
