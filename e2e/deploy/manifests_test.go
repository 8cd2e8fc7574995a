package deploy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// TestManifests: the API server takes everything in deploy, field by field, and has no warning to give; asked by the real
// kubectl, in server-side dry runs with strict validation.
func TestManifests(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{Pods: []int{0}})
	cp, err := cluster.Start(w, w.Node1().Host)
	require.NoError(t, err)
	t.Cleanup(cp.Close)
	k := &kubectl{path: tool(t, "kubectl"), node: w.Node1(), dir: w.Dir}
	require.NoError(t, k.login(cp))

	for _, mode := range modes {
		k.applies(t, mode.overlay, "", "--kustomize="+project(t, "deploy", mode.overlay))
		chart := charted(t, mode.flags...)
		k.applies(t, "the chart as "+mode.overlay, chart, "--filename=-")
		k.applies(t, "the chart as "+mode.overlay+", server-side", chart, "--filename=-", "--server-side")
		// What is wrong with the pod itself shows only when one is made.
		pod := &v1.Pod{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Name: "nodeproxy-x", Namespace: "kube-system"},
			Spec:       daemonSet(t, chart).Spec.Template.Spec,
		}
		k.applies(t, "a pod of "+mode.overlay, asYAML(t, pod), "--filename=-")
	}
	for _, dir := range []string{"overlays/kubeadm", "base"} {
		k.applies(t, dir, "", "--kustomize="+project(t, "deploy", dir))
	}
	k.chart(t, cp, w)
	base := kustomized(t, "base")

	// The checks above can fail.
	for _, broken := range []struct{ good, bad, complaint string }{
		{"hostNetwork: true", "hostNetworking: true", `unknown field "spec.template.spec.hostNetworking"`},
		{"hostNetwork: true", "hostNetwork: often", "PodSpec.spec.template.spec.hostNetwork of type bool"},
		{"type: FileOrCreate", "type: FileOrDie", `Unsupported value: "FileOrDie"`},
		{"kubernetes.io/os: linux", "beta.kubernetes.io/os: linux", "Warning: spec.template.spec.nodeSelector[beta"},
	} {
		out, err := k.dryRun(strings.Replace(base, broken.good, broken.bad, 1), "--filename=-")
		if err == nil || !strings.Contains(err.Error(), broken.complaint) {
			t.Errorf("%s: got %v %s, want %s", broken.bad, err, out, broken.complaint)
		}
	}
}

