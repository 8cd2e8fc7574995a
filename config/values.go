package config

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	proxyconfig "k8s.io/kube-proxy/config/v1alpha1"
	"k8s.io/utils/ptr"

	"nodeproxy/plan"
)

// values are the settings before they are validated: those of kube-proxy's file, and those for which there are only flags. Flags
// are bound to its fields.
type values struct {
	kp  proxyconfig.KubeProxyConfiguration
	own own
}

// own are the settings without a field in kube-proxy's file.
type own struct {
	configFile, writeConfigTo  string
	manifests, master          string
	serviceCIDR, nodePortRange string
	iptablesBackend, ipvsVIPs  string
	ipvsGrace                  time.Duration
	logLevel, sysctlDir        string
	socket, ui                 string
	resetTCP                   bool
	serviceMetrics             int32 // below 0 for the default of the mode
	cleanup, initOnly          bool
	takeOver                   bool
	handOverTo                 string
	healthzPort, metricsPort   int32
}

// defaultMasqueradeBit is the bit that kube-proxy uses, and that other components have learned to keep off.
const defaultMasqueradeBit = 14

// ipvsVIPs are the values of --ipvs-vips, the default first.
var ipvsVIPs = []string{"routes", "addresses"}

// uiAccess are the values of --ui, the default first.
var uiAccess = []string{"node", "true", "false"}

const (
	healthzPort = 10256
	metricsPort = 10249
)

// defaults sets what is not set to kube-proxy's defaults, except that there is no minimum time between syncs.
func (v *values) defaults() {
	kp := &v.kp
	kp.APIVersion, kp.Kind = proxyconfig.SchemeGroupVersion.String(), "KubeProxyConfiguration"
	orDefault(&kp.BindAddress, "0.0.0.0")
	any4, local4 := "0.0.0.0", "127.0.0.1"
	if addr, err := netip.ParseAddr(kp.BindAddress); err == nil && !addr.Unmap().Is4() {
		any4, local4 = "::", "::1"
	}
	orDefault(&kp.HealthzBindAddress, any4)
	orDefault(&kp.MetricsBindAddress, local4)
	orDefault(&kp.Mode, proxyconfig.ProxyMode(defaultMode))
	orDefault(&kp.DetectLocalMode, proxyconfig.LocalMode(plan.DetectClusterCIDR))
	orDefault(&kp.OOMScoreAdj, ptr.To[int32](-999))
	orDefault(&kp.IPTables.MasqueradeBit, ptr.To[int32](defaultMasqueradeBit))
	orDefault(&kp.IPTables.LocalhostNodePorts, ptr.To(true))
	orDefault(&kp.IPTables.SyncPeriod.Duration, 30*time.Second)
	orDefault(&kp.IPVS.SyncPeriod.Duration, 30*time.Second)
	orDefault(&kp.NFTables.MasqueradeBit, ptr.To[int32](defaultMasqueradeBit))
	orDefault(&kp.NFTables.SyncPeriod.Duration, 30*time.Second)
	orDefault(&kp.Conntrack.MaxPerCore, ptr.To[int32](32<<10))
	orDefault(&kp.Conntrack.Min, ptr.To[int32](128<<10))
	orDefault(&kp.Conntrack.TCPEstablishedTimeout, &metav1.Duration{Duration: 24 * time.Hour})
	orDefault(&kp.Conntrack.TCPCloseWaitTimeout, &metav1.Duration{Duration: time.Hour})
	orDefault(&kp.ConfigSyncPeriod.Duration, 15*time.Minute)
	orDefault(&kp.ClientConnection.ContentType, "application/vnd.kubernetes.protobuf")
	orDefault(&kp.ClientConnection.QPS, 5)
	orDefault(&kp.ClientConnection.Burst, 10)
	orDefault(&kp.Logging.Format, "text")
	if kp.Logging.FlushFrequency.Duration.Duration == 0 {
		kp.Logging.FlushFrequency.Duration.Duration = 5 * time.Second
		kp.Logging.FlushFrequency.SerializeAsString = true
	}
	v.own = own{
		serviceCIDR: "10.96.0.0/16", nodePortRange: "30000-32767", iptablesBackend: string(AutoVariant), logLevel: "info",
		ipvsVIPs: ipvsVIPs[0], ipvsGrace: 5 * time.Minute,
		healthzPort: healthzPort, metricsPort: metricsPort, sysctlDir: "/proc/sys", socket: "/run/nodeproxy/nodeproxy.sock",
		ui:             uiAccess[0],
		serviceMetrics: -1,
	}
	v.complete(nil)
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// complete completes the values after flags were applied. Empty modes are the default ones. --log-level overrides a file's
// verbosity that asks for more. The deprecated flags for a port count unless the flag for the address names one; port 0 switches
// the endpoint off.
func (v *values) complete(given map[string]string) {
	const level, verbosity = "--log-level", "logging.verbosity"
	if given[level] != "" && given[verbosity] == "" && v.own.logLevel != "debug" && v.kp.Logging.Verbosity >= debugVerbosity {
		v.kp.Logging.Verbosity, given[verbosity] = 0, level
	}
	orDefault(&v.kp.Mode, proxyconfig.ProxyMode(defaultMode))
	orDefault(&v.kp.DetectLocalMode, proxyconfig.LocalMode(plan.DetectClusterCIDR))
	if v.kp.Mode == modeNFTables {
		v.shareFlags(given)
	}
	for _, s := range []struct {
		address     *string
		field, flag string
		port, usual int32
	}{
		{&v.kp.HealthzBindAddress, "healthzBindAddress", "healthz-port", v.own.healthzPort, healthzPort},
		{&v.kp.MetricsBindAddress, "metricsBindAddress", "metrics-port", v.own.metricsPort, metricsPort},
	} {
		switch {
		case given["--"+s.flag] == "":
			*s.address = withPort(*s.address, s.usual)
		case s.port == 0:
			*s.address = ""
		case given[s.field] != "":
			*s.address = withPort(*s.address, s.port)
		default:
			if host, _, err := net.SplitHostPort(*s.address); err == nil {
				*s.address = host
			}
			*s.address = withPort(*s.address, s.port)
		}
	}
}

// shareFlags applies the flags of mode iptables that kube-proxy applies to mode nftables too, for which it has no flags of its own.
func (v *values) shareFlags(given map[string]string) {
	from, to := &v.kp.IPTables, &v.kp.NFTables
	for field, set := range map[string]func(){
		"masqueradeAll": func() { to.MasqueradeAll = from.MasqueradeAll },
		"syncPeriod":    func() { to.SyncPeriod = from.SyncPeriod },
		"minSyncPeriod": func() { to.MinSyncPeriod = from.MinSyncPeriod },
	} {
		if flag := given["iptables."+field]; flag != "" && given["nftables."+field] == "" {
			given["nftables."+field] = flag
			delete(given, "iptables."+field)
			set()
		}
	}
}

// debugVerbosity is the lowest of kube-proxy's log levels that stands for --log-level=debug.
const debugVerbosity = 4

// withPort adds a port to an address without one.
func withPort(address string, port int32) string {
	bare := address
	if n := len(bare); n > 2 && bare[0] == '[' && bare[n-1] == ']' {
		bare = bare[1 : n-1]
	}
	if _, err := netip.ParseAddr(bare); err != nil {
		return address
	}
	return net.JoinHostPort(bare, strconv.Itoa(int(port)))
}
