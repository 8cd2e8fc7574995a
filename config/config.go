// Package config turns command line flags into one validated Config.
package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"nodeproxy/iptables"
	"nodeproxy/proxier/plan"
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
	// NodePorts is the range that node ports are allotted from.
	NodePorts PortRange
	// IPTablesBackend is the implementation of iptables to use.
	IPTablesBackend iptables.Variant
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0-31.
	MasqueradeBit int
	// MinSyncPeriod is the least time between two syncs; zero by default.
	MinSyncPeriod time.Duration
	// Settings decide what happens to packets.
	Settings plan.Settings
	// LogLevel is debug, info, warn or error.
	LogLevel string
}

// APIServer says how to reach the API server. With neither Kubeconfig nor Master, it is the one of the cluster that this
// program runs in as a pod.
type APIServer struct {
	Kubeconfig, Master string
	ContentType        string
	// QPS and Burst limit requests: so many a second in the long run, so many at once.
	QPS   float32
	Burst int
}

// PortRange is a range of ports, both ends included.
type PortRange struct {
	First, Last uint16
}

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// Flags are the values of the command line before they are understood.
type Flags struct {
	api                           APIServer
	mode, nodeName, manifests     string
	serviceCIDR, nodePortRange    string
	clusterCIDR, detectLocal      string
	bridgeInterface, interfacePfx string
	masqueradeAll                 bool
	masqueradeBit                 int
	nodePortAddresses             []string
	localhostNodePorts            bool
	iptablesBackend               string
	minSyncPeriod                 time.Duration
	logLevel                      string
	verbosity                     int
}

// Add defines the flags in fs. Their names and defaults are kube-proxy's where it has them.
func (f *Flags) Add(fs *pflag.FlagSet) {
	fs.StringVar(&f.mode, "mode", "iptables", "how to program the kernel: iptables")
	fs.StringVar(&f.mode, "proxy-mode", "iptables", "same as --mode")
	fs.StringVar(&f.nodeName, "node-name", "", "name of this node; by default the host's name")
	fs.StringVar(&f.nodeName, "hostname-override", "", "same as --node-name")
	fs.StringVar(&f.manifests, "manifests", "",
		"file or directory of YAML or JSON with Services, EndpointSlices, Endpoints, Pods and Nodes, watched in place of an API server")
	fs.StringVar(&f.api.Kubeconfig, "kubeconfig", "", "file that says how to reach the API server")
	fs.StringVar(&f.api.Master, "master", "", "URL of the API server; it goes before the one in --kubeconfig")
	fs.StringVar(&f.api.ContentType, "kube-api-content-type", "application/vnd.kubernetes.protobuf",
		"MIME type of requests to the API server")
	fs.Float32Var(&f.api.QPS, "kube-api-qps", 5, "requests to the API server a second, in the long run")
	fs.IntVar(&f.api.Burst, "kube-api-burst", 10, "requests to the API server at once")
	fs.StringVar(&f.serviceCIDR, "service-cidr", "10.96.0.0/16",
		"range that cluster IPs are allotted from where a Service names none; a comma-separated pair for dual stack")
	fs.StringVar(&f.nodePortRange, "service-node-port-range", "30000-32767",
		"range that node ports are allotted from where a Service names none")
	fs.StringVar(&f.clusterCIDR, "cluster-cidr", "",
		"range of pod addresses, by which traffic of pods is recognised in mode ClusterCIDR; a comma-separated pair for dual stack")
	fs.StringVar(&f.detectLocal, "detect-local-mode", string(plan.DetectClusterCIDR),
		"how to recognise traffic of pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	fs.StringVar(&f.bridgeInterface, "pod-bridge-interface", "", "bridge of the pods, in mode BridgeInterface")
	fs.StringVar(&f.interfacePfx, "pod-interface-name-prefix", "",
		"what the names of the pods' interfaces begin with, in mode InterfaceNamePrefix")
	fs.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all traffic to cluster IPs")
	fs.IntVar(&f.masqueradeBit, "iptables-masquerade-bit", iptables.DefaultMasqueradeBit,
		"bit of the packet mark that asks for masquerading, 0-31")
	fs.StringSliceVar(&f.nodePortAddresses, "nodeport-addresses", nil,
		"ranges of the node's addresses where node ports answer, or \"primary\" for those of its Node object; by default all")
	fs.BoolVar(&f.localhostNodePorts, "iptables-localhost-nodeports", true,
		"let node ports answer on 127.0.0.1 too, which needs the sysctl route_localnet")
	fs.StringVar(&f.iptablesBackend, "iptables-backend", string(iptables.Auto),
		"implementation of iptables: nft, legacy, or auto for the one that holds rules already")
	fs.DurationVar(&f.minSyncPeriod, "min-sync-period", 0, "least time between two changes of the rules; 0 for none")
	fs.DurationVar(&f.minSyncPeriod, "iptables-min-sync-period", 0, "same as --min-sync-period")
	fs.StringVar(&f.logLevel, "log-level", "info", "what to log: debug, info, warn or error")
	fs.IntVarP(&f.verbosity, "v", "v", 0, "kube-proxy's log level: 4 and more is --log-level=debug")
}

// Config understands the flags. Its error names every flag that is wrong, with what was wrong about it.
func (f *Flags) Config() (*Config, error) {
	var errs []error
	check := func(flag string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("--%s: %w", flag, err))
		}
	}
	c := &Config{
		Mode:            f.mode,
		NodeName:        strings.ToLower(strings.TrimSpace(f.nodeName)),
		Manifests:       f.manifests,
		API:             f.api,
		IPTablesBackend: iptables.Variant(f.iptablesBackend),
		MasqueradeBit:   f.masqueradeBit,
		MinSyncPeriod:   f.minSyncPeriod,
		LogLevel:        f.logLevel,
	}
	if f.verbosity >= 4 {
		c.LogLevel = "debug"
	}
	var err error
	if c.NodeName == "" {
		if c.NodeName, err = os.Hostname(); err != nil {
			errs = append(errs, fmt.Errorf("--node-name: not given, and the host's name can't be read: %w", err))
		}
		c.NodeName = strings.ToLower(c.NodeName)
	}
	if c.Mode != "iptables" {
		check("mode", fmt.Errorf("%q is not supported; iptables is", f.mode))
	}
	switch cluster := c.API.Kubeconfig != "" || c.API.Master != ""; {
	case c.Manifests != "" && cluster:
		check("manifests", errors.New("can't be combined with --kubeconfig or --master: objects come from one place"))
	case c.Manifests == "" && !cluster && os.Getenv("KUBERNETES_SERVICE_HOST") == "":
		check("manifests", errors.New("one of --manifests, --kubeconfig and --master is required outside of a cluster"))
	}
	c.ServiceCIDRs, err = onePerFamily(f.serviceCIDR)
	check("service-cidr", err)
	c.NodePorts, err = parsePorts(f.nodePortRange)
	check("service-node-port-range", err)
	switch c.IPTablesBackend {
	case iptables.Auto, iptables.NFT, iptables.Legacy:
	default:
		check("iptables-backend", fmt.Errorf("%q is none of auto, nft, legacy", f.iptablesBackend))
	}
	if c.MasqueradeBit < 0 || c.MasqueradeBit > 31 {
		check("iptables-masquerade-bit", fmt.Errorf("%d is not within 0-31", c.MasqueradeBit))
	}
	if c.MinSyncPeriod < 0 {
		check("min-sync-period", fmt.Errorf("%s is negative", c.MinSyncPeriod))
	}
	switch c.LogLevel {
	case "debug", "info", "warn", "error":
	default:
		check("log-level", fmt.Errorf("%q is none of debug, info, warn, error", c.LogLevel))
	}
	c.Settings.MasqueradeAll = f.masqueradeAll
	c.Settings.LocalhostNodePorts = f.localhostNodePorts
	c.Settings.NodePortAddresses, err = parseNodePortAddresses(f.nodePortAddresses)
	check("nodeport-addresses", err)
	f.detect(&c.Settings.DetectLocal, check)
	return c, errors.Join(errs...)
}

