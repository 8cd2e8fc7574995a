package deploy

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// The images besides nodeproxy's: what each pod has as its first process, and kube-proxy's as install/testdata/kubeadm.yaml names it.
const (
	pauseImage     = "localhost/pause:latest"
	kubeProxyImage = "registry.k8s.io/kube-proxy:v1.37.2"
)

// images are the archives of all images, built once. That of kube-proxy has the root file system of nodeproxy's, with its iptables.
var images = sync.OnceValues(func() ([]string, error) {
	own, err := image()
	if err != nil {
		return nil, err
	}
	root, err := harness.ProjectDir()
	if err != nil {
		return nil, err
	}
	binaries, err := cluster.Binaries()
	if err != nil {
		return nil, err
	}
	script := exec.Command("sh", "-ec", `
export CGO_ENABLED=0 SOURCE_DATE_EPOCH=0
arch=$(go env GOHOSTARCH)
go build -o "$1/pause" ./e2e/deploy/pause
tar -cf "$1/empty.tar" -T /dev/null
tar -rf "$1/root-$arch.tar" -C "$2" --transform 's,^,usr/local/bin/,' kube-proxy
go build -o "$1/image" ./deploy/image
"$1/image" -platform "$arch=$1/empty.tar,$1/pause" -name "$3" -output "$1/pause.tar"
"$1/image" -platform "$arch=$1/root-$arch.tar,$1/pause" -name "$4" -output "$1/kube-proxy.tar"
`, "images", filepath.Dir(own), binaries, pauseImage, kubeProxyImage)
	script.Dir = root
	if out, err := script.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("images: %w\n%s", err, out)
	}
	return []string{own, filepath.Join(filepath.Dir(own), "pause.tar"), filepath.Join(filepath.Dir(own), "kube-proxy.tar")}, nil
})

// machine is node1 with a real kubelet, which runs pods by containerd, in a cluster with the real controllers and scheduler.
type machine struct {
	*harness.World
	*containerd
	cp      *cluster.ControlPlane
	kubectl *kubectl
	kubelet *exec.Cmd
	mode    harness.Mode
}

// kubeletConfig leaves out what needs control groups, and what would judge this machine: its disks and its memory. What a process in
// namespaces can't do, the kubelet is to do without.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
localStorageCapacityIsolation: false
evictionHard: {memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0%}
imageGCHighThresholdPercent: 100
syncFrequency: 5s
featureGates: {KubeletInUserNamespace: true}
resolvConf: ""
clusterDomain: cluster.local
clusterDNS: [` + clusterDNS + `]
`

// clusterDNS is the cluster IP of DNS, where there is one.
const clusterDNS = "10.96.0.10"

// newMachine makes all that. The kubelet runs, and there is a Service with an endpoint on each of two nodes, of which only node1 is in
// the API.
func newMachine(t *testing.T, mode harness.Mode) *machine {
	t.Helper()
	w := harness.New(t, harness.Options{})
	cp, err := cluster.Start(w, w.Nodes[2].Host, "daemonset-controller", "garbage-collector-controller", cluster.ServiceAccounts, cluster.RootCA)
	require.NoError(t, err)
	t.Cleanup(cp.Close)
	m := &machine{World: w, cp: cp, kubectl: &kubectl{path: tool(t, "kubectl"), node: w.Node1(), dir: w.Dir}, mode: mode}
	require.NoError(t, m.kubectl.login(cp))
	require.NoError(t, createService(t.Context(), cp, w, w.Node1()))
	require.NoError(t, cp.StartScheduler())
	archives, err := images()
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(m.file("kubelet.log"))
			t.Logf("log of the kubelet, its end:\n%s", text[max(0, len(text)-6000):])
		}
	})
	m.containerd = newContainerd(t, w, w.Node1(), "")
	for _, name := range []string{"lib/kubelet", "logs"} {
		require.NoError(t, os.MkdirAll(m.file(name), 0o755))
	}
	require.NoError(t, os.WriteFile(m.file("kubelet.yaml"), []byte(kubeletConfig), 0o644))
	require.NoError(t, m.boot())
	require.NoError(t, m.importImages(archives...))
	require.NoError(t, m.startKubelet())
	return m
}

// boot starts containerd where /var/lib and /var/log are the node's own, and so are the settings of the whole kernel that the kubelet would change on
// the machine where the test runs: it finds them as it wants them.
func (m *machine) boot() error {
	return m.containerd.boot(fmt.Sprintf(`mount --bind %[1]s/lib /var/lib
