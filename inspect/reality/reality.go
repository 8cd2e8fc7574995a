// Package reality has what is found out about a node itself, beside what is programmed: package node/endpoints finds it out, and package inspect says what it
// means for a Service.
package reality

import (
	"fmt"
	"net/netip"

	"nodeproxy/plan"
)

// Places are addresses of a Service.
type Places struct {
	Endpoints, ClusterIPs, ExternalIPs []netip.Addr
	// Pods is the range of all Pods of IPv4; invalid if it is not known.
	Pods netip.Prefix
}

// Origin is where packets come from that this node forwards: some address, and the interface. Mark is the mark that they have got here.
type Origin struct {
	Name, By string
	Addr     netip.Addr
	Mark     uint32
	// Outside says that they come from outside of the cluster.
	Outside bool
}

// Ways is what the kernel does with packets to addresses of a Service.
type Ways struct {
	// Unreached are the endpoints to which it has no route, with the reason for each, and Cut the cluster IPs to which it has none for packets of
	// this node: before these pass any rule, they need one.
	Unreached, Cut map[netip.Addr]string
	// NotForwarded are the families of the endpoints elsewhere whose packets this node does not forward.
	NotForwarded []plan.Family
	// Silent are the endpoints whose next hop the kernel has asked for in vain, with that and the interface.
	Silent map[netip.Addr]string
	// Near are those of them that are their own next hop, in the network of an interface, with its name.
	Near map[netip.Addr]string
	// Bridged are the endpoints at a bridge of which packets from one port to another pass no rule, with its name.
	Bridged map[netip.Addr]string
	// NotForwardedBy are the interfaces, of the default route, of those to endpoints and of origins, from which the node forwards no packets, though it does from others.
	NotForwardedBy []string
	// NoHairpin are the endpoints at a bridge whose own packets do not come back to them, with the bridge's port.
	NoHairpin map[netip.Addr]string
	// Unclaimed are the external IPs in the network of an interface that are not this node's, with its name.
	Unclaimed map[netip.Addr]string
	// Fixed are the endpoints elsewhere whose next hop has an entry among this node's neighbours that somebody has made, so that nobody is asked for it.
	Fixed map[netip.Addr]string
	// ByDefault are the endpoints to which the default route leads, with its next hop.
	ByDefault map[netip.Addr]string
	// Astray are the endpoints whose answers to clients outside leave by another interface than that of the default route, with its name.
	Astray map[netip.Addr]string
	// Uplink is the interface of the default route, and Marked says that rules for routing choose packets by their mark, which may have answers go back there.
	Uplink string
	Marked bool
	// PodMTU is the largest MTU of interfaces to Pods, where that of Narrow, by which packets leave for endpoints or for outside, is less: NarrowMTU.
	Narrow            string
	PodMTU, NarrowMTU int
	// Unserved are addresses of this node at which node ports do not answer, with their interfaces.
	Unserved map[netip.Addr]string
	// Looped are the endpoints for which a tunnel sends packets to an address of this node, with both.
	Looped map[netip.Addr]string
	// Lost are those for which a tunnel knows no host, with the next hop and the tunnel, and Captive cluster IPs in the network of a bridge, whose Pods look
	// for it there, with its name.
	Lost, Captive map[netip.Addr]string
	// Overlaps are networks of this node's bridges that overlap those of other interfaces, in words.
	Overlaps []string
	// Shut are the endpoints for which IPsec drops packets, or whose answers it drops, with the policy.
	Shut map[netip.Addr]string
	// Unrouted are endpoints to which this node has a route, but for what comes from elsewhere there is none, as rules for routing may have it.
	Unrouted []Unrouted
}

// Unrouted is an endpoint to which the kernel forwards nothing of an origin.
type Unrouted struct {
	Addr netip.Addr
	From Origin
	Why  string
}

