package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// lab is a control plane, and nodes like each other, one for each proxy.
type lab struct {
	*harness.World
	objects
	controlPlane *cluster.ControlPlane
	front        *cluster.Front // by which the proxies reach the API server, if it is to be disturbed
	nodes        []*node
	endpoints    int // of each Service
}

// newLab makes a lab for these proxies, without Services. close removes it.
func newLab(ctx context.Context, o *options, proxies []proxy) *lab {
	pods := []int{0} // The first node is the control plane's.
	for range proxies {
		pods = append(pods, 2)
	}
	l := &lab{World: must(harness.Build(harness.Options{Pods: pods, Ports: []uint16{}})), endpoints: o.endpoints}
	if err := attempt(func() { l.build(ctx, o, proxies) }); err != nil {
		check(errors.Join(err, l.close()))
	}
	return l
}

func (l *lab) close() error {
	for _, n := range l.nodes {
		n.process.Stop()
		n.close()
	}
	return l.World.Close()
}

func (l *lab) build(ctx context.Context, o *options, proxies []proxy) {
	l.controlPlane = must(cluster.Start(l.World, l.Nodes[0].Host))
	// All EndpointSlices are written here. The controllers would find nothing to do, but look at each object.
	l.controlPlane.ControllerManager.Kill()
	own, _, err := l.controlPlane.Install(ctx)
	check(err)
	theirs, _, err := l.controlPlane.Account(ctx, kubeProxy, kubeProxyAccount)
	check(err)
	kubeconfigs := map[string]string{nodeProxy: own, kubeProxy: theirs}
	if o.disturbs(relisting) {
		l.front = must(l.controlPlane.Front(l.World))
		check(errors.Join(l.front.Redirect(l.controlPlane, own), l.front.Redirect(l.controlPlane, theirs)))
	}
	api := l.controlPlane.Admin.CoreV1()
	must(api.Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}))
	for i, p := range proxies {
		n := l.Nodes[1+i]
		// Packets to a Service that is not programmed go to the server too, where nobody listens at that port: so a probe of what is not
		// there yet is refused at once instead of waiting for an answer.
		stage := newStage(n, endpointRange, harness.ServiceCIDR4)
		l.nodes = append(l.nodes, newNode(stage, p, kubeconfigs[p.program], filepath.Join(l.Dir, n.Name+".log")))
		_, err := api.Nodes().Create(ctx, l.NodeObject(n, map[string]string{v1.LabelHostname: n.Name}), metav1.CreateOptions{})
		check(err, "node "+n.Name)
	}
}

// kubeProxyAccount is the ServiceAccount that kube-proxy has in a cluster, with the ClusterRole that every API server has for it.
const kubeProxyAccount = `apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kube-proxy}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:node-proxier"}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]`

// fill creates Services and their EndpointSlices until there are n. By requests that would take minutes, so they are written into etcd,
// with the allocation of each address. It returns when the API server has all in its cache, from which it answers the proxies, and leaves
// the control plane without the history of that.
func (l *lab) fill(ctx context.Context, n int) {
	objects := map[string]runtime.Object{}
	put := func(key string, o runtime.Object, meta *metav1.ObjectMeta) {
		meta.UID, meta.CreationTimestamp, meta.Generation = uuid.NewUUID(), metav1.Now(), 1
		objects[key] = o
	}
	for len(l.services) < n {
		s := l.add(l.endpoints)
		service := s.object()
		service.Spec.ClusterIPs, service.Spec.Type = []string{s.addr.String()}, v1.ServiceTypeClusterIP
		service.Spec.IPFamilies, service.Spec.IPFamilyPolicy = []v1.IPFamily{v1.IPv4Protocol}, ptr.To(v1.IPFamilyPolicySingleStack)
		put(serviceKey(s), service, &service.ObjectMeta)
		allocated := &networking.IPAddress{
			TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "IPAddress"},
			ObjectMeta: metav1.ObjectMeta{Name: s.addr.String(), Labels: map[string]string{
				networking.LabelIPAddressFamily: string(v1.IPv4Protocol), networking.LabelManagedBy: "ipallocator.k8s.io"}},
			Spec: networking.IPAddressSpec{ParentRef: &networking.ParentReference{Resource: "services", Namespace: namespace, Name: s.name}},
		}
		put("ipaddresses/"+s.addr.String(), allocated, &allocated.ObjectMeta)
		for _, slice := range s.slices() {
			put(sliceKey(slice), slice, &slice.ObjectMeta)
		}
	}
	// The API server learns of all in the order of writing. So when it knows these, which are written last, it knows the others too.
	service := l.services[n-1]
	last := map[string]runtime.Object{}
	for _, key := range []string{serviceKey(service), sliceKey(service.slices()[0])} {
		last[key] = objects[key]
		delete(objects, key)
	}
	check(errors.Join(l.controlPlane.Put(ctx, objects), l.controlPlane.Put(ctx, last)))
	cached := metav1.GetOptions{ResourceVersion: "0"}
	for begun := time.Now(); time.Since(begun) < harness.Limit; time.Sleep(100 * time.Millisecond) {
		_, noService := l.controlPlane.Admin.CoreV1().Services(namespace).Get(ctx, service.name, cached)
		_, noEndpoints := l.controlPlane.Admin.DiscoveryV1().EndpointSlices(namespace).Get(ctx, service.slices()[0].Name, cached)
		if noService == nil && noEndpoints == nil {
			check(l.controlPlane.Compact(ctx))
			return
		}
		for _, err := range []error{noService, noEndpoints} {
			if !apierrors.IsNotFound(err) {
				check(err)
			}
		}
	}
	check(fmt.Errorf("the API server does not know of all objects within %s", harness.Limit))
}

