// Package names has the name of everything that kube-proxy or this program keeps in the kernel, in any mode: one place to ask what is
// theirs, for cleanup, for taking over from another mode, and for finding what others have changed.
package names

import (
	"slices"
	"strings"
)

// A Table is a table of iptables.
type Table string

// The tables that hold chains of ours, by the names that iptables gives them.
const (
	Mangle Table = "mangle"
	Filter Table = "filter"
	NAT    Table = "nat"
)

// Tables are all of them, in the order in which they are written: what marks and refuses packets before what translates them.
var Tables = []Table{Mangle, Filter, NAT}

// The chains of fixed name. Those that kube-proxy has too bear its names, so that each program can take over from the other in place.
const (
	Services      = "KUBE-SERVICES"
	Postrouting   = "KUBE-POSTROUTING"
	MarkMasq      = "KUBE-MARK-MASQ"
	Forward       = "KUBE-FORWARD"
	NodePorts     = "KUBE-NODEPORTS"
	ProxyFirewall = "KUBE-PROXY-FIREWALL"

	ExternalServices = "KUBE-EXTERNAL-SERVICES"
	// ExternalNodePorts is this program's alone: node ports without endpoints, which kube-proxy keeps in KUBE-EXTERNAL-SERVICES.
	ExternalNodePorts = "KUBE-EXT-NODEPORTS"

	// Of mode ipvs, in kube-proxy and here.
	NodePort             = "KUBE-NODE-PORT"
	LoadBalancer         = "KUBE-LOAD-BALANCER"
	SourceRangesFirewall = "KUBE-SOURCE-RANGES-FIREWALL"
	IPVSFilter           = "KUBE-IPVS-FILTER"
	// Of mode ipvs, in kube-proxy alone.
	IPVSOutFilter = "KUBE-IPVS-OUT-FILTER"
	// Of mode ipvs, here alone.
	IPVSMark           = "KUBE-IPVS-MARK"       // mangle: which virtual server a packet is for
	IPVSUnmark         = "KUBE-IPVS-UNMARK"     // mangle: removes marks that have served
	ShortCircuit       = "KUBE-SHORT-CIRCUIT"   // mangle: external addresses under policy Local, from inside
	NodePortLocal      = "KUBE-NODE-PORT-LOCAL" // mangle: node ports under policy Local
	IPVSNodePorts      = "KUBE-IPVS-NODE-PORTS" // filter: node ports to refuse
	IPVSLocal          = "KUBE-IPVS-LOCAL"      // filter: external addresses under policy Local without an endpoint here
	IPVSNodePortsLocal = "KUBE-IPVS-NP-LOCAL"   // filter: node ports under policy Local without an endpoint here

	// ProxyCanary is kube-proxy's: its absence shows that another program has flushed all rules.
	ProxyCanary = "KUBE-PROXY-CANARY"

	// The kubelet's. It shares KUBE-FIREWALL with every mode of kube-proxy and of this program.
	KubeletFirewall = "KUBE-FIREWALL"
	KubeletHint     = "KUBE-IPTABLES-HINT"
	KubeletCanary   = "KUBE-KUBELET-CANARY"
)

// The prefixes of the chains that come and go with Services. Chains of the dispatch and endpoint trees have one of them
// too: a kube-proxy that takes over removes every chain with such a prefix that it does not want, and would fail to
// remove what such a chain still jumps to if it did not know that chain as its own.
const (
	PrefixCluster  = "KUBE-SVC-" // the endpoints under policy Cluster
	PrefixLocal    = "KUBE-SVL-" // the endpoints under policy Local
	PrefixExternal = "KUBE-EXT-" // traffic to external frontends
	PrefixFirewall = "KUBE-FW-"  // source ranges of load balancer IPs
	PrefixEndpoint = "KUBE-SEP-" // one endpoint
)

var prefixes = []string{PrefixCluster, PrefixLocal, PrefixExternal, PrefixFirewall, PrefixEndpoint}

// MaxChainName is the length of the longest name of a chain that iptables takes (XT_EXTENSION_MAXNAMELEN less the final NUL).
const MaxChainName = 28

// A Mode is a way in which kube-proxy or this program writes rules of iptables.
type Mode int

// The modes.
const (
	ModeIPTables Mode = iota
	ModeIPVS
)

// fixedChains are the chains of fixed name that kube-proxy and this program alone write, with the modes that have them. KUBE-FIREWALL
// is not among them: it belongs to the kubelet too.
var fixedChains = map[Table]map[string][]Mode{
	Mangle: {
		IPVSMark: {ModeIPVS}, IPVSUnmark: {ModeIPVS}, NodePort: {ModeIPVS}, NodePortLocal: {ModeIPVS},
		ShortCircuit: {ModeIPVS}, SourceRangesFirewall: {ModeIPVS},
		ProxyCanary: nil,
	},
	Filter: {
		Services: {ModeIPTables}, ExternalServices: {ModeIPTables}, NodePorts: {ModeIPTables},
		ProxyFirewall: {ModeIPTables}, Forward: {ModeIPTables, ModeIPVS},
		NodePort: {ModeIPVS}, SourceRangesFirewall: {ModeIPVS}, IPVSFilter: {ModeIPVS}, IPVSOutFilter: {ModeIPVS},
		IPVSNodePorts: {ModeIPVS}, IPVSLocal: {ModeIPVS}, IPVSNodePortsLocal: {ModeIPVS},
		ProxyCanary: nil,
	},
	NAT: {
		Services: {ModeIPTables, ModeIPVS}, NodePorts: {ModeIPTables},
		MarkMasq: {ModeIPTables, ModeIPVS}, Postrouting: {ModeIPTables, ModeIPVS},
		LoadBalancer: {ModeIPVS}, NodePort: {ModeIPVS},
		ProxyCanary: nil,
	},
}

// OfService reports whether a chain comes and goes with Services, as those of mode iptables do.
func OfService(name string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// IsOurs reports whether a chain belongs to kube-proxy or this program, in any mode, and to no other program.
func IsOurs(t Table, name string) bool {
	_, fixed := fixedChains[t][name]
	return fixed || OfService(name)
}

// InMode reports whether a chain is one that a mode has.
func InMode(m Mode, t Table, name string) bool {
	return slices.Contains(fixedChains[t][name], m) || m == ModeIPTables && OfService(name)
}

// Builtin reports whether a chain is one of the kernel's.
func Builtin(name string) bool {
	switch name {
	case "PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING":
		return true
	}
	return false
}
