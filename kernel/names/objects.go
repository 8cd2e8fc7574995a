package names

// Device is the network interface that has the addresses of Services in mode ipvs, kube-proxy's and ours.
const Device = "kube-ipvs0"

// The nftables tables. There is one of each for each family.
const (
	IPVSMarks = "nodeproxy-ipvs-marks" // mode ipvs: keeps marks of this program and of others apart
	IPVSPorts = "nodeproxy-ipvs-ports" // mode ipvs: makes single ports of external IPs the node's
	// Trace exists while "nodeproxy trace --live" follows packets.
	Trace = "nodeproxy-trace"
	// KubeProxy is kube-proxy's, in its mode nftables.
	KubeProxy = "kube-proxy"
)

// Counters are kube-proxy's accounting objects (nfacct), with which rules of its mode iptables count packets.
var Counters = []string{"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"}

// Routing by port, in mode ipvs: a packet to a diverted port of an external IP gets PortsMark, and a routing rule with PortsRulePriority
// sends what has that mark to PortsRouteTable, where the address is local.
const (
	PortsRouteTable = 2496
	// PortsRulePriority is behind table local, so that an address of the node stays the node's, and before all tables that say where
	// other hosts are.
	PortsRulePriority = 90
	// A packet has PortsMark only between the last chain before routing and the first one behind it. No virtual server has this mark:
	// it has the signature, and a protocol that does not exist.
	PortsMark = 0x28030000
	// ThrowProtocol is the protocol of the routes that keep an address from being local while its own route is removed.
	ThrowProtocol = 246
)

// Marks that lead a packet to a virtual server have MarkSignature in the bits of MarkSignatureMask. Both are of 31 bits, which are spread over
// the mark around the bit that asks for masquerading.
const (
	MarkSignature     = 0x5 << 27
	MarkSignatureMask = 0xf << 27
)

// Socket is the abstract Unix socket that a nodeproxy holds in its network namespace while it runs.
const Socket = "@nodeproxy"
