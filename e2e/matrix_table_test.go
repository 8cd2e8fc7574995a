package e2e

import (
	"fmt"
	"strings"

	"nodeproxy/e2e/harness"
)

// situation is a set of endpoints that a Service may have. Clients come from node1, where nodeproxy runs.
type situation struct {
	name string
	// ready, terminating and notReady are the pods with endpoints in these conditions; terminating ones still serve.
	ready, terminating, notReady []string
	// cluster and local are the endpoints due to traffic under policy Cluster and Local (KEP-1669, KEP-2086).
	cluster, local []string
}

var situations = []situation{
	{
		name:    "local+remote",
		ready:   []string{"n1a", "n1b", "n2a", "n3a"},
		cluster: []string{"n1a", "n1b", "n2a", "n3a"},
		local:   []string{"n1a", "n1b"},
	},
	{
		name:    "remote-only",
		ready:   []string{"n2a", "n3a"},
		cluster: []string{"n2a", "n3a"},
	},
	{
		name:     "none",
		notReady: []string{"n1b", "n2b"},
	},
	{
		// Under each policy by itself, endpoints that shut down stand in while there is no ready one.
		name:        "terminating",
		terminating: []string{"n1a", "n2a"},
		notReady:    []string{"n1b"},
		cluster:     []string{"n1a", "n2a"},
		local:       []string{"n1a"},
	},
	{
		name:        "local-going",
		ready:       []string{"n2a"},
		terminating: []string{"n1a"},
		cluster:     []string{"n2a"},
		local:       []string{"n1a"},
	},
}

func (s situation) endpoints(w *harness.World) []harness.Endpoint {
	all := append(w.Ready(s.ready...), w.Terminating(s.terminating...)...)
	down := w.Ready(s.notReady...)
	for i := range down {
		no := false
		down[i].Conditions.Ready, down[i].Conditions.Serving = &no, &no
	}
	return append(all, down...)
}

// sources are the columns of the table of expectations, in order.
var sources = []string{"pod", "endpoint", "own-node", "other-node", "outside"}

