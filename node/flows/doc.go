// Package flows keeps the kernel's conntrack table in step with the plan.
//
// The kernel chooses an endpoint for the first packet of a flow only. A TCP client notices that its endpoint is gone and connects
// again. A UDP or SCTP client that keeps sending from the same port keeps the flow alive, and its packets go to the old endpoint,
// possibly for hours. A Reconciler removes such flows: the next packet is then the first of a new flow, and the current rules
// decide about it.
//
// # Which flows are stale
//
// A flow is judged by where its client sent it (the original destination) and by who replies (the reply source, which differs from
// the original destination if the flow was translated). Source translation does not matter, so masqueraded flows and those of a pod
// to itself are judged alike. An original destination belongs to a frontend if address, protocol and port are those of a cluster,
// load balancer or external IP; otherwise, if protocol and port are those of a node port and the address is one of this node's at
// which node ports answer. A flow of a pod to some other host is therefore never taken for one to a node port, whatever its port
// number (issue 49881 of kubernetes/kubernetes).
//
// A flow to an existing frontend is stale unless its reply source is an endpoint that serves. Consequences:
//
//   - Without endpoints every flow is stale, so that clients are refused, and do not send into the void (issue 139628).
//   - A flow that was not translated, because it is older than the Service or its rules, is stale.
//   - An endpoint that is terminating but still serves keeps its flows. So does one that serves but that traffic policy
//     or hints now leave out: they decide about new flows, as for TCP. An endpoint that is not ready keeps none.
//   - The plan does not say whether an endpoint serves that is left out only for being on another node, unless policy Cluster
//     is in use too. It counts as serving until it is no longer listed.
//   - Where other rules translate packets for a frontend, such as those of a hostPort with the number of a node port,
//     their flows look stale: every full pass removes the entry, and the next packet makes it anew.
//
// A flow to a frontend that existed earlier in the life of this process is stale if it was translated (issue 141371). Such flows
// are looked for until two full passes have succeeded, as a packet that met the old rules may still be on its way through the
// kernel when the first pass begins. A flow that was not translated belongs to no Service.
//
// What existed before this process started can't be known. The first full pass therefore assumes that a translated flow to an
// address of the cluster's service ranges without a frontend belongs to a Service that is gone. Later passes do not, since the flow
// may be another proxy's. Flows to external IPs and node ports that vanished while no proxy ran remain.
//
// Flows in conntrack zones other than the default one belong to the program that made the zone and are left alone.
//
// # Connections that begin early
//
// A TCP connection whose first packet comes before the rules of its Service is not translated, and neither are the packets
// that its client sends again: it hangs until the client gives up. Such a connection is removed once the frontend leads to
// endpoints, and the next SYN begins it anew. Only a connection in state SYN_SENT that has seen no answer and is not
// translated is removed. It is looked for when a frontend is new or gets its first endpoints, once more in the next full
// pass, and after each sync that compares everything, since that may have repaired rules. All frontends of a batch share one
// dump, of which the kernel leaves out (Linux 5.17 or later) what has been answered or translated.
//
// # Stray answers
//
// An answer that is on its way while its flow is removed, by this package or by IPVS itself, is the first packet of a flow
// from the endpoint to the client. When the client's packets come to the same endpoint again, theirs would be the same flow in
// the other direction. Rules that translate have the kernel choose another source port then. IPVS does not: Linux 6.12 was
// seen to drop the client's packets for as long as it remembers that answer, which is nf_conntrack_udp_timeout, 30 seconds.
// With Config.StrayAnswers such flows are therefore removed when a UDP endpoint comes back that had left, a few times more in the
// quarter of a minute after that, and by two full passes after it has left. What has seen no answer and is not translated loses nothing by that: its next packet is
// treated as the last one was.
//
// # When
//
// After a change that can make a flow stale, and periodically (Config.Period), since no event reports a flow that slipped
// through. A change of a TCP port's endpoints costs nothing, and neither does a UDP port that only gains
// endpoints. From the moment that the rules of a plan begin to be written, flows are judged by it, so that no flow of the
// new rules is taken for a stale one.
//
// Package kernel/conntrack reads the flows, filtered by protocol and, where a change concerns one IPv4 address or one port only, by
// those.
package flows
