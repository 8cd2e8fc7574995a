package names

// NFTables is the name of the tables of mode nftables, one for each family. What removes a kube-proxy's leftovers does not know it.
const NFTables = "nodeproxy"

// The sets and maps of mode nftables. A frontend is an address, protocol and port; a Service port is named by the first of its
// frontends, which is its cluster IP if it has one.
const (
	NFTServices         = "services"           // frontend: kind, which says what is done with its traffic
	NFTFrontends        = "frontends"          // frontend other than the first: the name of its Service port
	NFTWithin           = "services-within"    // external frontend under policy Local: kind for what pods and the node itself send
	NFTNodePorts        = "node-ports"         // as services, for node ports
	NFTNodePortServices = "node-port-services" // as frontends, for node ports
	NFTNodePortsWithin  = "node-ports-within"  // as services-within, for node ports
	NFTKinds            = "kinds"              // kind: the chain for it
	NFTEndpoints        = "endpoints"          // name of a Service port, number: endpoint
	NFTLocalEndpoints   = "local-endpoints"    // the same for the endpoints on this node, under policy Local
	NFTSticky           = "sticky"             // name of a Service port with affinity, endpoint
	NFTLocalSticky      = "local-sticky"       // the same for the endpoints on this node
	NFTAffinity         = "affinity"           // name of a Service port, client: endpoint
	NFTLimited          = "limited"            // frontends that only some sources may reach
	NFTSourceRanges     = "source-ranges"      // frontend, source that may reach it
	NFTClusterIPs       = "cluster-ips"
	NFTSame             = "same-byte" // two bytes that are the same
)

// The chains of mode nftables that do not depend on which kinds of Service ports there are.
const (
	NFTPrerouting  = "prerouting"
	NFTOutput      = "output"
	NFTPostrouting = "postrouting"
	NFTForward     = "forward"
	NFTToServices  = "to-services"
	NFTToNodePorts = "to-node-ports"
	NFTCheckSource = "check-source"
	NFTReject      = "reject"
	NFTRejectReset = "reject-reset"
	NFTDrop        = "drop"
)
