package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	authentication "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// lab is a control plane and nodes like each other: for each number of Services one for each proxy, so that every cold
// start is on a node where nothing has been programmed.
type lab struct {
	*harness.World
	cp      *cluster.ControlPlane
	objects objects
	// sites are those of nodeproxy and of kube-proxy, for one number of Services after the other.
	sites [][2]*site
}

// site is a node with the proxy that is measured on it, and two pods: a client, and a server that answers at every address
// of endpointRange.
type site struct {
	proxy          proxy
	node           *harness.Node
	client, target *harness.Pod
	server         *server
	kubeconfig     string
}

// newLab makes a lab without Services. Close removes it.
func newLab(ctx context.Context, o options, proxies [2]proxy) (*lab, error) {
	pods := []int{0} // The first node is the control plane's.
	for range o.sizes {
		pods = append(pods, 2, 2)
	}
	w, err := harness.Build(harness.Options{Pods: pods, Ports: []uint16{}})
	if err != nil {
		return nil, err
	}
	l := &lab{World: w}
	if err := l.build(ctx, o, proxies); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close ends everything in the lab and removes it.
func (l *lab) Close() error {
	for _, pair := range l.sites {
		for _, s := range pair {
			if s != nil && s.server != nil {
				s.server.close()
			}
		}
	}
	if l.cp != nil {
		l.cp.Close()
	}
	return l.World.Close()
}

func (l *lab) build(ctx context.Context, o options, proxies [2]proxy) (err error) {
	if l.cp, err = cluster.Start(l.World, l.Nodes[0].Host); err != nil {
		return err
	}
	// All EndpointSlices are written here. The controllers would find nothing to do, but look at each object.
	l.cp.ControllerManager.Kill()
	l.objects = objects{client: l.cp.Admin, endpoints: o.endpoints}
	kubeconfigs, err := l.kubeconfigs(ctx)
	if err != nil {
		return err
	}
	for i := range o.sizes {
		l.sites = append(l.sites, [2]*site{})
		for j, p := range proxies {
			n := l.Nodes[1+2*i+j]
			s := &site{proxy: p, node: n, client: n.Pods[0], target: n.Pods[1], kubeconfig: kubeconfigs[p.name]}
			l.sites[i][j] = s
			if err := s.build(); err != nil {
				return err
			}
			_, err := l.cp.Admin.CoreV1().Nodes().Create(ctx, l.NodeObject(n, map[string]string{v1.LabelHostname: n.Name}),
				metav1.CreateOptions{})
			if err != nil {
				return fmt.Errorf("node %s: %w", n.Name, err)
			}
		}
	}
	return nil
}

func (s *site) build() (err error) {
	// The probes reset connections by the thousand. Kept for the usual ten seconds, they would fill the kernel's table.
	if err := s.node.Sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1"); err != nil {
		return err
	}
	// Packets to a Service that is not programmed go to the target too, where nobody listens at that port: so a probe of
	// what is not there yet is refused at once.
	for _, p := range []netip.Prefix{endpointRange, harness.ServiceCIDR4} {
		if err := routeTo(s.node, s.target, p); err != nil {
			return err
		}
	}
	s.server, err = serve(s.target.Netns, endpointPort)
	return err
}

// routeTo sends a range from a node to one of its pods, where all of it is local.
func routeTo(node *harness.Node, pod *harness.Pod, p netip.Prefix) error {
	dst := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
	toPod, err := node.Netlink().LinkByName(harness.PodInterfacePrefix + pod.Name)
	if err != nil {
		return fmt.Errorf("interface of %s to %s: %w", node.Name, pod.Name, err)
	}
	lo, err := pod.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback of %s: %w", pod.Name, err)
	}
	err = node.Netlink().RouteReplace(&netlink.Route{
		LinkIndex: toPod.Attrs().Index, Dst: dst, Gw: pod.IP4.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
	})
	if err != nil {
		return fmt.Errorf("route to %s in %s: %w", p, node.Name, err)
	}
	err = pod.Netlink().RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: dst, Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
	if err != nil {
		return fmt.Errorf("make %s local in %s: %w", p, pod.Name, err)
	}
	return nil
}

// kubeconfigs makes one for each proxy, by its name. Each is the ServiceAccount that it has in a cluster: nodeproxy that of
// deploy/rbac.yaml, kube-proxy one with the ClusterRole that every API server has for it.
func (l *lab) kubeconfigs(ctx context.Context) (map[string]string, error) {
	own, _, err := l.cp.Install(ctx)
	if err != nil {
		return nil, err
	}
	const account, ns = "kube-proxy", metav1.NamespaceSystem
	accounts := l.cp.Admin.CoreV1().ServiceAccounts(ns)
	_, err = accounts.Create(ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("service account of kube-proxy: %w", err)
	}
	_, err = l.cp.Admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbac.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "system:node-proxier"},
		Subjects:   []rbac.Subject{{Kind: rbac.ServiceAccountKind, Name: account, Namespace: ns}},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("rights of kube-proxy: %w", err)
	}
	token, err := accounts.CreateToken(ctx, account, &authentication.TokenRequest{
		Spec: authentication.TokenRequestSpec{ExpirationSeconds: ptr.To(int64((6 * time.Hour).Seconds()))},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("token of kube-proxy: %w", err)
	}
	cfg, err := clientcmd.LoadFromFile(own)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", own, err)
	}
	for _, user := range cfg.AuthInfos {
		user.Token = token.Status.Token
	}
	path := filepath.Join(l.Dir, "kube-proxy.kubeconfig")
	return map[string]string{nodeproxyName: own, kubeProxyName: path}, clientcmd.WriteToFile(*cfg, path)
}