// chart has helm ask the cluster for the mode of an existing ConfigMap; applies what no overlay has; and does what "helm test" does.
func (k *kubectl) chart(t *testing.T, cp *cluster.ControlPlane, w *harness.World) {
	t.Helper()
	chart, config := project(t, "deploy", "chart"), filepath.Join(k.dir, "kubectl", "config")
	template := func(flags ...string) (string, error) {
		args := append([]string{"template", "nodeproxy", chart, "--namespace=kube-system", "--skip-tests", "--dry-run=server", "--kubeconfig=" + config}, flags...)
		return k.node.Output(tool(t, "helm"), args...)
	}
	const existing = "--set=existingConfigMap.name=kube-proxy"
	if out, err := template(existing); err == nil || !strings.Contains(err.Error(), "there is no ConfigMap kube-system/kube-proxy") {
		t.Errorf("without the ConfigMap: %v %s", err, out)
	}
	kubeProxy := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: "kube-system"}, Data: map[string]string{
		"config.conf":     "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\noomScoreAdj: null\n",
		"kubeconfig.conf": "apiVersion: v1\nkind: Config\n",
	}}
	_, err := cp.Admin.CoreV1().ConfigMaps("kube-system").Create(t.Context(), kubeProxy, metav1.CreateOptions{})
	require.NoError(t, err)
	out, err := template(existing)
	require.NoError(t, err)
	pod := daemonSet(t, out).Spec.Template
	if len(pod.Spec.InitContainers) != 1 || pod.Annotations["nodeproxy/mode"] != "ipvs" {
		t.Errorf("the mode of the ConfigMap is not the pods': %+v", pod)
	}
	k.applies(t, "the chart with kubeadm's ConfigMap", out, "--filename=-")
	for flag, complaint := range map[string]string{
		"existingConfigMap.mode=iptables":   "existingConfigMap.mode is iptables, and ConfigMap kube-system/kube-proxy has ipvs",
		"existingConfigMap.key=config.yaml": "has no key config.yaml", "existingConfigMap.kubeconfigKey=k": "has no key k",
	} {
		if out, err := template(existing, "--set="+flag); err == nil || !strings.Contains(err.Error(), complaint) {
			t.Errorf("%s: got %v %s, want %s", flag, err, out, complaint)
		}
	}

	k.applies(t, "the chart with everything", charted(t,
		"--set=config.metricsBindAddress=0.0.0.0:10249,extraEnv[0].name=A,extraEnv[0].value=b,serviceAccount.annotations.a=b",
		"--set=seccompProfile.type=Localhost,seccompProfile.localhostProfile=nodeproxy.json",
		"--set=extraVolumes[0].name=v,extraVolumes[0].hostPath.path=/v,extraVolumeMounts[0].name=v,extraVolumeMounts[0].mountPath=/v"),
		"--filename=-")
	tests := output(t, tool(t, "helm"), "template", "nodeproxy", chart, "--namespace=kube-system", "--show-only=templates/tests/cluster-ip.yaml")
	_, err = cp.Admin.CoreV1().ServiceAccounts("kube-system").Create(t.Context(),
		&v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "nodeproxy"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	k.applies(t, "helm test", tests, "--filename=-")
	// No DNS and no kubelet here: the command of the test's pod, with a kubeconfig of this control plane.
	_, err = cp.Admin.CoreV1().Nodes().Create(t.Context(), w.NodeObject(w.Node1(), nil), metav1.CreateOptions{})
	require.NoError(t, err)
	raw, err := yaml.Marshal(objects(t, tests)["Pod kube-system/nodeproxy-test"])
	require.NoError(t, err)
	var testPod v1.Pod
	require.NoError(t, yaml.UnmarshalStrict(raw, &testPod))
	args := testPod.Spec.Containers[0].Args
	for i, arg := range args {
		args[i] = strings.NewReplacer("$(NODE_NAME)", "node1", "/etc/nodeproxy-test/kubeconfig", config).Replace(arg)
	}
	binary, err := harness.Binary()
	require.NoError(t, err)
	out, err = k.node.Output(binary, args...)
	if err != nil || !strings.Contains(out, "kubernetes") {
		t.Errorf("nodeproxy %q: %v %s", args, err, out)
	}
	args[2] = "default/nothing"
	if out, err := k.node.Output(binary, args...); err == nil {
		t.Errorf("nodeproxy %q succeeds: %s", args, out)
	}
}

// kubectl is the real one, run on a node as an administrator.
type kubectl struct {
	path string
	node *harness.Node
	dir  string
}

// login writes a kubeconfig.
func (k *kubectl) login(cp *cluster.ControlPlane) error {
	from, err := cp.Kubeconfig()
	if err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(k.dir, "kubectl"), 0o700); err != nil {
		return err
	}
	return os.Link(from, filepath.Join(k.dir, "kubectl", "config"))
}

func (k *kubectl) dryRun(stdin string, flags ...string) (string, error) {
	args := append([]string{
		"--kubeconfig=" + filepath.Join(k.dir, "kubectl", "config"), "--cache-dir=" + filepath.Join(k.dir, "kubectl"),
		"apply", "--dry-run=server", "--validate=strict", "--warnings-as-errors",
	}, flags...)
	return k.node.OutputWithInput(stdin, k.path, args...)
}

func (k *kubectl) applies(t *testing.T, what, stdin string, flags ...string) {
	t.Helper()
	out, err := k.dryRun(stdin, flags...)
	if err != nil {
		t.Errorf("%s: %v\n%s", what, err, out)
	} else if !strings.Contains(out, "(server dry run)") {
		t.Errorf("%s: nothing was applied: %q", what, out)
	}
}
