// Package harness makes a small cluster network out of network namespaces, runs the real nodeproxy binary in one of its
// nodes, and sends real packets with real sockets.
//
//	outside client ──┐
//	node3 ── pods    │
//	node2 ── pods    ├── fabric (a bridge; its gateway swallows whatever leaves the cluster)
//	node1 ── pods ───┘
//	  └─ nodeproxy runs here
//
// Everything is dual stack. Pods have routed /32 and /128 addresses from their node's range, as with the usual CNI
// plugins; the other nodes have routes to them. The outside client and the other nodes send packets for the service
// range, for LoadBalancer and for external IPs to node1. Sockets are made by entering a namespace with a locked OS
// thread, so no external tool is part of a measurement.
//
// The namespaces have no names: each lives as long as a file descriptor or a process refers to it. That makes any number
// of worlds independent of each other, though all use the same addresses, and leaves the kernel to remove them however
// the test process ends; the daemons that it started get SIGKILL at that moment (PR_SET_PDEATHSIG).
package harness
