package measure

import (
	"net/netip"
	"syscall"

	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
)

// Stage is a node with two pods: a client, and a server that answers at every address of some ranges.
type Stage struct {
	Node           *harness.Node
	Client, Server *harness.Pod
	listening      *probe.Server
}

// NewStage prepares a node that has two pods. Connections to EndpointPort at the addresses of these ranges are handed to handle, and
// end with it. Close ends the server.
func NewStage(n *harness.Node, handle func(fd int, peer syscall.Sockaddr), ranges ...netip.Prefix) (*Stage, error) {
	s := &Stage{Node: n, Client: n.Pods[0], Server: n.Pods[1]}
	// Clients reset connections by the hundred thousand. Kept for the usual ten seconds, they would fill the kernel's table, and
	// what is measured would depend on what was measured before.
	if err := n.Sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1"); err != nil {
		return nil, err
	}
	for _, p := range ranges {
		if err := s.Server.Take(p); err != nil {
			return nil, err
		}
	}
	var err error
	s.listening, err = probe.Serve(s.Server.Netns, EndpointPort, handle)
	return s, err
}

// Pod is an address of the server that no Service has.
func (s *Stage) Pod() netip.AddrPort { return netip.AddrPortFrom(s.Server.IP4, EndpointPort) }

// Close ends the server.
func (s *Stage) Close() { s.listening.Close() }
