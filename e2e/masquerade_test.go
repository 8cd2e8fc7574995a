package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"nodeproxy/e2e/harness"
)

// masqueradeExpectations says which address an endpoint sees, by configuration. All endpoints are on node1, so that
// replies come back through it also where nothing was masqueraded.
//
// Columns: who asks. n1c is a pod of node1, n2a a pod of node2 that sends through node1, node1 and outside as always.
// Rows: the configuration and the frontend; cip is the cluster IP, np a node port under externalTrafficPolicy Cluster,
// np-local one under Local.
//
//   - none: nothing tells pods from others, so that cluster traffic is never masqueraded.
//   - cluster, node: everything whose source is not in the cluster's (or the node's own) pod range comes from off the
//     cluster, and is masqueraded. In mode NodeCIDR that is so for the pods of other nodes.
//   - bridge, prefix: the same by incoming interface; pods of other nodes come in through eth0.
//   - all: everything to cluster IPs is masqueraded, other frontends as without.
//   - node ports under Cluster are always masqueraded, under Local never, but for what the node itself sends.
const masqueradeExpectations = `
config   frontend  n1c   n2a   node1  outside

none     cip       kept  kept  kept   kept
none     np        node  node  node   node
none     np-local  kept  kept  node   kept
cluster  cip       kept  kept  node   node
cluster  np        node  node  node   node
cluster  np-local  kept  kept  node   kept
node     cip       kept  node  node   node
node     np        node  node  node   node
node     np-local  kept  kept  node   kept
bridge   cip       kept  node  node   node
bridge   np        node  node  node   node
bridge   np-local  kept  kept  node   kept
prefix   cip       kept  node  node   node
prefix   np        node  node  node   node
prefix   np-local  kept  kept  node   kept
all      cip       node  node  node   node
all      np        node  node  node   node
all      np-local  kept  kept  node   kept
`

// masqueradeConfigs are the flags of the configurations above.
func masqueradeConfigs(w *harness.World) map[string][]string {
	ranges := w.Node1().PodCIDRs()
	return map[string][]string{
		"none":    nil,
		"cluster": {clusterCIDR},
		"node":    {"--detect-local-mode=NodeCIDR", fmt.Sprintf("--cluster-cidr=%s,%s", ranges[0], ranges[1])},
		"bridge":  {"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=" + harness.PodBridge},
		"prefix":  {"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=" + harness.PodInterfacePrefix},
		"all":     {clusterCIDR, "--masquerade-all"},
	}
}

// TestMasquerade: see masqueradeExpectations.
func TestMasquerade(t *testing.T) {
	t.Parallel()
	lines := strings.Split(strings.TrimSpace(masqueradeExpectations), "\n")
	columns := strings.Fields(lines[0])[2:]
	want := map[string]map[string][]string{} // config, frontend → cells
	for _, line := range lines[1:] {
		if f := strings.Fields(line); len(f) > 0 {
			if want[f[0]] == nil {
				want[f[0]] = map[string][]string{}
			}
			want[f[0]][f[1]] = f[2:]
		}
	}
	for config := range want {
		for _, variant := range harness.Variants {
			t.Run(config+"/"+string(variant), func(t *testing.T) {
				t.Parallel()
				w := harness.New(t, harness.Options{Bridge: config == "bridge"})
				w.Write(t, "nodes.yaml", w.NodeObjects()...)
				w.Write(t, "cluster.yaml", harness.Objects(harness.Service("cluster", 1), w.Ready("n1a", "n1b")...)...)
				local := harness.Service("local", 2, harness.Policies("Cluster", "Local"))
				w.Write(t, "local.yaml", harness.Objects(local, w.Ready("n1a", "n1b")...)...)
				w.Run(t, variant, masqueradeConfigs(w)[config]...)
				clients := map[string]*harness.Host{
					"n1c": w.Pod("n1c").Host, "n2a": w.Pod("n2a").Host, "node1": w.Node1().Host, "outside": w.Client}
				for _, family := range families {
					node := w.Node1().IP(family)
					for frontend, to := range map[string]netip.AddrPort{
						"cip": clusterIP(1, family), "np": nodePort(node, 1), "np-local": nodePort(node, 2)} {
						for i, column := range columns {
							client := clients[column]
							source := node
							if want[config][frontend][i] == "kept" {
								source = client.IP(family)
							}
							wantSource(t, client, to, source)
						}
					}
				}
			})
		}
	}
}

// TestMasqueradeBit: with another mark bit, masquerading works, and the default bit is free for others.
func TestMasqueradeBit(t *testing.T) {
	inWorld(t, func(t *testing.T, w *harness.World, variant harness.Variant) {
		w.Write(t, "s.yaml", harness.Objects(harness.Service("s", 1), w.Ready("n2a")...)...)
		for _, tool := range []string{"iptables", "ip6tables"} {
			mark := "-w -t mangle -A PREROUTING -i eth0 -p tcp -j MARK --or-mark 0x4000"
			if _, err := w.Node1().Output(variant.Tool(tool), strings.Fields(mark)...); err != nil {
				t.Fatal(err)
			}
		}
		flag := "--iptables-masquerade-bit" // in mode ipvs too
		if mode == harness.NFTables {
			flag = "--nftables-masquerade-bit"
		}
		w.Run(t, variant, clusterCIDR, flag+"=15")
		for _, family := range families {
			wantSource(t, w.Client, nodePort(w.Node1().IP(family), 1), w.Node1().IP(family))
			pod := netip.AddrPortFrom(w.Pod("n1a").IP(family), 8080)
			if a := w.Client.Ask("tcp", pod, harness.Patient); a.Source != w.Client.IP(family) {
				t.Errorf("plain traffic with mark bit 14 over IPv%d: %v, want it unchanged", family, a)
			}
		}
	})
}