// create creates a Service, then its EndpointSlices. In between, when the cluster IP is known, it calls named.
func (l *lab) create(ctx context.Context, s *service, named func()) error {
	made, err := l.controlPlane.Admin.CoreV1().Services(namespace).Create(ctx, s.object(), metav1.CreateOptions{})
	if err == nil {
		s.addr, err = netip.ParseAddr(made.Spec.ClusterIP)
	}
	if err != nil {
		return fmt.Errorf("service %s: %w", s.name, err)
	}
	named()
	for _, slice := range s.slices() {
		if _, err := l.controlPlane.Admin.DiscoveryV1().EndpointSlices(namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("EndpointSlice of %s: %w", s.name, err)
		}
	}
	return nil
}

// prepareChange replaces the first endpoint of the next Service by a new one; patch sends the PATCH.
func (l *lab) prepareChange() (s *service, patch func(context.Context) error, err error) {
	s = l.services[l.next()]
	s.endpoints[0] = l.fresh()
	slice := s.slices()[0]
	body, err := json.Marshal(map[string]any{"endpoints": slice.Endpoints})
	return s, func(ctx context.Context) error {
		_, err := l.controlPlane.Admin.DiscoveryV1().EndpointSlices(namespace).Patch(ctx, slice.Name, types.MergePatchType, body,
			metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("patch the EndpointSlice of %s: %w", s.name, err)
		}
		return nil
	}, err
}

// prepareTogether replaces all endpoints of the next Services by new ones; Put writes the objects that it returns.
func (l *lab) prepareTogether(ctx context.Context, count int) (changed []*service, objects map[string]runtime.Object) {
	objects = map[string]runtime.Object{}
	for range count {
		s := l.services[l.next()]
		for i := range s.endpoints {
			s.endpoints[i] = l.fresh()
		}
		for _, slice := range s.slices() {
			written := must(l.controlPlane.Admin.DiscoveryV1().EndpointSlices(namespace).Get(ctx, slice.Name, metav1.GetOptions{}))
			written.TypeMeta, written.Endpoints, written.ResourceVersion = slice.TypeMeta, slice.Endpoints, ""
			objects[sliceKey(slice)] = written
		}
		changed = append(changed, s)
	}
	return changed, objects
}

// serviceKey is the key of a Service in etcd, and sliceKey that of an EndpointSlice.
func serviceKey(s *service) string { return "services/specs/" + namespace + "/" + s.name }

func sliceKey(slice *discovery.EndpointSlice) string {
	return "endpointslices/" + namespace + "/" + slice.Name
}

// manifestLab is a stage in a small network of its own, with Services in manifests.
type manifestLab struct {
	*harness.World
	*manifests
	stage  *stage
	daemon *harness.Daemon
	flags  []string
}

// newManifestLab makes a lab with Services of as many endpoints as sizes tells, without starting nodeproxy. close removes it.
func newManifestLab(flags []string, sizes ...int) *manifestLab {
	w := must(harness.Build(harness.Options{Pods: []int{2}, Ports: []uint16{9}}))
	l := &manifestLab{World: w, flags: append(flags, "--cluster-cidr="+podRange)}
	if err := attempt(func() {
		l.stage = newStage(w.Node1(), endpointRange)
		l.manifests = writeManifests(w.Manifests, sizes...)
	}); err != nil {
		check(errors.Join(err, w.Close()))
	}
	return l
}

// close is deferred. It fails with what was recovered, if that was a failure.
func (l *manifestLab) close(recovered any) {
	l.stage.close()
	check(errors.Join(caught(recovered), l.World.Close()))
}

// start runs nodeproxy on the node and waits until it reports the rules to be in sync. It returns how long that took, from before the
// process existed.
func (l *manifestLab) start() time.Duration {
	begun := time.Now()
	l.daemon = must(l.StartDaemon(l.Node1(), l.flags...))
	check(l.daemon.WaitFor(10*time.Minute, harness.InSync))
	return time.Since(begun)
}