// expectations says what a client gets, and what an endpoint sees of it. It follows the semantics of kube-proxy in
// iptables mode with a cluster CIDR given, but for the two differences named at the end.
//
// Clients: a pod of node1 that is no endpoint; n1a, which in most situations is an endpoint of the very Service that it
// asks; node1 itself; node2, which sends what is meant for a Service to node1; the outside client, likewise.
//
// Cells:
//
//	cluster, local   the endpoints that answer: those of the situation for that policy, each of them, and no other
//	/kept            they see the client's own address; but n1a, asked by itself, sees the node's (hairpin), since
//	                 a pod would not take an answer from itself as one from the Service
//	/node            they see node1's address: it was masqueraded, or is node1 itself
//	refused          an ICMP error or reset at once
//	dropped          silence, from a rule that drops: some other node has endpoints, and a load balancer shall try there
//	-                not applicable
//
// Why:
//   - Cluster IPs: what comes from outside the cluster CIDR (the nodes are outside) is masqueraded, since the endpoint
//     may be on a node that would answer past this one. Cluster traffic keeps its source.
//   - Other frontends under Cluster: everything is masqueraded, for the same reason.
//   - Other frontends under Local: pods and the node itself are treated as if the packet went out to a load balancer
//     and came in at any node: they get the endpoints of policy Cluster. Only others are held to local endpoints.
//   - No usable endpoint anywhere: refused. None that the policy allows: dropped.
//   - ::1 can't be routed, so that no node port answers there and what comes to it is the node's own affair.
//   - What a mode does otherwise stands under differences.
//
// kube-proxy differs in two places. What the node itself sends to a LoadBalancer or external IP of a Service without
// endpoints, it lets leave the node, since its rules that refuse external addresses are not called for OUTPUT; refused
// at once, as it is for every other client, is better than a wait for nothing. And under Local without local endpoints,
// its rule that drops by node port applies to ::1 too.
const expectations = `
frontend     policy   endpoints     pod           endpoint      own-node      other-node    outside

cluster-ip   Cluster  local+remote  cluster/kept  cluster/kept  cluster/node  cluster/node  cluster/node
cluster-ip   Cluster  remote-only   cluster/kept  cluster/kept  cluster/node  cluster/node  cluster/node
cluster-ip   Cluster  none          refused       refused       refused       refused       refused
cluster-ip   Cluster  terminating   cluster/kept  cluster/kept  cluster/node  cluster/node  cluster/node
cluster-ip   Cluster  local-going   cluster/kept  cluster/kept  cluster/node  cluster/node  cluster/node

cluster-ip   Local    local+remote  local/kept    local/kept    local/node    local/node    local/node
cluster-ip   Local    remote-only   dropped       dropped       dropped       dropped       dropped
cluster-ip   Local    none          refused       refused       refused       refused       refused
cluster-ip   Local    terminating   local/kept    local/kept    local/node    local/node    local/node
cluster-ip   Local    local-going   local/kept    local/kept    local/node    local/node    local/node

node-port    Cluster  local+remote  cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
node-port    Cluster  remote-only   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
node-port    Cluster  none          refused       refused       refused       refused       refused
node-port    Cluster  terminating   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
node-port    Cluster  local-going   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node

node-port    Local    local+remote  cluster/kept  cluster/kept  cluster/node  local/kept    local/kept
node-port    Local    remote-only   cluster/kept  cluster/kept  cluster/node  dropped       dropped
node-port    Local    none          refused       refused       refused       refused       refused
node-port    Local    terminating   cluster/kept  cluster/kept  cluster/node  local/kept    local/kept
node-port    Local    local-going   cluster/kept  cluster/kept  cluster/node  local/kept    local/kept

lb-vip       Cluster  local+remote  cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
lb-vip       Cluster  remote-only   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
lb-vip       Cluster  none          refused       refused       refused       refused       refused
lb-vip       Cluster  terminating   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
lb-vip       Cluster  local-going   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node

lb-vip       Local    local+remote  cluster/kept  cluster/kept  cluster/node  local/kept    local/kept
lb-vip       Local    remote-only   cluster/kept  cluster/kept  cluster/node  dropped       dropped
lb-vip       Local    none          refused       refused       refused       refused       refused
lb-vip       Local    terminating   cluster/kept  cluster/kept  cluster/node  local/kept    local/kept
lb-vip       Local    local-going   cluster/kept  cluster/kept  cluster/node  local/kept    local/kept

external-ip  Cluster  local+remote  cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
external-ip  Cluster  remote-only   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
external-ip  Cluster  none          refused       refused       refused       refused       refused
external-ip  Cluster  terminating   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node
external-ip  Cluster  local-going   cluster/node  cluster/node  cluster/node  cluster/node  cluster/node

external-ip  Local    local+remote  cluster/kept  cluster/kept  cluster/node  local/kept    local/kept
external-ip  Local    remote-only   cluster/kept  cluster/kept  cluster/node  dropped       dropped
external-ip  Local    none          refused       refused       refused       refused       refused
external-ip  Local    terminating   cluster/kept  cluster/kept  cluster/node  local/kept    local/kept
external-ip  Local    local-going   cluster/kept  cluster/kept  cluster/node  local/kept    local/kept

localhost4   Cluster  local+remote  -             -             cluster/node  -             -
localhost4   Cluster  remote-only   -             -             cluster/node  -             -
localhost4   Cluster  none          -             -             refused       -             -
localhost4   Cluster  terminating   -             -             cluster/node  -             -
localhost4   Cluster  local-going   -             -             cluster/node  -             -

localhost4   Local    local+remote  -             -             cluster/node  -             -
localhost4   Local    remote-only   -             -             cluster/node  -             -
localhost4   Local    none          -             -             refused       -             -
localhost4   Local    terminating   -             -             cluster/node  -             -
localhost4   Local    local-going   -             -             cluster/node  -             -

localhost6   Cluster  local+remote  -             -             refused       -             -
localhost6   Cluster  remote-only   -             -             refused       -             -
localhost6   Cluster  none          -             -             refused       -             -
localhost6   Cluster  terminating   -             -             refused       -             -
localhost6   Cluster  local-going   -             -             refused       -             -

localhost6   Local    local+remote  -             -             refused       -             -
localhost6   Local    remote-only   -             -             refused       -             -
localhost6   Local    none          -             -             refused       -             -
localhost6   Local    terminating   -             -             refused       -             -
localhost6   Local    local-going   -             -             refused       -             -
`

// A difference is what a mode does otherwise than the table says, by intent.
type difference struct {
	mode     harness.Mode
	frontend string
	// answered is what is due where the table has an answer. Cells of the frontend without one hold as they are.
	answered string
	why      string
}

// differences are all there are.
var differences = []difference{
	{harness.IPVS, "localhost4", "refused", "IPVS drops what leaves the node with a loopback address as its source; so node ports" +
		" are not served on 127.0.0.1 at all"},
	{harness.NFTables, "localhost4", "refused", "the configuration of this mode has no node ports on localhost, as in kube-proxy"},
}

// expected is what the table has for a cell, but for the differences of the mode.
func expected(r row, source string) string {
	want := r.cells[source]
	for _, d := range differences {
		if d.mode == mode && d.frontend == r.frontend && strings.Contains(want, "/") {
			return d.answered
		}
	}
	return want
}

// row is a line of the table of expectations.
type row struct {
	frontend, policy, situation string
	cells                       map[string]string // by source
}

func parseExpectations() ([]row, error) {
	var rows []row
	for i, line := range strings.Split(strings.TrimSpace(expectations), "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || i == 0 {
			continue
		}
		if len(fields) != 3+len(sources) {
			return nil, fmt.Errorf("expectation %q: %d columns, want %d", line, len(fields), 3+len(sources))
		}
		r := row{frontend: fields[0], policy: fields[1], situation: fields[2], cells: map[string]string{}}
		for c, source := range sources {
			r.cells[source] = fields[3+c]
		}
		rows = append(rows, r)
	}
	return rows, nil
}
