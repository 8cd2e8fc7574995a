package deploy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// bits are the numbers of capabilities (linux/capability.h).
var bits = map[v1.Capability]int{"NET_ADMIN": 12, "NET_RAW": 13, "SYS_MODULE": 16}

// deployment is a World with a control plane on node3 and, on node1, containerd and a kubelet for the DaemonSet.
type deployment struct {
	*harness.World
	*kubelet
	ds *apps.DaemonSet
}

// mode is the one that the overlay is for.
func (d *deployment) mode() harness.Mode {
	return harness.Mode(d.ds.Spec.Template.Annotations["nodeproxy/mode"])
}

// deploy makes all that, and a Service in the API with an endpoint on each of two nodes.
func deploy(t *testing.T, overlay string) *deployment {
	t.Helper()
	w := harness.New(t, harness.Options{})
	cp, err := cluster.Start(w, w.Nodes[2].Host)
	must(t, err)
	t.Cleanup(cp.Close)
	_, token, err := cp.Install(t.Context())
	must(t, err)
	must(t, createService(t.Context(), cp, w, w.Nodes...))
	rendered := kustomized(t, overlay)
	d := &deployment{World: w, ds: daemonSet(t, rendered), kubelet: &kubelet{
		containerd: startContainerd(t, w, w.Node1()),
		serviceAccount: map[string]string{
			"token": token, "ca.crt": string(cp.Via(w.Node1().Netns, &rest.Config{}).CAData), "namespace": "kube-system",
		},
	}}
	if config := objects(t, rendered)["ConfigMap kube-system/nodeproxy"]; config != nil {
		d.configMaps = map[string]map[string]string{
			"nodeproxy": {"config.yaml": asYAML(t, config["data"].(map[string]any)["config.yaml"])},
			"kubernetes-services-endpoint": {
				"KUBERNETES_SERVICE_HOST": cp.Address().Addr().String(),
				"KUBERNETES_SERVICE_PORT": fmt.Sprint(cp.Address().Port()),
			},
		}
		return d
	}
	config, err := os.ReadFile(project(t, "config", "testdata", "kubeadm.yaml"))
	must(t, err)
	d.configMaps = map[string]map[string]string{
		"kube-proxy": {"config.conf": string(config), "kubeconfig.conf": fmt.Sprintf(kubeadmKubeconfig, cp.URL())},
	}
	return d
}

// kubeadmKubeconfig is how kubeadm's kube-proxy finds the API server, whose URL is left open here.
const kubeadmKubeconfig = `apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
    server: %s
  name: default
contexts:
- context:
    cluster: default
    namespace: default
    user: default
  name: default
current-context: default
users:
- name: default
  user:
    tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
`

// createService makes these nodes, and the Service web with two endpoints.
func createService(ctx context.Context, cp *cluster.ControlPlane, w *harness.World, nodes ...*harness.Node) error {
	var errs []error
	for _, n := range nodes {
		_, err := cp.Admin.CoreV1().Nodes().Create(ctx, w.NodeObject(n, nil), metav1.CreateOptions{})
		errs = append(errs, err)
	}
	_, err := cp.Admin.CoreV1().Namespaces().Create(ctx,
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: harness.Namespace}}, metav1.CreateOptions{})
	errs = append(errs, err)
	svc := harness.Service("web", 1, func(s *v1.Service) { s.Spec.Type, s.Spec.ExternalIPs = v1.ServiceTypeNodePort, nil })
	_, err = cp.Admin.CoreV1().Services(svc.Namespace).Create(ctx, svc, metav1.CreateOptions{})
	errs = append(errs, err)
	for _, o := range harness.Slices(svc, w.Ready("n1a", "n2a")...) {
		slice := o.(*discovery.EndpointSlice)
		_, err := cp.Admin.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// container starts nodeproxy as the DaemonSet would, with flags besides.
func (d *deployment) container(t *testing.T, id string, change func(*v1.Container), flags ...string) *container {
	t.Helper()
	pod := d.ds.Spec.Template.Spec.DeepCopy()
	c := &pod.Containers[0]
	c.Args = append(c.Args, flags...)
	if change != nil {
		change(c)
	}
	return d.kubelet.run(t, id, pod, c)
}

func (d *deployment) answers() error { return answers(d.World, d.mode()) }

// answers checks that the Service answers at all of its frontends in both families, and from both endpoints.
func answers(w *harness.World, mode harness.Mode) error {
	a := harness.AddressesOf(1)
	type request struct {
		from *harness.Host
		to   netip.AddrPort
	}
	var requests []request
	if mode == harness.IPTables {
		requests = append(requests, request{w.Node1().Host, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), a.NodePort)})
	}
	for _, family := range []int{4, 6} {
		clusterIP := netip.AddrPortFrom(a.ClusterIP(family), harness.ServicePort)
		requests = append(requests, request{w.Pod("n1b").Host, clusterIP}, request{w.Node1().Host, clusterIP},
			request{w.Client, netip.AddrPortFrom(w.Node1().IP(family), a.NodePort)})
	}
	for _, network := range []string{"tcp", "udp"} {
		for _, r := range requests {
			seen := map[string]bool{}
			for i := 0; i < 60 && len(seen) < 2; i++ {
				answer := r.from.Ask(network, r.to, harness.Patient)
				if answer.Outcome != harness.Answered {
					return fmt.Errorf("%s from %s, %s: %v", r.to, r.from.Name, network, answer)
				}
				seen[answer.Server] = true
			}
			if !seen["n1a"] || !seen["n2a"] {
				return fmt.Errorf("%s from %s, %s: answers of %v, want n1a and n2a", r.to, r.from.Name, network, seen)
			}
		}
	}
	return nil
}

