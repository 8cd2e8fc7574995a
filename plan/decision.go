package plan

// Decision is one step on the way to a Verdict: what was found out about the packet, for programs and for people.
type Decision struct {
	Code Code
	Text string
}

// Code says what was decided. The list is closed: a new decision gets a new code.
type Code string

// The codes of what a packet is for.
const (
	// ForNoService: no Service has a frontend at the packet's destination.
	ForNoService Code = "ForNoService"
	// ForFrontend: the destination is the Verdict's Frontend, which ServicePort owns.
	ForFrontend Code = "ForFrontend"
	// ForHealthCheck: the destination is a health check node port, at which the node itself answers.
	ForHealthCheck Code = "ForHealthCheck"
	// NoNodePortsOnLoopback: the destination is a node port on a loopback address, where none answers with these settings.
	NoNodePortsOnLoopback Code = "NoNodePortsOnLoopback"
	// NoNodePortsAtAddress: the destination is a node port at an address that Settings.NodePortAddresses leaves out.
	NoNodePortsAtAddress Code = "NoNodePortsAtAddress"
)

// The codes of what keeps a packet from endpoints, or could.
const (
	// NoEndpoint: no node has a usable endpoint.
	NoEndpoint Code = "NoEndpoint"
	// NoEndpointForPolicy: there are usable endpoints, but none that the traffic policy allows on this node.
	NoEndpointForPolicy Code = "NoEndpointForPolicy"
	// InSourceRange: the packet's source is within a source range of the Service.
	InSourceRange Code = "InSourceRange"
	// OwnLoadBalancerIP: the source is the load balancer IP itself, and the node's address is within a source range.
	OwnLoadBalancerIP Code = "OwnLoadBalancerIP"
	// OutsideSourceRanges: the source is in none of the source ranges of the Service.
	OutsideSourceRanges Code = "OutsideSourceRanges"
	// LoopbackGuard: the destination is a loopback address and the source is none. Localhost node ports make the kernel route
	// such packets, so they are dropped.
	LoopbackGuard Code = "LoopbackGuard"
)

// The codes of which endpoints a packet may go to, and with which source.
const (
	// InternalPolicy: the internal traffic policy of the Service holds.
	InternalPolicy Code = "InternalPolicy"
	// ExternalPolicyCluster: the external traffic policy is Cluster, so the packet is masqueraded.
	ExternalPolicyCluster Code = "ExternalPolicyCluster"
	// ExternalPolicyLocal: the external traffic policy is Local, and it holds.
	ExternalPolicyLocal Code = "ExternalPolicyLocal"
	// ExternalPolicyFromPod: the external traffic policy is Local, but the packet comes from a pod, which reaches every endpoint.
	ExternalPolicyFromPod Code = "ExternalPolicyFromPod"
	// ExternalPolicyFromNode: the external traffic policy is Local, but the packet comes from the node itself, which reaches every
	// endpoint, masqueraded.
	ExternalPolicyFromNode Code = "ExternalPolicyFromNode"
	// MasqueradeAll: all traffic to cluster IPs is masqueraded (Settings.MasqueradeAll).
	MasqueradeAll Code = "MasqueradeAll"
	// MasqueradeNotFromPod: the packet is for a cluster IP and does not come from a pod, so it is masqueraded.
	MasqueradeNotFromPod Code = "MasqueradeNotFromPod"
	// MasqueradeHairpin: the source is one of the endpoints. What goes to that one is masqueraded.
	MasqueradeHairpin Code = "MasqueradeHairpin"
)