// Listening is what is known of the listeners at an endpoint on this node.
type Listening struct {
	Addr     netip.AddrPort
	Protocol plan.Protocol
	// Pod is true if the endpoint has a network namespace of its own.
	Pod bool
	// Listens says that something listens there, and Loopback that it does so at a loopback address alone.
	Listens, Loopback bool
	// Others are other ports of the protocol at which anything listens that the endpoint's address reaches.
	Others []uint16
	// OtherFamily says that something listens there by the other IP family alone, and At are the addresses at which it does so alone.
	OtherFamily bool
	At          []netip.Addr
	// Waiting is how many connections wait there to be accepted, or bytes to be read, where they have not become fewer in a moment.
	Waiting uint32
	// Other is another protocol at whose port of this number something listens, where nothing does by this one; "" if there is none.
	Other plan.Protocol
	// Several says that more than one Pod on this node has the address, and nothing else is known.
	Several bool
	// Attachment is how its Pod is attached to this node.
	Attachment Attachment
}

// Attachment is what is wrong with the pair of interfaces between a Pod and this node. The zero value is as it should be, or nothing is known.
type Attachment struct {
	// Link is this node's end of it, Bridge the bridge by which packets for the Pod leave, if there is one.
	Link, Bridge string
	// Down says that an end is down, or its bridge, and Loose that the link is no port of the bridge.
	Down, Loose bool
	// By is another interface by which packets for the Pod leave, such as a tunnel; "" if they do not.
	By string
	// Wrong is the address in its network that an entry of this node's neighbours has for the endpoint (permanent), though no interface of the Pod
	// has it; "" where that is not so.
	Wrong string
	// MTU and OwnMTU are the most bytes that a packet may have at this node's end and at the Pod's, where they differ.
	MTU, OwnMTU int
	// NoRoute says why the Pod's answers do not get to this node, and NoDefault why those to others do not; "" if they do.
	NoRoute, NoDefault string
}

// Filtered is an endpoint whose answers the kernel drops.
type Filtered struct {
	Addr netip.Addr
	// By is the interface to it, by which its answers come, and Back that of the route to it, by which rp_filter has them come.
	By, Back string
}

// String says what happens to the answers.
func (f Filtered) String() string {
	return fmt.Sprintf("The kernel drops the answers of endpoint %s: packets to it leave by %s, where rp_filter is strict, but by the routes that hold for its answers they "+
		"should come by %s", f.Addr, f.By, f.Back)
}

// Reverse is what rp_filter does at the interfaces to endpoints.
type Reverse struct {
	// Strict are the interfaces where it is strict.
	Strict []string
	// Anywhere are all interfaces where it is strict.
	Anywhere []string
	Filtered []Filtered
	// Drops is how many packets it has dropped on this node, if that is Known.
	Drops uint64
	Known bool
}

// Blocking is a rule of another program that drops or rejects packets, or keeps them from being translated.
type Blocking struct {
	// Rule is the rule as nft or iptables shows it, and Place its table and chain.
	Rule, Place string
	// What is the traffic that it concerns, such as "cluster IP 10.96.0.1:80/TCP", and Answers whether it is what comes back from there.
	What    string
	Answers bool
	// Certain is true if it concerns all of that traffic, whoever sends it.
	Certain bool
	// Untracked says that the rule does not drop it, but keeps it from being tracked, so that nothing translates it.
	Untracked bool
	// Unmasqueraded says that the rule does not drop it, but keeps its source from being translated, and Diverted that it decides first about its
	// destination.
	Unmasqueraded, Diverted bool
	// Policy is true if no rule drops it but the policy of the chain that is Place.
	Policy bool
	// Unmarked says that it changes the mark by which packets are to be masqueraded, Missing that it gives them a source that this node does not have, and
	// ICMP that it drops the errors by which Pods learn that a packet was too long.
	Unmarked, Missing, ICMP bool
	// Inside says that the rule is in the network namespace of the endpoint, and To is the port to which it diverts what comes; 0 if that is not known.
	Inside bool
	To     uint16
	// Toward is the address to which it diverts what comes; invalid if that is not known.
	Toward netip.Addr
}

// Tunnel is an interface that sends packets in others: by UDP to a port, or by another protocol, whose port is 0.
type Tunnel struct {
	Name     string
	Protocol byte
	Port     uint16
	// By is the interface by which these leave and come; "" if it is not known.
	By string
	// Peer is another node that sends such packets, of IPv4; invalid if none is known.
	Peer netip.Addr
}
