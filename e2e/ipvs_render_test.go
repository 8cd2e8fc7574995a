package e2e

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// TestIPVSRenderIsInput: each section of what "render --mode=ipvs" prints is accepted by the program that its heading names, on a
// node that has nothing yet.
func TestIPVSRenderIsInput(t *testing.T) {
	w := harness.New(t, harness.Options{})
	w.Write(t, "nodes.yaml", w.NodeObjects()...)
	manyServices(t, w)
	path, err := harness.Binary()
	require.NoError(t, err)
	programs := map[string][]string{
		"# ipset restore": {"ipset", "restore"}, "# ipvsadm --restore": {"ipvsadm", "--restore"}, "# ip -batch": {"ip", "-batch", "-"},
		"# iptables-restore": {"iptables-restore", "-w"}, "# ip6tables-restore": {"ip6tables-restore", "-w"},
	}
	for i, family := range []string{"ipv4", "ipv6"} {
		node, name := w.Nodes[i+1], []string{"node2", "node3"}[i]
		for _, vips := range []string{"routes", "addresses"} {
			text, err := exec.Command(path, "render", "--mode=ipvs", "--ipvs-vips="+vips, "--manifests="+w.Manifests, "--node-name="+name,
				clusterCIDR, "--service-cidr="+harness.ServiceCIDR4.String()+","+harness.ServiceCIDR6.String(), "--family="+family).Output()
			require.NoError(t, err, "render")
			ran := 0
			for section := range strings.SplitSeq("\n"+string(text), "\n# ") {
				heading, input, _ := strings.Cut(section, "\n")
				program := programs["# "+heading]
				if program == nil {
					continue // The description of what is written to nftables.
				}
				ran++
				if _, err := node.OutputWithInput(input+"\n", program[0], program[1:]...); err != nil {
					t.Errorf("%s, --ipvs-vips=%s: %s: %v", family, vips, heading, err)
				}
			}
			if ran != 4 {
				t.Errorf("%s, --ipvs-vips=%s: %d sections for programs, want 4:\n%.2000s", family, vips, ran, text)
			}
			for _, undo := range [][]string{
				{"ip", "link", "del", "kube-ipvs0"}, {"ipvsadm", "--clear"}, {"iptables", "-t", "mangle", "-F"}, {"iptables", "-t", "nat", "-F"},
				{"iptables", "-F"}, {"ip6tables", "-t", "mangle", "-F"}, {"ip6tables", "-t", "nat", "-F"}, {"ip6tables", "-F"}, {"ipset", "destroy"},
			} {
				if _, err := node.OutputWithInput("", undo[0], undo[1:]...); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}
