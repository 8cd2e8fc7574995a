package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"slices"
	"strconv"

	"nodeproxy/plan"
)

// The fixed chains. Names, and how the others are derived, are kube-proxy's, so that each can take over from the other in
// place.
const (
	chainServices         = "KUBE-SERVICES"
	chainExternalServices = "KUBE-EXTERNAL-SERVICES"
	chainNodePorts        = "KUBE-NODEPORTS"
	chainPostrouting      = "KUBE-POSTROUTING"
	chainMarkMasq         = "KUBE-MARK-MASQ"
	chainForward          = "KUBE-FORWARD"
	chainProxyFirewall    = "KUBE-PROXY-FIREWALL"
	chainFirewall         = "KUBE-FIREWALL" // shared with the kubelet
	// chainExternalNodePorts holds what kube-proxy has inline in KUBE-EXTERNAL-SERVICES: node ports without endpoints.
	chainExternalNodePorts = "KUBE-EXT-NODEPORTS"
)

// otherModes are the chains of fixed name that kube-proxy or this program keep in any mode, by table. Those of
// mode ipvs are kube-proxy's and, from KUBE-IPVS-MARK on, this program's. Not among them is what the kubelet keeps too.
var otherModes = map[table][]string{
	tableMangle: {"KUBE-PROXY-CANARY", "KUBE-IPVS-MARK", "KUBE-NODE-PORT", "KUBE-NODE-PORT-LOCAL", "KUBE-SHORT-CIRCUIT",
		"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-UNMARK"},
	tableFilter: {"KUBE-PROXY-CANARY", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
		"KUBE-IPVS-NODE-PORTS", "KUBE-IPVS-LOCAL", "KUBE-IPVS-NP-LOCAL"},
	tableNAT: {"KUBE-PROXY-CANARY", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER"},
}

// isOurs reports whether a chain is one of kube-proxy's or this program's, of whatever mode.
func isOurs(t table, name string) bool {
	switch {
	case mayBeStale(name) || slices.Contains(otherModes[t], name):
		return true
	case t == tableMangle:
		return false
	}
	switch name {
	case chainServices, chainExternalServices, chainNodePorts, chainPostrouting, chainMarkMasq, chainForward, chainProxyFirewall:
		return true
	}
	return false
}

// The prefixes of the chains that come and go with Services. Chains of the dispatch and endpoint trees have one of them
// too: a kube-proxy that takes over removes every chain with such a prefix that it does not want, and would fail to
// remove what such a chain still jumps to if it did not know that chain as its own.
const (
	prefixCluster  = "KUBE-SVC-" // the endpoints under policy Cluster
	prefixLocal    = "KUBE-SVL-" // the endpoints under policy Local
	prefixExternal = "KUBE-EXT-" // traffic to external frontends
	prefixFirewall = "KUBE-FW-"  // source ranges of load balancer IPs
	prefixEndpoint = "KUBE-SEP-" // one endpoint
)

// maxChainName is the longest name that iptables takes (XT_EXTENSION_MAXNAMELEN less the final NUL).
const maxChainName = 28

// hashName is 16 characters that stand for a text.
func hashName(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:])[:16]
}

// serviceChain names a chain of a ServicePort.
func serviceChain(prefix string, k plan.Key) string {
	return prefix + hashName(k.PortName()+k.Protocol.Lower())
}

// endpointChain names the chain of one endpoint of a ServicePort.
func endpointChain(k plan.Key, ep netip.AddrPort) string {
	return prefixEndpoint + hashName(k.PortName()+k.Protocol.Lower()+ep.String())
}

// groupChain names a branch of the endpoint tree that hangs below a ServicePort's chain.
func groupChain(prefix string, k plan.Key, of, group int) string {
	return prefix + hashName(k.PortName()+k.Protocol.Lower()+" endpoints "+strconv.Itoa(group)+" of "+strconv.Itoa(of))
}
