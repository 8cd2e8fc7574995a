package deploy

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authentication "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// TestManifests: the API server takes everything in deploy, field by field, and has no warning to give; asked by the real
// kubectl, in server-side dry runs with strict validation.
func TestManifests(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{Pods: []int{0}})
	cp, err := cluster.Start(w, w.Node1().Host)
	must(t, err)
	t.Cleanup(cp.Close)
	k := &kubectl{path: tool(t, "kubectl"), node: w.Node1(), dir: w.Dir}
	must(t, k.login(t.Context(), cp))

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

// kubectl is the real one, run on a node as an administrator.
type kubectl struct {
	path string
	node *harness.Node
	dir  string
}

// login writes a kubeconfig.
func (k *kubectl) login(ctx context.Context, cp *cluster.ControlPlane) error {
	account := &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "administrator", Namespace: "default"}}
	if _, err := cp.Admin.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return err
	}
	binding := &rbac.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "administrator"},
		RoleRef:    rbac.RoleRef{APIGroup: rbac.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbac.Subject{{Kind: "ServiceAccount", Name: "administrator", Namespace: "default"}},
	}
	if _, err := cp.Admin.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return err
	}
	token, err := cp.Admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, "administrator",
		&authentication.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	cfg := api.NewConfig()
	server := cp.Via(k.node.Netns, &rest.Config{})
	cfg.Clusters["test"] = &api.Cluster{Server: server.Host, CertificateAuthorityData: server.CAData}
	cfg.AuthInfos["user"] = &api.AuthInfo{Token: token.Status.Token}
	cfg.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "user"}
	cfg.CurrentContext = "test"
	if err := os.Mkdir(filepath.Join(k.dir, "kubectl"), 0o700); err != nil {
		return err
	}
	return clientcmd.WriteToFile(*cfg, filepath.Join(k.dir, "kubectl", "config"))
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
