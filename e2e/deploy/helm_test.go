package deploy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/harness"
)

// podNetwork gives the pods of node1 addresses from the range of the node that no pod of the World has.
const podNetwork = `{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [{
    "type": "ptp",
    "ipam": {
      "type": "host-local",
      "dataDir": %q,
      "ranges": [[{"subnet": "10.244.1.128/25"}]],
      "routes": [{"dst": "0.0.0.0/0"}]
    }
  }]
}
`

// TestHelm: a release of the chart runs by a real kubelet, and the pod of "helm test", in a network namespace of its own, finds the API server by
// its name. It fails when that name leads nowhere.
func TestHelm(t *testing.T) {
	t.Parallel()
	m := newMachine(t, harness.NFTables)
	require.NoError(t, os.WriteFile(m.file("cni/pods.conflist"), fmt.Appendf(nil, podNetwork, m.file("addresses")), 0o644))
	helm := func(args ...string) (string, error) {
		return m.node.Output(tool(t, "helm"), append([]string{"--namespace=kube-system", "--kubeconfig=" + filepath.Join(m.Dir, "kubectl", "config")}, args...)...)
	}
	image, tag, _ := strings.Cut(imageName, ":")
	_, err := helm("install", "nodeproxy", project(t, "deploy", "chart"), "--wait", "--timeout="+patient.String(), "--set=config.mode=nftables",
		"--set=apiServer.host="+m.cp.Address().Addr().String(), fmt.Sprintf("--set=apiServer.port=%d", m.cp.Address().Port()),
		"--set=image.repository="+image, "--set=image.tag="+tag)
	require.NoError(t, err)
	m.serves(t)

	kubernetes, err := m.cp.Admin.CoreV1().Services("default").Get(t.Context(), "kubernetes", metav1.GetOptions{})
	require.NoError(t, err)
	m.serveDNS(t, "kubernetes.default.svc.cluster.local.", netip.MustParseAddr(kubernetes.Spec.ClusterIP))
	out, err := helm("test", "nodeproxy")
	if err != nil || !strings.Contains(out, "Succeeded") {
		t.Errorf("helm test: %v\n%s", err, out)
	}

	require.NoError(t, m.cp.Admin.DiscoveryV1().EndpointSlices("kube-system").Delete(t.Context(), "kube-dns-v4", metav1.DeleteOptions{}))
	if out, err := helm("test", "nodeproxy"); err == nil {
		t.Errorf("helm test without DNS: %s", out)
	}
	_, err = helm("uninstall", "nodeproxy", "--wait")
	require.NoError(t, err)
}

// serveDNS makes the cluster's DNS, which knows one name, a Service with an endpoint in pod n1a.
func (m *machine) serveDNS(t *testing.T, name string, address netip.Addr) {
	t.Helper()
	pod := m.Pod("n1a")
	var conn net.PacketConn
	require.NoError(t, pod.Do(func() (err error) {
		conn, err = net.ListenPacket("udp", netip.AddrPortFrom(pod.IP4, 53).String())
		return err
	}))
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		buf := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return // closed
			}
			var q dnsmessage.Message
			if q.Unpack(buf[:n]) != nil || len(q.Questions) != 1 {
				continue
			}
			q.Response, q.RecursionAvailable, q.Additionals = true, true, nil
			switch asked := q.Questions[0]; {
			case asked.Name.String() != name:
				q.RCode = dnsmessage.RCodeNameError
			case asked.Type == dnsmessage.TypeA:
				q.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: asked.Name, Class: dnsmessage.ClassINET, TTL: 5}, Body: &dnsmessage.AResource{A: address.As4()}}}
			}
			if answer, err := q.Pack(); err == nil {
				_, _ = conn.WriteTo(answer, from)
			}
		}
	}()

	svc := harness.Service("kube-dns", 2, harness.ClusterOnly, func(s *v1.Service) {
		s.Namespace, s.Spec.ClusterIP, s.Spec.ClusterIPs = metav1.NamespaceSystem, clusterDNS, []string{clusterDNS}
		s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = []v1.IPFamily{v1.IPv4Protocol}, nil
		s.Spec.Ports = []v1.ServicePort{{Name: "dns", Protocol: v1.ProtocolUDP, Port: 53, TargetPort: s.Spec.Ports[0].TargetPort}}
		s.Spec.Ports[0].TargetPort.IntVal = 53
	})
	_, err := m.cp.Admin.CoreV1().Services(svc.Namespace).Create(t.Context(), svc, metav1.CreateOptions{})
	require.NoError(t, err)
	for _, o := range harness.Slices(svc, m.Ready("n1a")...) {
		if slice := o.(*discovery.EndpointSlice); slice.AddressType == discovery.AddressTypeIPv4 {
			_, err := m.cp.Admin.DiscoveryV1().EndpointSlices(slice.Namespace).Create(t.Context(), slice, metav1.CreateOptions{})
			require.NoError(t, err)
		}
	}
	require.NoError(t, eventually(harness.Limit, func() error {
		out, err := m.node.Output("nft", "list", "map", "ip", "nodeproxy", "services")
		if err == nil && !strings.Contains(out, clusterDNS) {
			err = errors.New("no rule for DNS:\n" + out)
		}
		return err
	}))
}
