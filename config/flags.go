package config

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cliflag "k8s.io/component-base/cli/flag"
	logs "k8s.io/component-base/logs/api/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
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

// definition is that of a flag.
type definition struct {
	name  string
	value any // the path of the field that it sets, or a pointer to a setting without a field
	usage string
}

// flagFields maps flags to the fields of KubeProxyConfiguration that they set.
var flagFields = func() map[string]string {
	out := map[string]string{}
	for _, f := range new(own).list() {
		if at, ok := f.value.(string); ok {
			out[f.name] = at
		}
	}
	return out
}()

// flagOf returns the shortest flag for a field, if there is one.
func flagOf(field string) string {
	byLength := func(a, b string) int { return cmp.Or(len(a)-len(b), strings.Compare(a, b)) }
	for _, name := range slices.SortedFunc(maps.Keys(flagFields), byLength) {
		if flagFields[name] == field {
			return "--" + name
		}
	}
	return ""
}

// flags returns the flags bound to v, whose values are their defaults.
func (v *values) flags() *pflag.FlagSet {
	fs := pflag.NewFlagSet("nodeproxy", pflag.ContinueOnError)
	fs.SortFlags = false
	for _, f := range v.own.list() {
		if at, ok := f.value.(string); ok {
			to, _ := lookup(&v.kp, at)
			f.value = to.Addr().Interface()
		}
		f.define(fs)
	}
	for name, noValue := range ignoredFlags {
		fs.String(name, "", "no effect")
		fs.Lookup(name).NoOptDefVal = noValue
		_ = fs.MarkHidden(name)
	}
	for _, name := range hiddenFlags {
		_ = fs.MarkHidden(name)
	}
	return fs
}

// define adds a flag, whose value is a pointer, to fs. Its default is what that points to.
func (f definition) define(fs *pflag.FlagSet) {
	switch p := f.value.(type) {
	case *string:
		fs.StringVar(p, f.name, *p, f.usage)
	case *proxyconfig.ProxyMode:
		fs.StringVar((*string)(p), f.name, string(*p), f.usage)
	case *proxyconfig.LocalMode:
		fs.StringVar((*string)(p), f.name, string(*p), f.usage)
	case *[]string:
		fs.StringSliceVar(p, f.name, *p, f.usage)
	case *bool:
		fs.BoolVar(p, f.name, *p, f.usage)
	case *int32:
		fs.Int32Var(p, f.name, *p, f.usage)
	case *float32:
		fs.Float32Var(p, f.name, *p, f.usage)
	case *time.Duration:
		fs.DurationVar(p, f.name, *p, f.usage)
	case *metav1.Duration:
		fs.DurationVar(&p.Duration, f.name, p.Duration, f.usage)
	case *logs.TimeOrMetaDuration:
		fs.DurationVar(&p.Duration.Duration, f.name, p.Duration.Duration, f.usage)
	case *logs.VerbosityLevel: // also -v
		fs.Uint32VarP((*uint32)(p), f.name, f.name, uint32(*p), f.usage)
	case *logs.VModuleConfiguration:
		fs.Var(logs.VModuleConfigurationPflag(p), f.name, f.usage)
	case *map[string]bool:
		fs.Var(cliflag.NewMapStringBool(p), f.name, f.usage)
	default:
		fs.Var(f.value.(pflag.Value), f.name, f.usage)
	}
}

// hiddenFlags are those that the help leaves out, apart from those that have neither a field nor an effect.
var hiddenFlags = []string{"healthz-port", "metrics-port", "vmodule", "log-flush-frequency", "log-text-split-stream",
	"log-text-info-buffer-size", "log-json-split-stream", "log-json-info-buffer-size", "windows-service"}

// list returns the flags that have an effect or a field, in the order of the help. It does not look at the values of settings.
func (o *own) list() []definition {
	return slices.Concat(o.sourceFlags(), o.ruleFlags(), o.serverFlags(), o.kernelFlags(), o.logFlags())
}