// TestContainer: the image, run by containerd and runc with the DaemonSet's capabilities, read-only root and mounts, reads the
// real API server as the DaemonSet's ServiceAccount, and packets get where they should.
func TestContainer(t *testing.T) {
	for _, variant := range harness.Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			d := deploy(t, "overlays/iptables")
			c := d.runs(t, variant)
			d.changes(t, c, variant)
			d.isReplaced(t, c, variant)
		})
	}
	t.Run("nftables", func(t *testing.T) {
		t.Parallel()
		d := deploy(t, "overlays/nftables")
		c := d.runs(t, harness.NFT)
		d.changes(t, c, harness.NFT)
		d.isReplaced(t, c, harness.NFT)
	})
	t.Run("kubeadm", func(t *testing.T) {
		t.Parallel()
		deploy(t, "overlays/kubeadm").runs(t, harness.NFT)
	})
}

// runs starts the container and checks that it works as it should.
func (d *deployment) runs(t *testing.T, variant harness.Variant) *container {
	t.Helper()
	c := d.container(t, "first", nil, "--iptables-backend="+string(variant))
	must(t, c.waitFor(harness.StartupTimeout, harness.InSync))
	must(t, d.answers())
	d.checkRights(t, c)
	d.checkProbes(t)
	if out := c.output(); strings.Contains(out, "read-only file system") || strings.Contains(out, "level=ERROR") {
		t.Errorf("log:\n%s", out)
	}
	// As kubectl exec does.
	out, err := d.ctr("tasks", "exec", "--exec-id=explain", c.id, "/usr/bin/nodeproxy", "get", "services", "--all-namespaces")
	if err != nil || !strings.Contains(out, "programmed") {
		t.Errorf("nodeproxy get services in the container: %v\n%s", err, out)
	}
	local := "1"
	if d.mode() == harness.NFTables {
		local = "0"
	}
	for i, want := range []string{local, "0"} { // The node, and not the machine.
		if got, err := d.Nodes[i].ReadSysctl("net/ipv4/conf/all/route_localnet"); err != nil || got != want {
			t.Errorf("%s: route_localnet is %q (%v), want %s", d.Nodes[i].Name, got, err, want)
		}
	}
	return c
}

// changes brings a changed ConfigMap, as the kubelet does.
func (d *deployment) changes(t *testing.T, c *container, variant harness.Variant) {
	t.Helper()
	d.configMaps["nodeproxy"]["config.yaml"] += string(d.mode()) + ": {masqueradeBit: 13}\n"
	d.files(t, "config", d.configMaps["nodeproxy"])
	must(t, c.waitFor(3*time.Minute, "the configuration file has changed"))
	must(t, eventually(3*time.Minute, func() error {
		list, bit := []string{variant.Tool("iptables") + "-save", "-t", "nat"}, "0x2000/0x2000"
		if d.mode() == harness.NFTables {
			list, bit = []string{"nft", "list", "table", "ip", "nodeproxy"}, "0x00002000"
		}
		rules, err := d.Node1().Output(list[0], list[1:]...)
		if err == nil && !strings.Contains(rules, bit) {
			err = errors.New("no rule uses the new bit")
		}
		return err
	}))
	must(t, d.answers())
}

