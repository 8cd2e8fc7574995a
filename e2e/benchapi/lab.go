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

// lab is a control plane and two nodes like each other, one for each proxy. On each there are two pods: a client, and a
// server that answers at every address of endpointRange.
type lab struct {
	*harness.World
	cp      *cluster.ControlPlane
	objects objects
	sites   []*site
}

// site is a node with the proxy that is measured on it.
type site struct {
	proxy          proxy
	node           *harness.Node
	client, server *harness.Pod
	servers        *servers
	kubeconfig     string
}

// newLab makes a lab for these proxies, without Services. Close removes it.
func newLab(ctx context.Context, endpoints int, proxies ...proxy) (*lab, error) {
	w, err := harness.Build(harness.Options{Pods: []int{2, 2, 0}, Ports: []uint16{}})
	if err != nil {
		return nil, err
	}
	l := &lab{World: w}
	if err := l.build(ctx, endpoints, proxies); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close ends everything in the lab and removes it.
func (l *lab) Close() error {
	for _, s := range l.sites {
		if s.servers != nil {
			s.servers.close()
		}
	}
	if l.cp != nil {
		l.cp.Close()
	}
	return l.World.Close()
}

func (l *lab) build(ctx context.Context, endpoints int, proxies []proxy) (err error) {
	if l.cp, err = cluster.Start(l.World, l.Nodes[2].Host); err != nil {
		return err
	}
	// All EndpointSlices are written here. The controllers would find nothing to do, but look at each object.
	l.cp.ControllerManager.Kill()
	l.objects = objects{client: l.cp.Admin, endpoints: endpoints}
	kubeconfigs, err := l.kubeconfigs(ctx)
	if err != nil {
		return err
	}
	for i, p := range proxies {
		n := l.Nodes[i]
		s := &site{proxy: p, node: n, client: n.Pods[0], server: n.Pods[1], kubeconfig: kubeconfigs[p.account]}
		l.sites = append(l.sites, s)
		if err := s.build(); err != nil {
			return err
		}
		_, err := l.cp.Admin.CoreV1().Nodes().Create(ctx, l.NodeObject(n, map[string]string{v1.LabelHostname: n.Name}),
			metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	return nil
}

func (s *site) build() (err error) {
	// The probes reset connections by the ten thousand. Kept for the usual ten seconds, they would fill the kernel's table.
	if err := s.node.Sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1"); err != nil {
		return err
	}
	// Packets to a service that no rule takes go to the server too, where nobody listens at that port: so a probe of what
	// is not there yet is refused at once instead of waiting for an answer.
	for _, p := range []netip.Prefix{endpointRange, harness.ServiceCIDR4} {
		if err := s.routeToServer(p); err != nil {
			return err
		}
	}
	s.servers, err = serve(s.server.Netns, endpointPort)
	return err
}

// routeToServer sends a range from the node to the server, where all of it is local.
func (s *site) routeToServer(p netip.Prefix) error {
	dst := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
	toServer, err := s.node.Netlink().LinkByName(harness.PodInterfacePrefix + s.server.Name)
	if err != nil {
		return fmt.Errorf("interface of %s to %s: %w", s.node.Name, s.server.Name, err)
	}
	lo, err := s.server.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback of %s: %w", s.server.Name, err)
	}
	err = s.node.Netlink().RouteReplace(&netlink.Route{
		LinkIndex: toServer.Attrs().Index, Dst: dst, Gw: s.server.IP4.AsSlice(), Flags: int(netlink.FLAG_ONLINK),
	})
	if err != nil {
		return fmt.Errorf("route to %s in %s: %w", p, s.node.Name, err)
	}
	err = s.server.Netlink().RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: dst, Type: syscall.RTN_LOCAL, Table: syscall.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
	if err != nil {
		return fmt.Errorf("make %s local in %s: %w", p, s.server.Name, err)
	}
	return nil
}

// kubeconfigs makes one for the ServiceAccount of each proxy. That of kube-proxy has the ClusterRole that every API server
// has for it.
func (l *lab) kubeconfigs(ctx context.Context) (map[string]string, error) {
	own, _, err := l.cp.Install(ctx)
	if err != nil {
		return nil, err
	}
	const account, ns = "kube-proxy", metav1.NamespaceSystem
	_, err = l.cp.Admin.CoreV1().ServiceAccounts(ns).Create(ctx,
		&v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
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
	token, err := l.cp.Admin.CoreV1().ServiceAccounts(ns).CreateToken(ctx, account, &authentication.TokenRequest{
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
	return map[string]string{"nodeproxy": own, account: path}, clientcmd.WriteToFile(*cfg, path)
}