// sourceFlags are the flags for where things are read and written.
func (o *own) sourceFlags() []definition {
	return []definition{
		{"config", &o.configFile, "file with a KubeProxyConfiguration; flags override it"},
		{"write-config-to", &o.writeConfigTo, "write the effective configuration to this file, and exit"},
		{"node-name", "hostnameOverride", "name of this node's Node object; by default the host's name"},
		{"hostname-override", "hostnameOverride", "same as --node-name"},
		{"manifests", &o.manifests,
			"file or directory of YAML or JSON with Services, EndpointSlices, Endpoints, Pods and Nodes, watched in place of an API server"},
		{"kubeconfig", "clientConnection.kubeconfig",
			"kubeconfig file that says how to reach the API server; without it and --master, a pod uses its service account"},
		{"master", &o.master, "URL of the API server; overrides the one in --kubeconfig"},
		{"kube-api-content-type", "clientConnection.contentType", "MIME type of requests to the API server"},
		{"kube-api-qps", "clientConnection.qps", "maximum number of requests to the API server per second, on average"},
		{"kube-api-burst", "clientConnection.burst", "maximum number of requests to the API server at once"},
		{"config-sync-period", "configSyncPeriod", "no effect: objects are watched"},
		{"service-cidr", &o.serviceCIDR,
			"range from which a Service in the manifests gets its cluster IP if it names none; a comma-separated pair for dual stack"},
		{"service-node-port-range", &o.nodePortRange, "range from which a Service in the manifests gets its node ports if it names none"},
		{"cleanup", &o.cleanup, "remove what kube-proxy and nodeproxy keep in the kernel, and exit; see nodeproxy cleanup"},
		{"take-over", &o.takeOver,
			"write rules at once even if a kube-proxy or another nodeproxy runs on this node; by default nodeproxy waits until it has ended"},
		{"hand-over-to", &o.handOverTo, "nftables, if a kube-proxy in that mode is to serve this node after nodeproxy: at its end, nodeproxy " +
			"leaves rules where they stay in force until that one has its own"},
		{"init-only", &o.initOnly, "load kernel modules and set sysctls, which takes more privileges than anything else, and exit"},
	}
}

// ruleFlags are the flags for the rules.
func (o *own) ruleFlags() []definition {
	return []definition{
		{"mode", "mode", "how to program the kernel: " + strings.Join(Modes(), ", ")},
		{"proxy-mode", "mode", "same as --mode"},
		{"iptables-backend", &o.iptablesBackend,
			"variant of iptables: nft, legacy, or auto for the one that already holds rules (modes iptables and ipvs)"},
		{"cluster-cidr", "clusterCIDR", "range of pod addresses, for --detect-local-mode=ClusterCIDR; a comma-separated pair for dual stack"},
		{"detect-local-mode", "detectLocalMode", "how to recognise traffic from pods: ClusterCIDR (by --cluster-cidr), NodeCIDR (by the Node " +
			"object), BridgeInterface (by --pod-bridge-interface) or InterfaceNamePrefix (by --pod-interface-name-prefix)"},
		{"pod-bridge-interface", "detectLocal.bridgeInterface", "bridge that pods are attached to, for --detect-local-mode=BridgeInterface"},
		{"pod-interface-name-prefix", "detectLocal.interfaceNamePrefix",
			"prefix of the names of the pods' interfaces, for --detect-local-mode=InterfaceNamePrefix"},
		{"nodeport-addresses", "nodePortAddresses", "ranges of the node's addresses where node ports answer, \"primary\" for those of its " +
			"Node object, \"localhost\" or \"all\"; by default all, and in mode nftables primary"},
		{"masquerade-all", "iptables.masqueradeAll", "masquerade all traffic to cluster IPs"},
		{"iptables-masquerade-bit", "iptables.masqueradeBit",
			"bit of the packet mark that asks for masquerading, 0-31 (modes iptables and ipvs)"},
		{"iptables-localhost-nodeports", "iptables.localhostNodePorts",
			"let node ports answer on 127.0.0.1 too, which needs the sysctl route_localnet (mode iptables)"},
		{"reset-tcp", &o.resetTCP, "reset TCP connections to endpoints that are gone, unless a Service's annotation nodeproxy.io/reset-tcp " +
			"says otherwise (modes iptables and nftables)"},
		{"min-sync-period", "iptables.minSyncPeriod", "same as --iptables-min-sync-period"},
		{"iptables-min-sync-period", "iptables.minSyncPeriod",
			"minimum time between two changes of the rules; 0 for none (modes iptables and nftables)"},
		{"iptables-sync-period", "iptables.syncPeriod",
			"how often the kernel is compared with what it should hold, even if nothing changed (modes iptables and nftables)"},
		{"feature-gates", "featureGates",
			"kube-proxy's feature gates, as NAME=true or NAME=false; AllowServiceExternalIPs=false ignores spec.externalIPs"},
	}
}

// serverFlags are the flags for the process and its HTTP endpoints.
func (o *own) serverFlags() []definition {
	return []definition{
		{"bind-address", "bindAddress", "this node's IP address; 0.0.0.0 or :: for those of its Node object"},
		{"bind-address-hard-fail", "bindAddressHardFail", "exit if the health check server or the metrics server can't listen at its address"},
		{"healthz-bind-address", "healthzBindAddress", "IP address and port of the health check server; empty for none"},
		{"metrics-bind-address", "metricsBindAddress", "IP address and port of the metrics server; empty for none"},
		{"healthz-port", &o.healthzPort, "deprecated: see --healthz-bind-address"},
		{"metrics-port", &o.metricsPort, "deprecated: see --metrics-bind-address"},
		{"socket", &o.socket,
			"unix socket, for root only, through which other commands, such as status and explain, ask the running nodeproxy; empty for none"},
		{"ui", &o.ui, "serve a page with the Services at /ui/ of the metrics server: node for clients on this node at a loopback address, " +
			"true for everybody who can reach the server, false for nobody"},
		{"profiling", "enableProfiling", "serve /debug/pprof at the metrics server"},
		{"show-hidden-metrics-for-version", "showHiddenMetricsForVersion", "no effect: no metric is hidden"},
		{"oom-score-adj", "oomScoreAdj", "oom_score_adj of this process: how readily the kernel kills it when memory runs out, -1000 to 1000"},
		{"service-metrics", &o.serviceMetrics, "maximum number of Service ports with traffic metrics; 0 for none, -1 for 1000 in modes ipvs " +
			"and nftables and none in mode iptables, where reading them takes up to a second with 10,000 Services"},
		{"sysctl-dir", &o.sysctlDir,
			"directory below which sysctls are written; in an unprivileged container, DIR if the node's /proc/sys/net is mounted at DIR/net"},
	}
}