// detect reads the flags that say how traffic of pods is recognised.
func (f *Flags) detect(d *plan.DetectLocal, check func(string, error)) {
	d.Mode = plan.DetectLocalMode(f.detectLocal)
	var err error
	cidrs, err := onePerFamily(f.clusterCIDR)
	check("cluster-cidr", err)
	switch d.Mode {
	case plan.DetectClusterCIDR:
		d.CIDRs = cidrs
	case plan.DetectNodeCIDR:
	case plan.DetectBridgeInterface:
		d.Interface = f.bridgeInterface
		check("pod-bridge-interface", interfaceName(f.bridgeInterface, 15, "BridgeInterface"))
	case plan.DetectInterfaceNamePrefix:
		d.Interface = f.interfacePfx
		check("pod-interface-name-prefix", interfaceName(f.interfacePfx, 14, "InterfaceNamePrefix"))
	default:
		check("detect-local-mode", fmt.Errorf("%q is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix",
			f.detectLocal))
	}
}

// interfaceName checks the name of a network interface, or what one begins with: it gets into rules. A name has at most 15
// characters; a rule for a prefix needs one of them for its wildcard.
func interfaceName(name string, longest int, mode string) error {
	if name == "" {
		return fmt.Errorf("required with --detect-local-mode=%s", mode)
	}
	odd := strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune("/\"'\\+!", r) })
	if len(name) > longest || odd {
		return fmt.Errorf("%q can't be the name of a network interface, or begin one", name)
	}
	return nil
}

// onePerFamily reads a comma-separated list of CIDRs with at most one for each family.
func onePerFamily(text string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	seen := map[plan.Family]bool{}
	for _, part := range strings.Split(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		cidr, ok := parsePrefix(part)
		if !ok {
			return nil, fmt.Errorf("%q is no CIDR", part)
		}
		family := plan.FamilyOf(cidr.Addr())
		if seen[family] {
			return nil, fmt.Errorf("%q is a second range for %s; one is possible", part, family)
		}
		seen[family] = true
		out = append(out, cidr)
	}
	return out, nil
}

func parsePrefix(text string) (netip.Prefix, bool) {
	cidr, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	return plan.Unmapped(cidr)
}

func parsePorts(text string) (PortRange, error) {
	first, last, ok := strings.Cut(strings.TrimSpace(text), "-")
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if !ok || errA != nil || errB != nil || a == 0 || a > b {
		return PortRange{}, fmt.Errorf("%q is no range of ports such as 30000-32767", text)
	}
	return PortRange{uint16(a), uint16(b)}, nil
}

func parseNodePortAddresses(list []string) (plan.NodePortAddresses, error) {
	var out plan.NodePortAddresses
	for _, text := range list {
		text = strings.TrimSpace(text)
		if text == "primary" {
			out.Primary = true
			continue
		}
		cidr, ok := parsePrefix(text)
		if !ok {
			return out, fmt.Errorf("%q is neither a CIDR nor \"primary\"", text)
		}
		out.CIDRs = append(out.CIDRs, cidr)
	}
	if out.Primary && len(out.CIDRs) > 0 {
		return out, errors.New("\"primary\" can't be combined with CIDRs")
	}
	return out, nil
}