mount --bind %[1]s/logs /var/log
while read -r name value; do
	echo "$value" >"/run/$(basename "$name")"
	mount --bind "/run/$(basename "$name")" "/proc/sys/$name"
done <<end
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
end`, m.dir))
}

func (m *machine) startKubelet() error {
	path, err := cluster.Kubelet()
	if err != nil {
		return err
	}
	kubeconfig, err := m.cp.Kubeconfig()
	if err != nil {
		return err
	}
	if m.kubelet, err = m.inside(path, "--config="+m.file("kubelet.yaml"), "--kubeconfig="+kubeconfig, "--hostname-override="+m.node.Name,
		"--node-ip="+m.node.IP4.String()+","+m.node.IP6.String()); err != nil {
		return err
	}
	log, err := m.appendTo("kubelet.log")
	if err != nil {
		return err
	}
	defer log.Close()
	m.kubelet.Stdout, m.kubelet.Stderr = log, log
	if err := m.kubelet.Start(); err != nil {
		return err
	}
	go func() { _ = m.kubelet.Wait() }() // It ends with containerd at the latest.
	return nil
}

// powerFails ends all that runs on the node, and the kernel forgets what it had.
func (m *machine) powerFails(t *testing.T) {
	t.Helper()
	m.kill()
	require.NoError(t, forget(m.node))
	require.NoError(t, m.node.Sysctl("net/ipv4/conf/all/route_localnet", "0"))
	to := netip.AddrPortFrom(harness.AddressesOf(1).ClusterIP4, harness.ServicePort)
	if answer := m.Pod("n1b").Ask("tcp", to, time.Second); answer.Outcome == harness.Answered {
		t.Fatalf("the Service is answered without power: %v", answer)
	}
}

// forget makes the kernel forget what it has for a node: rules and connections.
func forget(n *harness.Node) error {
	_, err := n.Output("sh", "-ec", `nft flush ruleset
for family in ip ip6; do
	for table in $(cat "/proc/net/${family}_tables_names"); do
		"${family}tables-legacy" -w -t "$table" -F
		"${family}tables-legacy" -w -t "$table" -X
	done
