package names

// NFTables is the name of the tables of mode nftables, one for each family. What removes a kube-proxy's leftovers does not know it.
const NFTables = "nodeproxy"

// The sets and maps of mode nftables. A frontend is an address, protocol and port; that of a node port has the address 0.0.0.0 or ::.
const (
	NFTServices             = "services"               // frontend: kind, which says what is done with its traffic
	NFTWithin               = "services-within"        // external frontend under policy Local: kind of what pods and the node itself send
	NFTKinds                = "kinds"                  // kind: the chain for it
	NFTKindsWithin          = "kinds-within"           // the same for services-within
	NFTEndpoints            = "endpoints"              // frontend, number: endpoint
	NFTLocalEndpoints       = "local-endpoints"        // the same for the endpoints on this node, under policy Local
	NFTChoices              = "choices"                // frontend with affinity, number: identifier of an endpoint
	NFTLocalChoices         = "local-choices"          // the same for the endpoints on this node
	NFTStickyEndpoints      = "sticky-endpoints"       // frontend with affinity, identifier: endpoint
	NFTLocalStickyEndpoints = "local-sticky-endpoints" // the same for the endpoints on this node
	NFTAffinity             = "affinity"               // begins the names of several, each for a share of frontends; frontend, client: identifier of its endpoint
	NFTLimited              = "limited"                // frontends that only some sources may reach
	NFTSourceRanges         = "source-ranges"          // frontend, range of sources that may reach it, length of its prefix
	NFTClusterIPs           = "cluster-ips"
	NFTSame                 = "same-byte" // two bytes that are the same
)

// The chains of mode nftables that do not depend on which kinds of Service ports there are.
const (
	NFTPrerouting   = "prerouting"
	NFTOutput       = "output"
	NFTPostrouting  = "postrouting"
	NFTForward      = "forward"
	NFTFilterOutput = "filter-output"
	NFTUnknown      = "unknown-cluster-ips"
	NFTToServices   = "to-services"
	NFTToNodePorts  = "to-node-ports"
	NFTToKind       = "to-kind"
	NFTToKindAgain  = "to-kind-again" // packets that met a change on their way through the maps
	NFTToKindWithin = "to-kind-within"
	NFTSplit        = "split" // policy Local: takes off what pods and the node itself send
	NFTSplitPorts   = "split-node-ports"
	NFTToEndpoint   = "to-endpoint"        // these have forms for node ports and for policy Local
	NFTToSticky     = "to-sticky-endpoint" // by identifier
	NFTChoice       = "choice"             // finds an identifier
	NFTKeep         = "keep"               // with each term of affinity: clients that are remembered
	NFTChoose       = "choose"             // and those that are not
	NFTCheckSource  = "check-source"
	NFTCheckRanges  = "check-ranges"
	NFTReject       = "reject-icmp"
	NFTRejectReset  = "reject-reset"
	NFTDrop         = "drop-packet"
)

// KubeProxyBases are the chains with hooks by which a kube-proxy in mode nftables translates packets, each by the name of the one here in
// the same place. Since Kubernetes 1.29, their names, types and priorities have been the same.
var KubeProxyBases = map[string]string{NFTPrerouting: "nat-prerouting", NFTOutput: "nat-output", NFTPostrouting: "nat-postrouting"}

// HandedOver begins the names of sets, and of chains without a hook, that this program leaves in kube-proxy's tables.
const HandedOver = "nodeproxy-"
