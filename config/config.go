// Package config reads command line flags and kube-proxy's configuration file into one validated Config.
package config

import (
	"net/netip"
	"time"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// Config is the validated configuration.
type Config struct {
	// Mode is how the kernel is programmed: one of Modes.
	Mode string
	// NodeName is the name of this node's Node object; the host's name in lower case by default.
	NodeName string
	// Manifests is a file or directory with the objects to serve; empty if they come from the API server.
	Manifests string
	// API says how to reach the API server, if Manifests is empty.
	API APIServer
	// ServiceCIDRs are the ranges of cluster IPs, at most one of each family.
	ServiceCIDRs []netip.Prefix
	// ServiceCIDRsGiven is set if these are the ranges in use: with manifests, or by a flag. In a cluster, the default is only a
	// guess.
	ServiceCIDRsGiven bool
	// NodePorts is the range of node ports.
	NodePorts plan.PortRange
	// IPTablesBackend is the implementation of iptables to use; BothVariants only with Cleanup.
	IPTablesBackend Variant
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31.
	MasqueradeBit int
	// MinSyncPeriod is the minimum time between two syncs; zero by default.
	MinSyncPeriod time.Duration
	// SyncPeriod is the time after which the kernel is compared with the desired state even if nothing changed; 30 s by default.
	SyncPeriod time.Duration
	// Settings decide what happens to packets.
	Settings plan.Settings
	// Servers are the program's own HTTP endpoints.
	Servers Servers
	// Conntrack is what the kernel's connection tracking is set to.
	Conntrack Conntrack
	// IPVS is for that mode only.
	IPVS IPVS
	// OOMScoreAdj is the oom_score_adj of this process, -1000 to 1000; -999 by default.
	OOMScoreAdj int
	// SysctlDir is the directory of kernel settings; /proc/sys by default.
	SysctlDir string
	// Socket is the path of the unix socket at which the running nodeproxy answers; /run/nodeproxy/nodeproxy.sock by default, empty
	// for none.
	Socket string
	// ServiceMetrics is the maximum number of ServicePorts with metrics of traffic; 0 for none.
	ServiceMetrics int
	// LogLevel is debug, info, warn or error; LogFormat is text or json.
	LogLevel, LogFormat string
	// Configz is the configuration as /configz shows it: a KubeProxyConfiguration of version v1alpha1.
	Configz any
	// Cleanup removes everything instead of running; InitOnly does only what needs most privileges.
	Cleanup, InitOnly bool
	// TakeOver writes rules even if another proxy runs on the node.
	TakeOver bool
	// HandOver leaves rules at the end that a kube-proxy in mode nftables does not remove before it has its own.
	HandOver bool
	// Findings are about this configuration: values that are overridden, and those without effect.
	Findings []source.Finding
}

// Variant is a value of --iptables-backend.
type Variant string

// The values of --iptables-backend. AutoVariant is the variant whose tables hold rules already; BothVariants is for cleanup.
const (
	AutoVariant   Variant = "auto"
	NFTVariant    Variant = "nft"
	LegacyVariant Variant = "legacy"
	BothVariants  Variant = "both"
)

// APIServer configures the connection to the API server. With neither Kubeconfig nor Master, it is that of the cluster in which
// this program runs as a pod.
type APIServer struct {
	Kubeconfig, Master string
	// ContentType is the MIME type of requests. AcceptContentTypes lists those of answers; empty for the client's choice.
	ContentType, AcceptContentTypes string
	// QPS and Burst limit requests: on average per second, and at once.
	QPS   float32
	Burst int
}

// Servers configures the HTTP endpoints. The zero AddrPort disables one.
type Servers struct {
	// Bind is the node's address, unless it is 0.0.0.0 or ::.
	Bind netip.Addr
	// Healthz is 0.0.0.0:10256 by default, Metrics is 127.0.0.1:10249.
	Healthz, Metrics netip.AddrPort
	// HardFail ends the program if an address can't be bound.
	HardFail bool
	// Profiling serves /debug/pprof at Metrics.
	Profiling bool
	// UI says who gets the page with the Services at Metrics: node for clients on this node, the default; true for all; false for nobody.
	UI string
}

// Conntrack configures the kernel's connection tracking. Zero leaves a setting of the kernel as it is.
type Conntrack struct {
	// MaxPerCore times the number of CPUs is the maximum number of tracked connections, but at least Min.
	MaxPerCore, Min int
	// How long an idle connection is remembered.
	TCPEstablishedTimeout, TCPCloseWaitTimeout, UDPTimeout, UDPStreamTimeout time.Duration
	// TCPBeLiberal lets packets out of the TCP window pass.
	TCPBeLiberal bool
}

// IPVS are the settings of mode ipvs. A timeout of zero leaves the kernel's as it is.
type IPVS struct {
	Scheduler                             string
	ExcludeCIDRs                          []netip.Prefix
	StrictARP                             bool
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// VIPs says how the addresses of Services become addresses of the node: as "routes" or as "addresses".
	VIPs string
	// GracePeriod is how long connections may last to an endpoint that no EndpointSlice lists any longer.
	GracePeriod time.Duration
}

// Config reads and validates flags and file. Its error has a line for each fault, which begins with the flag or with FILE:LINE and
// the field.
func (f *Flags) Config() (*Config, error) {
	e, err := f.Effective()
	if err != nil {
		return nil, err
	}
	return e.validate(true)
}

// Parse reads and validates a file with this content, whose name is for messages, as it is without any flags.
func Parse(name string, content []byte) (*Config, error) {
	f := &Flags{}
	f.values.defaults()
	f.values.own.configFile = name
	e, err := f.over(content)
	if err != nil {
		return nil, err
	}
	return e.Config()
}
