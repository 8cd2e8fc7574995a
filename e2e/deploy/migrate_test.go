package deploy

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// TestMigrationCommands: the commands of docs/migrate-from-kube-proxy.md do what the text says, with a DaemonSet such as kubeadm
// makes. What happens to packets meanwhile is a matter of other tests: nodeproxy and kube-proxy each take over from the other.
func TestMigrationCommands(t *testing.T) {
	t.Parallel()
	w := harness.New(t, harness.Options{Pods: []int{0}})
	cp, err := cluster.Start(w, w.Node1().Host)
	require.NoError(t, err)
	t.Cleanup(cp.Close)
	k := &kubectl{path: tool(t, "kubectl"), node: w.Node1(), dir: w.Dir}
	require.NoError(t, k.login(cp))
	_, err = cp.Admin.CoreV1().Nodes().Create(t.Context(), w.NodeObject(w.Node1(), nil), metav1.CreateOptions{})
	require.NoError(t, err)
	labels := map[string]string{"k8s-app": "kube-proxy"}
	_, err = cp.Admin.AppsV1().DaemonSets("kube-system").Create(t.Context(), &apps.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy"},
		Spec: apps.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: v1.PodSpec{
					NodeSelector: map[string]string{"kubernetes.io/os": "linux"},
					Containers:   []v1.Container{{Name: "kube-proxy", Image: "kube-proxy"}},
				},
			},
		},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	pod := func(name string) v1.PodSpec {
		t.Helper()
		ds, err := cp.Admin.AppsV1().DaemonSets("kube-system").Get(t.Context(), name, metav1.GetOptions{})
		require.NoError(t, err)
		return ds.Spec.Template.Spec
	}
	label := func() string {
		t.Helper()
		node, err := cp.Admin.CoreV1().Nodes().Get(t.Context(), "node1", metav1.GetOptions{})
		require.NoError(t, err)
		return node.Labels["service-proxy"]
	}

	commands := documented(t)
	do := func(beginning string) {
		t.Helper()
		if len(commands) == 0 || !strings.HasPrefix(commands[0], beginning) {
			t.Fatalf("the next command is not %s: %q", beginning, commands)
		}
		require.NoError(t, k.shell(project(t), commands[0]))
		commands = commands[1:]
	}

	do("kubectl -n kube-system create configmap kubernetes-services-endpoint")
	do("kubectl -n kube-system patch daemonset kube-proxy")
	terms := pod("kube-proxy").Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	want := v1.NodeSelectorRequirement{Key: "service-proxy", Operator: v1.NodeSelectorOpNotIn, Values: []string{"nodeproxy"}}
	if got := terms[0].MatchExpressions; len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("kube-proxy goes to nodes with %v", got)
	}
	do("kubectl apply -k deploy/overlays/migrate")
	if got := pod("nodeproxy").NodeSelector["service-proxy"]; got != "nodeproxy" {
		t.Errorf("nodeproxy goes to nodes with the label %q", got)
	}
	do("kubectl label node NODE service-proxy=nodeproxy")
	if got := label(); got != "nodeproxy" {
		t.Errorf("label %q", got)
	}
	do("kubectl label nodes --all service-proxy=nodeproxy")
	do("kubectl -n kube-system patch daemonset kube-proxy")
	if got := pod("kube-proxy").NodeSelector; got["service-proxy"] != "kube-proxy" || len(got) != 2 {
		t.Errorf("kube-proxy goes to %v", got)
	}
	do("kubectl apply -k deploy/overlays/kubeadm")
	if got := pod("nodeproxy").NodeSelector; got["service-proxy"] != "" || len(got) != 1 {
		t.Errorf("nodeproxy goes to %v", got)
	}
	do("kubectl label node NODE service-proxy-")
	if got := label(); got != "" {
		t.Errorf("label %q", got)
	}
	do("kubectl label nodes --all service-proxy=nodeproxy")
	do("kubectl apply -k deploy/overlays/migrate")
	do("kubectl -n kube-system patch daemonset kube-proxy")
	if got := pod("kube-proxy").NodeSelector; got["service-proxy"] != "" || len(got) != 1 {
		t.Errorf("kube-proxy goes to %v", got)
	}
	do("kubectl delete -k deploy/overlays/migrate")
	require.NoError(t, k.shell(project(t), "kubectl apply -k deploy/overlays/migrate")) // The next one comes before all others of the way back.
	do("kubectl -n kube-system patch daemonset nodeproxy")
	if args := pod("nodeproxy").Containers[0].Args; args[len(args)-1] != "--hand-over-to=nftables" {
		t.Errorf("nodeproxy has the arguments %q", args)
	}
	if len(commands) > 0 {
		t.Errorf("not tried: %q", commands)
	}
}

// documented are the commands of the document that change something in the API, in its order.
func documented(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(project(t, "docs", "migrate-from-kube-proxy.md"))
	require.NoError(t, err)
	var out []string
	open := false
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		code, ok := strings.CutPrefix(line, "    ")
		switch {
		case !ok:
			open = false
		case open && strings.HasPrefix(code, "  "):
			out[len(out)-1] += "\n" + code
		case strings.HasPrefix(code, "kubectl"):
			code, _, _ = strings.Cut(code, " #")
			open = false
			for _, verb := range []string{" create ", " patch ", " apply ", " label ", " delete "} {
				open = open || strings.Contains(code, verb)
			}
			if open {
				out = append(out, strings.TrimRight(code, " "))
			}
		default:
			open = false
		}
	}
	return out
}

// shell runs a command line of the document in a directory.
func (k *kubectl) shell(dir, line string) error {
	_, err := k.run(dir, line)
	return err
}

// run is shell, and returns what the command printed.
func (k *kubectl) run(dir, line string) (string, error) {
	const prelude = `dir=$1 path=$2 state=$3
cd "$dir"
kubectl() { "$path" --kubeconfig="$state/config" --cache-dir="$state" "$@"; }
`
	line = strings.ReplaceAll(line, "NODE", "node1")
	return k.node.Output("sh", "-ec", prelude+line, "sh", dir, k.path, k.dir+"/kubectl")
}
