// Package listeners finds programs on the node that listen where a Service captures what is sent.
//
// Rules for Services act before the kernel looks up a socket. A program that listens on the number of a node port, or on the
// address and port of an external or load balancer IP that is also an address of this node, receives nothing any more, and no error
// says so: the SSH server or the API server of the node is just out of reach (issue 100643 of kubernetes/kubernetes).
//
// # What is a conflict
//
// A socket and a frontend conflict if a packet to the socket's address would also be a packet to the frontend:
//
//   - A socket bound to one address conflicts with a frontend of that address, protocol and port; and with a node port,
//     if node ports answer at that address.
//   - A socket bound to every address of a family, or of both, conflicts with a frontend whose address is one of this
//     node's; and with a node port, if there is any address of this node at which node ports answer. The addresses of
//     devices that exist for Services only (Config.NotNode) are nobody's to listen at.
//   - At a health check node port this program listens itself. Anyone else there keeps it from doing so.
//   - A socket of an endpoint of that very Service, which runs in the node's network, is none: the Service's owner wants
//     what comes in at this port to go to such endpoints.
//   - A cache of DNS on the node (NodeLocal DNSCache) binds the cluster IP of the DNS Service on purpose, and has rules
//     that keep its packets from those of Services. Whether there are such rules is not looked at: a socket bound to a
//     cluster IP at port 53 is noted, but not counted.
//
// # Which sockets
//
// Listening ones of TCP and SCTP, and those of UDP that are bound but not connected. A UDP socket that is about to send
// looks like that too, for a moment; where the kernel may have chosen its port (net.ipv4.ip_local_port_range), it counts
// once it has been there for some seconds. Only the sockets of this network namespace are seen. Which process has one is seen
// only if it is in the same or an inner PID namespace.
package listeners
