// Package config makes one validated Config of command line flags and of kube-proxy's configuration file.
package config

import (
	"fmt"
	"net/netip"
	"time"

	"nodeproxy/iptables"
	"nodeproxy/ipvs"
	"nodeproxy/plan"
	"nodeproxy/source"
)

// Config is what nodeproxy was asked to do.
type Config struct {
	// Mode is the backend: iptables.
	Mode string
	// NodeName is the name of this node's Node object; the host's name in lower case by default.
	NodeName string
	// Manifests is a file or directory with the objects to serve; empty where they come from the API server.
	Manifests string
	// API says how to reach the API server, if Manifests is empty.
	API APIServer
	// ServiceCIDRs are the ranges that cluster IPs are allotted from, at most one a family.
	ServiceCIDRs []netip.Prefix
	// ServiceCIDRsGiven is set where these are the ranges in use: with manifests, or by a flag. In a cluster, the default
	// is but a guess.
	ServiceCIDRsGiven bool
	// NodePorts is the range that node ports are allotted from.
	NodePorts PortRange
	// IPTablesBackend is the implementation of iptables to use; with Cleanup also BothVariants.
	IPTablesBackend iptables.Variant
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31.
	MasqueradeBit int
	// MinSyncPeriod is the least time between two syncs; zero by default.
	MinSyncPeriod time.Duration
	// SyncPeriod is the time after which the kernel is looked through even if nothing changed; 30 s by default.
	SyncPeriod time.Duration
	// Settings decide what happens to packets.
	Settings plan.Settings
	// Servers are the program's own HTTP endpoints.
	Servers Servers
	// Conntrack is what the kernel's connection tracking is set to.
	Conntrack Conntrack
	// IPVS and NFTables are for those modes only.
	IPVS     IPVS
	NFTables NFTables
	// OOMScoreAdj is how ready the kernel is to kill this process when memory runs out, -1000 to 1000; -999 by default.
	OOMScoreAdj int
	// SysctlDir is where kernel settings are written; /proc/sys by default.
	SysctlDir string
	// ServiceMetrics is for how many ServicePorts at most there are metrics of traffic; 0 for none.
	ServiceMetrics int
	// LogLevel is debug, info, warn or error; LogFormat is text or json.
	LogLevel, LogFormat string
	// Configz is the configuration as /configz shows it: a KubeProxyConfiguration of version v1alpha1.
	Configz any
	// Cleanup and InitOnly ask for something else than to run: to remove everything, or to do what needs most rights.
	Cleanup, InitOnly bool
	// TakeOver goes ahead though another proxy runs on the node.
	TakeOver bool
	// Findings are what the user should know about this configuration: values that were overridden, and those without
	// effect.
	Findings []source.Finding
}

// BothVariants is what --iptables-backend may say too where everything is cleaned up.
const BothVariants iptables.Variant = "both"

// APIServer says how to reach the API server. With neither Kubeconfig nor Master, it is the one of the cluster that this
// program runs in as a pod.
type APIServer struct {
	Kubeconfig, Master string
	// ContentType is the MIME type of requests. AcceptContentTypes lists those of answers; empty for the client's choice.
	ContentType, AcceptContentTypes string
	// QPS and Burst limit requests: so many a second in the long run, so many at once.
	QPS   float32
	Burst int
}

// PortRange is a range of ports, both ends included.
type PortRange struct {
	First, Last uint16
}

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Servers say where the program can be asked about itself. The zero AddrPort is an endpoint that is switched off.
type Servers struct {
	// Bind is what kube-proxy takes for the node's address, if it is not 0.0.0.0 or ::.
	Bind netip.Addr
	// Healthz is 0.0.0.0:10256 by default, Metrics is 127.0.0.1:10249.
	Healthz, Metrics netip.AddrPort
	// HardFail makes an address that can't be bound an error that ends the program.
	HardFail bool
	// Profiling serves /debug/pprof at Metrics.
	Profiling bool
}

// Conntrack is what the kernel's connection tracking is set to. Zero leaves a setting of the kernel as it is.
type Conntrack struct {
	// MaxPerCore times the number of CPUs is how many connections are tracked at most, but no fewer than Min.
	MaxPerCore, Min int
	// How long an idle connection is remembered.
	TCPEstablishedTimeout, TCPCloseWaitTimeout, UDPTimeout, UDPStreamTimeout time.Duration
	// TCPBeLiberal lets packets out of the TCP window pass.
	TCPBeLiberal bool
}

// IPVS are the settings of mode ipvs. A timeout of zero leaves the kernel's as it is.
type IPVS struct {
	SyncPeriod, MinSyncPeriod             time.Duration
	Scheduler                             string
	ExcludeCIDRs                          []netip.Prefix
	StrictARP                             bool
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// VIPs says how the addresses of Services become addresses of the node.
	VIPs ipvs.VIPs
	// GracePeriod is how long connections are left to an endpoint that no EndpointSlice lists any more.
	GracePeriod time.Duration
}

// NFTables are the settings of mode nftables.
type NFTables struct {
	MasqueradeBit             int
	MasqueradeAll             bool
	SyncPeriod, MinSyncPeriod time.Duration
}

// Config understands flags and file. Its error has a line for everything that is wrong, which begins with the flag or with
// FILE:LINE and the field.
func (f *Flags) Config() (*Config, error) {
	e, err := f.Effective()
	if err != nil {
		return nil, err
	}
	return e.understand(true)
}
