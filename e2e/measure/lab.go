package measure

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	authentication "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
	"nodeproxy/e2e/probe"
)

// Lab is a control plane, and nodes like each other, one for each proxy.
type Lab struct {
	*harness.World
	ControlPlane *cluster.ControlPlane
	Objects      Objects
	Sites        []*Site
	Limits       Limits
	prober       probe.Prober
}

// Site is a node with the proxy that is measured on it.
type Site struct {
	*Stage
	Proxy           Proxy
	kubeconfig, log string // files
}

// NewLab makes a lab for these proxies, without Services; there will be so many endpoints of each. A Proxy without a name is none, for
// comparison. Close removes the lab.
func NewLab(ctx context.Context, endpoints int, prober probe.Prober, proxies ...Proxy) (*Lab, error) {
	pods := []int{0} // The first node is the control plane's.
	for range proxies {
		pods = append(pods, 2)
	}
	w, err := harness.Build(harness.Options{Pods: pods, Ports: []uint16{}})
	if err != nil {
		return nil, err
	}
	l := &Lab{World: w, Limits: Limits{ColdStartTimeout, ChangeTimeout}, prober: prober}
	if err := l.build(ctx, endpoints, proxies); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close ends everything in the lab and removes it.
func (l *Lab) Close() error {
	for _, s := range l.Sites {
		s.Close()
	}
	if l.ControlPlane != nil {
		l.ControlPlane.Close()
	}
	return l.World.Close()
}

// Fill creates Services up to a number, and leaves the control plane without the history of that.
func (l *Lab) Fill(ctx context.Context, services int, c Clock) error {
	if err := l.Objects.CreateUpTo(ctx, services); err != nil {
		return err
	}
	if err := l.ControlPlane.Compact(ctx); err != nil {
		return err
	}
	c.Progress("%d Services with %d endpoints each", services, l.Objects.endpoints)
	return nil
}

func (l *Lab) build(ctx context.Context, endpoints int, proxies []Proxy) (err error) {
	if l.ControlPlane, err = cluster.Start(l.World, l.Nodes[0].Host); err != nil {
		return err
	}
	// All EndpointSlices are written here. The controllers would find nothing to do, but look at each object.
	l.ControlPlane.ControllerManager.Kill()
	l.Objects = Objects{client: l.ControlPlane.Admin, put: l.ControlPlane.Put, endpoints: endpoints}
	kubeconfigs, err := l.kubeconfigs(ctx)
	if err != nil {
		return err
	}
	for i, p := range proxies {
		n := l.Nodes[1+i]
		// Packets to a Service that is not programmed go to the server too, where nobody listens at that port: so a probe of
		// what is not there yet is refused at once instead of waiting for an answer.
		stage, err := NewStage(n, probe.Greet, EndpointRange, harness.ServiceCIDR4)
		if err != nil {
			return err
		}
		l.Sites = append(l.Sites, &Site{stage, p, kubeconfigs[p.Name], filepath.Join(l.Dir, n.Name+".log")})
		_, err = l.ControlPlane.Admin.CoreV1().Nodes().Create(ctx,
			l.NodeObject(n, map[string]string{v1.LabelHostname: n.Name}), metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	return nil
}

// kubeconfigs makes one for each proxy, by its name. Each is the ServiceAccount that it has in a cluster: nodeproxy that of
// its manifests, kube-proxy one with the ClusterRole that every API server has for it.
func (l *Lab) kubeconfigs(ctx context.Context) (map[string]string, error) {
	own, _, err := l.ControlPlane.Install(ctx)
	if err != nil {
		return nil, err
	}
	const account, ns = KubeProxy, metav1.NamespaceSystem
	accounts := l.ControlPlane.Admin.CoreV1().ServiceAccounts(ns)
	_, err = accounts.Create(ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("service account of kube-proxy: %w", err)
	}
	_, err = l.ControlPlane.Admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbac.ClusterRoleBinding{
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
	return map[string]string{NodeProxy: own, KubeProxy: path}, clientcmd.WriteToFile(*cfg, path)
}