// kernelFlags are the flags for connection tracking and for modes ipvs and nftables.
func (o *own) kernelFlags() []definition {
	const inIPVS, inNFTables = " (mode ipvs)", " (mode nftables)"
	return []definition{
		{"conntrack-max-per-core", "conntrack.maxPerCore",
			"maximum number of tracked connections per CPU core; 0 leaves the kernel's limit as it is"},
		{"conntrack-min", "conntrack.min", "minimum for the limit of tracked connections, whatever --conntrack-max-per-core comes to"},
		{"conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout",
			"how long the kernel tracks idle TCP connections; 0 leaves its setting as it is"},
		{"conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout",
			"how long the kernel tracks TCP connections in state CLOSE_WAIT; 0 leaves its setting as it is"},
		{"conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal",
			"take packets outside the TCP window for valid (sysctl nf_conntrack_tcp_be_liberal)"},
		{"conntrack-udp-timeout", "conntrack.udpTimeout",
			"how long the kernel tracks UDP flows without an answer; 0 leaves its setting as it is"},
		{"conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout",
			"how long the kernel tracks UDP flows with packets in both directions; 0 leaves its setting as it is"},

		{"ipvs-sync-period", "ipvs.syncPeriod", "how often the kernel is compared with what it should hold, even if nothing changed" + inIPVS},
		{"ipvs-min-sync-period", "ipvs.minSyncPeriod", "minimum time between two changes of the kernel; 0 for none" + inIPVS},
		{"ipvs-scheduler", "ipvs.scheduler", "IPVS scheduler, which chooses an endpoint; empty for rr" + inIPVS},
		{"ipvs-exclude-cidrs", "ipvs.excludeCIDRs", "ranges whose virtual servers are left alone" + inIPVS},
		{"ipvs-strict-arp", "ipvs.strictARP",
			"keep other interfaces from answering ARP requests for addresses of Services, by arp_ignore=1 and arp_announce=2" + inIPVS},
		{"ipvs-tcp-timeout", "ipvs.tcpTimeout", "how long IPVS remembers idle TCP connections; 0 leaves the kernel's setting as it is" + inIPVS},
		{"ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout",
			"how long IPVS remembers TCP connections after a FIN; 0 leaves the kernel's setting as it is" + inIPVS},
		{"ipvs-udp-timeout", "ipvs.udpTimeout", "how long IPVS remembers UDP flows; 0 leaves the kernel's setting as it is" + inIPVS},
		{"ipvs-vips", &o.ipvsVIPs, "how addresses of Services become local: routes for one local route per range of cluster IPs, addresses " +
			"for one address per Service" + inIPVS},
		{"ipvs-graceful-period", &o.ipvsGrace, "how long connections may last to an endpoint that no EndpointSlice lists any more" + inIPVS},

		{"nftables-masquerade-bit", "nftables.masqueradeBit", "bit of the packet mark that asks for masquerading, 0-31" + inNFTables},
		{"nftables-sync-period", "nftables.syncPeriod",
			"how often the kernel is compared with what it should hold, even if nothing changed; by default --iptables-sync-period" + inNFTables},
		{"nftables-min-sync-period", "nftables.minSyncPeriod",
			"minimum time between two changes of the kernel; by default --iptables-min-sync-period" + inNFTables},
	}
}

func (o *own) logFlags() []definition {
	const stream = "no effect: there is one stream"
	return []definition{
		{"log-level", &o.logLevel, "lowest level that is logged: debug, info, warn or error"},
		{"v", "logging.verbosity", "kube-proxy's log level; 4 or more is --log-level=debug"},
		{"logging-format", "logging.format", "format of the log: text or json"},
		{"log-flush-frequency", "logging.flushFrequency", "no effect: the log is not buffered"},
		{"vmodule", "logging.vmodule", "no effect: log levels are for the whole program"},
		{"log-text-split-stream", "logging.options.text.splitStream", stream},
		{"log-text-info-buffer-size", "logging.options.text.infoBufferSize", stream},
		{"log-json-split-stream", "logging.options.json.splitStream", stream},
		{"log-json-info-buffer-size", "logging.options.json.infoBufferSize", stream},
		{"windows-service", "windowsRunAsService", "no effect: not on Linux"},
	}
}