done
conntrack -F`)
	return err
}

// comesUp starts the node again.
func (m *machine) comesUp(t *testing.T) {
	t.Helper()
	require.NoError(t, m.boot())
	require.NoError(t, m.startKubelet())
}

// patient is how long a kubelet may take to bring up a pod on a busy machine: it tries again after pauses that grow.
const patient = 2 * harness.Limit

// serves waits until the Service answers.
func (m *machine) serves(t *testing.T) {
	t.Helper()
	require.NoError(t, eventually(patient, func() error { return answers(m.World, m.mode) }))
}

// underLoad does something while requests are sent, of which none may fail.
func underLoad(t *testing.T, w *harness.World, what string, do func()) {
	t.Helper()
	a := harness.AddressesOf(1)
	clusterIP := netip.AddrPortFrom(a.ClusterIP4, harness.ServicePort)
	const pause = 5 * time.Millisecond
	loads := []*harness.Load{
		w.Client.StartLoad("tcp", netip.AddrPortFrom(w.Node1().IP4, a.NodePort), 2, pause),
		w.Pod("n1b").StartLoad("tcp", clusterIP, 2, pause), w.Pod("n1b").StartLoad("udp", clusterIP, 2, pause), w.Node1().StartLoad("tcp", clusterIP, 2, pause),
	}
	do()
	requests := 0
	for _, l := range loads {
		l.Stop()
		requests += l.Requests()
		if failures := l.Failures(); len(failures) > 0 {
			t.Errorf("%s: %d of %d requests failed: %v", what, len(failures), l.Requests(), failures[0])
		}
	}
	if requests < 50 {
		t.Errorf("%s: only %d requests", what, requests)
	}
	t.Logf("%s: %d requests", what, requests)
}

func (m *machine) shell(t *testing.T, command string) {
	t.Helper()
	require.NoError(t, m.kubectl.shell(project(t), command))
}

// TestNode: a real kubelet runs the pods of the manifests' DaemonSet, with the capabilities, probes and mounts that they ask for. A changed ConfigMap takes
// effect, no request fails while a pod is replaced, and after a power failure the node serves again when the API server answers. Without
// one of the capabilities it does not work, in mode iptables for at least one variant of iptables.
func TestNode(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode    harness.Mode
		variant harness.Variant
		needs   v1.Capability
		without string // what the log has without it
	}{
		{harness.IPTables, harness.NFT, "NET_ADMIN", "you must be root"},
		{harness.IPTables, harness.Legacy, "NET_RAW", "you must be root"},
		{harness.NFTables, harness.NFT, "NET_ADMIN", "operation not permitted"},
	} {
		t.Run(string(test.mode)+" "+string(test.variant), func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, test.mode)
			address := m.cp.Address()
			m.shell(t, fmt.Sprintf("kubectl -n kube-system create configmap kubernetes-services-endpoint --from-literal=KUBERNETES_SERVICE_HOST=%s --from-literal=KUBERNETES_SERVICE_PORT=%d",
				address.Addr(), address.Port()))
			const lastArgument = "- --sysctl-dir=/host/proc/sys\n"
			rendered := strings.Replace(kustomized(t, "overlays/"+string(test.mode)), lastArgument, lastArgument+"        - --iptables-backend="+string(test.variant)+"\n", 1)
			require.NoError(t, os.WriteFile(m.file("nodeproxy.yaml"), []byte(rendered), 0o644))
			m.shell(t, "kubectl apply -f "+m.file("nodeproxy.yaml"))
			m.serves(t)
			m.shell(t, rolledOut)
			m.checkPod(t, daemonSet(t, rendered))
			m.changes(t, test.variant)
			underLoad(t, m.World, "a pod is replaced", func() {
				m.shell(t, "kubectl -n kube-system rollout restart daemonset nodeproxy")
				m.shell(t, rolledOut)
			})

			m.cp.APIServer.Kill()
			m.powerFails(t)
			m.comesUp(t)
			require.NoError(t, eventually(patient, func() error { _, err := m.run("curl", "-s", "http://127.0.0.1:10248/healthz"); return err }))
			require.NoError(t, m.cp.StartAPIServer())
			begun := time.Now()
			m.serves(t)
			t.Logf("the Service answers %v after the API server", time.Since(begun).Round(time.Second/10))
			m.shell(t, rolledOut)

			m.failsWithout(t, test.needs, test.without)
		})
	}
}

const rolledOut = "kubectl -n kube-system rollout status daemonset nodeproxy"

// bits are the numbers of capabilities (linux/capability.h).
var bits = map[v1.Capability]int{"NET_ADMIN": 12, "NET_RAW": 13, "SYS_MODULE": 16}

// checkPod holds what the kernel says of the container's process against the manifest, and looks for what the pod could not do.
func (m *machine) checkPod(t *testing.T, ds *apps.DaemonSet) {
	t.Helper()
	proc := func(file string) string {
		t.Helper()
		out, err := m.run("sh", "-ec", `cat "$(dirname "$(grep -lz '^--sysctl-dir=' /proc/[0-9]*/cmdline)")/`+file+`"`)
		require.NoError(t, err)
		return out
	}
	var want uint64
	for _, capability := range ds.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add {
		want |= 1 << bits[capability]
	}
	status := proc("status")
	for _, line := range []string{
		fmt.Sprintf("CapPrm:\t%016x", want), fmt.Sprintf("CapEff:\t%016x", want), fmt.Sprintf("CapBnd:\t%016x", want), "NoNewPrivs:\t1", "Seccomp:\t2",
	} {
		if !strings.Contains(status, line+"\n") {
			t.Errorf("the process has not %q:\n%s", line, status)
		}
	}
	readOnly := map[string]string{} // by the place of a mount: ro or rw
	for line := range strings.Lines(proc("mounts")) {
		f := strings.Fields(line)
		readOnly[f[1]] = f[3][:2]
	}
	mounted := map[string]string{
		"/": "ro", "/sys": "ro", "/proc/sys": "ro", "/etc/nodeproxy": "ro", "/var/run/secrets/kubernetes.io/serviceaccount": "ro", "/host/proc/sys/net": "rw",
	}
	if m.mode == harness.IPTables {
		mounted["/run/xtables.lock"] = "rw"
	}
	for path, want := range mounted {
		if got := readOnly[path]; got != want {
			t.Errorf("%s is mounted %q, want %s; there are %v", path, got, want, readOnly)
		}
	}

	pods, err := m.cp.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(t.Context(), metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(ds.Spec.Selector)})
	require.NoError(t, err)
	for _, pod := range pods.Items {
		if restarts := pod.Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("pod %s was restarted %d times", pod.Name, restarts)
		}
	}
	out, err := m.kubectl.run(m.dir, "kubectl -n kube-system exec ds/nodeproxy -- /usr/bin/nodeproxy get services --all-namespaces")
	if err != nil || !strings.Contains(out, "programmed") {
		t.Errorf("nodeproxy get services in the container: %v\n%s", err, out)
	}
	log, err := m.kubectl.run(m.dir, "kubectl -n kube-system logs ds/nodeproxy")
	if err != nil || !strings.Contains(log, harness.InSync) || strings.Contains(log, "read-only file system") || strings.Contains(log, "level=ERROR") {
		t.Errorf("log: %v\n%s", err, log)
	}
	local := "1"
	if m.mode == harness.NFTables {
		local = "0"
	}
	for i, want := range []string{local, "0"} { // The node, and not the machine.
		if got, err := m.Nodes[i].ReadSysctl("net/ipv4/conf/all/route_localnet"); err != nil || got != want {
			t.Errorf("%s: route_localnet is %q (%v), want %s", m.Nodes[i].Name, got, err, want)
		}
	}
}

// changes brings a changed ConfigMap.
func (m *machine) changes(t *testing.T, variant harness.Variant) {
	t.Helper()
	configs := m.cp.Admin.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	config, err := configs.Get(t.Context(), "nodeproxy", metav1.GetOptions{})
	require.NoError(t, err)
	config.Data["config.yaml"] += string(m.mode) + ": {masqueradeBit: 13}\n"
	_, err = configs.Update(t.Context(), config, metav1.UpdateOptions{})
	require.NoError(t, err)
	list, bit := []string{variant.Tool("iptables") + "-save", "-t", "nat"}, "0x2000/0x2000"
	if m.mode == harness.NFTables {
		list, bit = []string{"nft", "list", "table", "ip", "nodeproxy"}, "0x00002000"
	}
	require.NoError(t, eventually(patient, func() error {
		rules, err := m.node.Output(list[0], list[1:]...)
		if err == nil && !strings.Contains(rules, bit) {
			err = errors.New("no rule uses the new bit")
		}
		return err
	}))
	require.NoError(t, answers(m.World, m.mode))
}

// failsWithout checks that the container does not work without a capability, and says why.
func (m *machine) failsWithout(t *testing.T, without v1.Capability, says string) {
	t.Helper()
	sets := m.cp.Admin.AppsV1().DaemonSets(metav1.NamespaceSystem)
	ds, err := sets.Get(t.Context(), "nodeproxy", metav1.GetOptions{})
	require.NoError(t, err)
	add := &ds.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add
	*add = slices.DeleteFunc(*add, func(c v1.Capability) bool { return c == without })
	changed, err := sets.Update(t.Context(), ds, metav1.UpdateOptions{})
	require.NoError(t, err)
	var log string
	require.NoError(t, eventually(patient, func() error {
		pods, err := m.cp.Admin.CoreV1().Pods(metav1.NamespaceSystem).List(t.Context(),
			metav1.ListOptions{LabelSelector: "pod-template-generation=" + changed.Annotations[apps.DeprecatedTemplateGeneration]})
		if err != nil || len(pods.Items) == 0 {
			return errors.Join(errors.New("no pod without "+string(without)), err)
		}
		for _, flag := range []string{"", " --previous"} {
			if log, err = m.kubectl.run(m.dir, "kubectl -n kube-system logs "+pods.Items[0].Name+flag); strings.Contains(log, says) {
				return nil
			}
		}
		return fmt.Errorf("without %s, the log has not %q: %w\n%s", without, says, err, log)
	}))
	if strings.Contains(log, harness.InSync) {
		t.Errorf("in sync without %s:\n%s", without, log)
	}
}

// TestNodeKubeadm: the commands of docs/install/kubeadm.md, with pods of kube-proxy's and nodeproxy's DaemonSets and of the cleanup that run. No
// request fails from before the installation until nodeproxy is uninstalled, but for a power failure between the two.
func TestNodeKubeadm(t *testing.T) {
	t.Parallel()
	m := newMachine(t, harness.IPTables)
	_, err := m.cp.Admin.CoreV1().ServiceAccounts("kube-system").Create(t.Context(), &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = m.cp.Admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbac.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm:node-proxier"},
		RoleRef:    rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "system:node-proxier"},
		Subjects:   []rbac.Subject{{Kind: "ServiceAccount", Name: "kube-proxy", Namespace: "kube-system"}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	i := newInstallation(t, m.cp, m.kubectl, "kubeadm", "kubeadm")
	i.kubelets = true
	m.serves(t)
	before := i.kubeProxy(t)
	underLoad(t, m.World, "kube-proxy gives way to nodeproxy", func() {
		i.do(t, "Install")
		i.do(t, "Check")
		require.NoError(t, answers(m.World, m.mode))
	})

	m.powerFails(t)
	m.comesUp(t)
	m.serves(t)
	require.NoError(t, i.settle(t.Context()))

	underLoad(t, m.World, "nodeproxy gives way to kube-proxy", func() {
		i.do(t, "Roll back")
		i.nothingLeft(t)
		require.NoError(t, answers(m.World, m.mode))
	})
	if after := i.kubeProxy(t); asYAML(t, after) != asYAML(t, before) {
		t.Errorf("kube-proxy's DaemonSet before:\n%s\nand after:\n%s", asYAML(t, before), asYAML(t, after))
	}
	underLoad(t, m.World, "kube-proxy gives way once more, and twice", func() { i.installTwice(t) })
	i.do(t, "Uninstall")
	i.nothingLeft(t)
	kubelets := regexp.MustCompile("KUBE-(FIREWALL|IPTABLES-HINT|KUBELET-CANARY)")
	for _, save := range []string{"iptables-nft-save", "ip6tables-nft-save"} {
		rules, err := m.node.Output(save)
		require.NoError(t, err)
		for line := range strings.Lines(rules) {
			if strings.Contains(line, "KUBE-") && !kubelets.MatchString(line) {
				t.Errorf("%s has after the cleanup: %s", save, line)
			}
		}
	}

	m.shell(t, "kubectl apply -k deploy/overlays/kubeadm") // It uses the ConfigMap that kube-proxy had.
	m.serves(t)
	m.shell(t, rolledOut)
}