// isReplaced puts a new pod in the old one's place. The rules stay meanwhile.
func (d *deployment) isReplaced(t *testing.T, c *container, variant harness.Variant) {
	t.Helper()
	to := netip.AddrPortFrom(d.Node1().IP4, harness.AddressesOf(1).NodePort)
	load := d.Client.StartLoad("tcp", to, 2, 5*time.Millisecond)
	must(t, c.stop())
	must(t, d.answers())
	second := d.container(t, "second", nil, "--iptables-backend="+string(variant))
	must(t, second.waitFor(harness.StartupTimeout, harness.InSync))
	load.Stop()
	if failures := load.Failures(); len(failures) > 0 || load.Requests() < 50 {
		t.Errorf("%d of %d requests failed: %v", len(failures), load.Requests(), failures)
	}
	must(t, d.answers())
}

// checkRights holds what the kernel says of the container's process against the manifest.
func (d *deployment) checkRights(t *testing.T, c *container) {
	t.Helper()
	status, err := c.proc("status")
	must(t, err)
	mounts, err := c.proc("mounts")
	must(t, err)
	var want uint64
	for _, capability := range d.ds.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add {
		want |= 1 << bits[capability]
	}
	for _, line := range []string{
		fmt.Sprintf("CapPrm:\t%016x", want), fmt.Sprintf("CapEff:\t%016x", want), fmt.Sprintf("CapBnd:\t%016x", want),
		"NoNewPrivs:\t1", "Seccomp:\t2",
	} {
		if !strings.Contains(status, line+"\n") {
			t.Errorf("the process has not %q:\n%s", line, status)
		}
	}
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		readOnly := strings.HasPrefix(f[3], "ro")
		switch f[1] {
		case "/", "/sys", "/proc/sys", "/etc/nodeproxy", "/var/run/secrets/kubernetes.io/serviceaccount":
			if !readOnly {
				t.Errorf("%s is not read-only", line)
			}
		case "/run/xtables.lock", "/host/proc/sys/net":
			if readOnly {
				t.Errorf("%s is read-only", line)
			}
		}
	}
}

// checkProbes asks what the kubelet asks, where it asks: at the address of the node.
func (d *deployment) checkProbes(t *testing.T) {
	t.Helper()
	c := d.ds.Spec.Template.Spec.Containers[0]
	client := http.Client{Timeout: harness.Patient, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(address)
			if err != nil {
				return nil, err
			}
			return d.Node1().Dial(network, to, time.Now().Add(harness.Patient))
		},
	}}
	probes := map[string]*v1.Probe{"startup": c.StartupProbe, "liveness": c.LivenessProbe, "readiness": c.ReadinessProbe}
	for what, probe := range probes {
		if probe.HTTPGet.Port.IntVal == 0 {
			t.Fatalf("%s probe: port %v, want a number", what, probe.HTTPGet.Port)
		}
		url := fmt.Sprintf("http://%s:%d%s", d.Node1().IP4, probe.HTTPGet.Port.IntVal, probe.HTTPGet.Path)
		err := eventually(3*time.Minute, func() error {
			answer, err := client.Get(url)
			if err == nil {
				defer answer.Body.Close()
				if answer.StatusCode != http.StatusOK {
					err = errors.New(answer.Status)
				}
			}
			return err
		})
		if err != nil {
			t.Errorf("%s probe, %s: %v", what, url, err)
		}
	}
}

// TestNoCapabilityTooMany: without one of them it does not work, in mode iptables for at least one variant of iptables.
func TestNoCapabilityTooMany(t *testing.T) {
	t.Parallel()
	t.Run("iptables", func(t *testing.T) {
		t.Parallel()
		d := deploy(t, "overlays/iptables")
		d.failsWithout(t, "NET_ADMIN", harness.NFT, "you must be root")
		d.failsWithout(t, "NET_RAW", harness.Legacy, "you must be root")
	})
	t.Run("nftables", func(t *testing.T) {
		t.Parallel()
		deploy(t, "overlays/nftables").failsWithout(t, "NET_ADMIN", harness.NFT, "operation not permitted")
	})
}

// failsWithout checks that the container does not work without a capability, and says why.
func (d *deployment) failsWithout(t *testing.T, without v1.Capability, variant harness.Variant, says string) {
	t.Helper()
	c := d.container(t, "without-"+strings.ToLower(strings.ReplaceAll(string(without), "_", "-")), func(c *v1.Container) {
		add := &c.SecurityContext.Capabilities.Add
		*add = slices.DeleteFunc(*add, func(c v1.Capability) bool { return c == without })
	}, "--iptables-backend="+string(variant))
	if err := c.waitFor(3*time.Minute, says); err != nil {
		t.Errorf("without %s, %s: %v", without, variant, err)
	}
	if strings.Contains(c.output(), harness.InSync) {
		t.Errorf("without %s, %s: in sync:\n%s", without, variant, c.output())
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(timeout time.Duration, check func() error) error {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := check()
		if err == nil || time.Since(begun) > timeout {
			return err
		}
	}
}
