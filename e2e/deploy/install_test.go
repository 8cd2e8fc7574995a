package deploy

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"nodeproxy/e2e/cluster"
	"nodeproxy/e2e/harness"
)

// commandsOf are the commands of docs/install/PAGE.md by section, in their order, without the comments behind them. That for one node, which is
// part of the text, has a section of its own.
func commandsOf(t *testing.T, page string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(project(t, "docs", "install", page+".md"))
	require.NoError(t, err)
	out, section := map[string][]string{}, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			section = heading
		}
		if code, ok := strings.CutPrefix(line, "    "); ok {
			code, _, _ = strings.Cut(code, " #")
			out[section] = append(out[section], strings.TrimSpace(code))
		}
		if words := strings.Split(line, "`"); strings.HasPrefix(line, "One node, ") && len(words) > 1 {
			out[section+" one node"] = words[1:2]
		}
	}
	return out
}

// foreign are the programs whose commands only those can run who have such a cluster. What such a command does, a test does in another way.
var foreign = []string{"aws", "az", "talosctl", "systemctl", "mkdir", "rm"}

func isForeign(command string) bool { return slices.Contains(foreign, strings.Fields(command)[0]) }

// installation is a cluster of some kind, in which the commands of its page run.
type installation struct {
	*player
	kubectl *kubectl
	pages   map[string][]string
	dir     string // where commands run
	static  v1.Pod // a static pod, of which each node has one
	// instead is what is done in place of a command of another program.
	instead func(command string) error
}

// newInstallation makes a cluster like that of install/testdata/KIND.yaml, with the addresses and ranges of a World, for the commands of a page.
func newInstallation(t *testing.T, cp *cluster.ControlPlane, kubectl *kubectl, page, kind string) *installation {
	t.Helper()
	i := &installation{player: &player{cp: cp, ending: map[types.UID]time.Time{}}, kubectl: kubectl, pages: commandsOf(t, page), dir: t.TempDir()}
	text, err := os.ReadFile(project(t, "install", "testdata", kind+".yaml"))
	require.NoError(t, err)
	replaced := strings.NewReplacer("https://10.0.0.5:6443", cp.URL(), "https://0123456789abcdef.gr7.eu-west-1.eks.amazonaws.com", cp.URL(),
		"  managedFields: [{manager: eks, operation: Apply, apiVersion: apps/v1}]\n", "", // It is not for clients to set.
		"maxPerCore: null", "maxPerCore: 0", // The size of the table is the machine's: no namespace can set it.
		`["agent"]`, fmt.Sprintf(`["server","--cluster-cidr","%s,%s"]`, harness.ClusterCIDR4, harness.ClusterCIDR6), // All nodes become like the last one.
		"10.244.0.0/16", harness.ClusterCIDR4.String()+","+harness.ClusterCIDR6.String()).Replace(string(text))
	var described []string
	for _, doc := range strings.Split(replaced, "\n---\n") {
		var o struct {
			Kind     string
			Metadata metav1.ObjectMeta
		}
		require.NoError(t, yaml.Unmarshal([]byte(doc), &o))
		switch o.Kind {
		case "Node":
			i.describeNodes(t, doc)
		case "Pod":
			require.NoError(t, yaml.Unmarshal([]byte(doc), &i.static))
		case "ConfigMap", "DaemonSet":
			described = append(described, doc)
		}
	}
	if len(described) > 0 {
		file := filepath.Join(i.dir, "cluster.yaml")
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(described, "\n---\n")), 0o644))
		require.NoError(t, i.shell("kubectl apply --server-side -f cluster.yaml"))
		t.Cleanup(func() {
			assert.NoError(t, i.shell("kubectl delete --ignore-not-found -f cluster.yaml"))
		})
	}
	return i
}

// describeNodes makes the nodes look like one that such a cluster has.
func (i *installation) describeNodes(t *testing.T, doc string) {
	t.Helper()
	var like v1.Node
	require.NoError(t, yaml.Unmarshal([]byte(doc), &like))
	api := i.cp.Admin.CoreV1().Nodes()
	list, err := api.List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	for _, n := range list.Items {
		n.Labels, n.Annotations, n.Spec.Taints = maps.Clone(like.Labels), like.Annotations, nil
		n.Labels[v1.LabelHostname] = n.Name
		changed, err := api.Update(t.Context(), &n, metav1.UpdateOptions{})
		require.NoError(t, err)
		changed.Status.NodeInfo.KubeletVersion, changed.Status.NodeInfo.OSImage = like.Status.NodeInfo.KubeletVersion, like.Status.NodeInfo.OSImage
		changed.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
		changed.Status.Allocatable = v1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("100")}
		_, err = api.UpdateStatus(t.Context(), changed, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
}

// shell runs a command of a page.
func (i *installation) shell(command string) error {
	const prelude = `dir=$1 path=$2 state=$3 binary=$4
cd "$dir"
kubectl() { "$path" --kubeconfig="$state/config" --cache-dir="$state" "$@"; }
nodeproxy() { KUBECONFIG="$state/config" "$binary" "$@"; }
`
	binary, err := harness.Binary()
	if err != nil {
		return err
	}
	command = strings.NewReplacer("IMAGE", imageName, "NODE", "node1", "API-SERVER:443", strings.TrimPrefix(i.cp.URL(), "https://")).Replace(command)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-ec", prelude+command, "sh", i.dir, i.kubectl.path, i.kubectl.dir+"/kubectl", binary)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err = i.kubectl.node.Do(cmd.Start); err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%w: %s", err, &out)
	}
	return err
}

// patience is how long a command of a page may take on a busy machine.
const patience = 3 * time.Minute

// do runs the commands of a section, and others after them.
func (i *installation) do(t *testing.T, section string, more ...string) {
	t.Helper()
	if len(i.pages[section]) == 0 {
		t.Fatalf("the page has no commands to %s", section)
	}
	i.run(t, section, slices.Concat(i.pages[section], more))
}

// installTwice runs the commands to install up to those that do without the label, rolls back one node, and switches it over again with all the rest.
func (i *installation) installTwice(t *testing.T) {
	t.Helper()
	commands := i.pages["Install"]
	label, rest := slices.Index(commands, "kubectl label node NODE service-proxy=nodeproxy"), slices.Index(commands, rolledOut)+1
	if label < 0 || rest < label {
		t.Fatalf("the page does not install by a label, and then without: %q", commands)
	}
	i.run(t, "Install, by the label", commands[:rest])
	i.do(t, "Roll back one node", "until kubectl -n kube-system get pods -l k8s-app=kube-proxy --field-selector spec.nodeName=NODE -o name | grep .; do sleep 1; done")
	i.run(t, "Install, the rest", commands[label:])
}

// run runs the commands of a step.
func (i *installation) run(t *testing.T, step string, commands []string) {
	t.Helper()
	i.bound, i.running, i.ready = absence{}, absence{}, absence{}
	for _, command := range commands {
		begun := time.Now()
		var err error
		switch {
		case !i.kubelets && strings.Contains(command, " exec ds/nodeproxy -- "): // No container runs.
		case isForeign(command):
			if i.instead != nil {
				err = i.while(t.Context(), func() error { return i.instead(command) })
			}
		default:
			err = i.while(t.Context(), func() error { return i.shell(command) })
		}
		require.NoError(t, err, "%s: %s", step, command)
		t.Logf("%s: %v for %s", step, time.Since(begun).Round(time.Millisecond), command)
	}
	require.NoError(t, i.settle(t.Context()), "%s", step)
	t.Logf("%s: no node was without a pod of this or another proxy, or of the cleanup, for longer than %v, one that ran for longer than %v, or one that was ready for longer than %v",
		step, i.bound.longest.Round(time.Millisecond), i.running.longest.Round(time.Millisecond), i.ready.longest.Round(time.Millisecond))
}

// kubeProxy is the DaemonSet of kube-proxy, without what every change of it changes.
func (i *installation) kubeProxy(t *testing.T) *apps.DaemonSet {
	t.Helper()
	ds, err := i.cp.Admin.AppsV1().DaemonSets("kube-system").Get(t.Context(), "kube-proxy", metav1.GetOptions{})
	require.NoError(t, err)
	out := &apps.DaemonSet{ObjectMeta: metav1.ObjectMeta{Annotations: ds.Annotations, Labels: ds.Labels}, Spec: ds.Spec}
	delete(out.Annotations, "deprecated.daemonset.template.generation")
	return out
}

// nothingLeft checks that namespace kube-system has no object of nodeproxy.
func (i *installation) nothingLeft(t *testing.T) {
	t.Helper()
	sets, err := i.cp.Admin.AppsV1().DaemonSets("kube-system").List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	for _, ds := range sets.Items {
		if ds.Name != "kube-proxy" {
			t.Errorf("DaemonSet %s is left", ds.Name)
		}
	}
	require.NoError(t, i.until(t.Context(), func() error {
		pods, err := i.cp.Admin.CoreV1().Pods("kube-system").List(t.Context(), metav1.ListOptions{})
		for _, pod := range pods.Items {
			if pod.Labels["k8s-app"] != "kube-proxy" && pod.Labels["component"] != "kube-proxy" {
				err = fmt.Errorf("pod %s is left", pod.Name)
			}
		}
		return err
	}))
	for _, err := range []error{
		gone(i.cp.Admin.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "nodeproxy", metav1.GetOptions{})),
		gone(i.cp.Admin.RbacV1().ClusterRoles().Get(t.Context(), "nodeproxy", metav1.GetOptions{})),
		gone(i.cp.Admin.RbacV1().ClusterRoleBindings().Get(t.Context(), "nodeproxy", metav1.GetOptions{})),
		gone(i.cp.Admin.RbacV1().Roles("kube-system").Get(t.Context(), "nodeproxy", metav1.GetOptions{})),
		gone(i.cp.Admin.RbacV1().RoleBindings("kube-system").Get(t.Context(), "nodeproxy", metav1.GetOptions{})),
		gone(i.cp.Admin.CoreV1().ServiceAccounts("kube-system").Get(t.Context(), "nodeproxy", metav1.GetOptions{})),
	} {
		assert.NoError(t, err)
	}
}

func gone[T metav1.Object](o T, err error) error {
	if err == nil {
		return fmt.Errorf("%s is left", o.GetName())
	}
	return nil
}

// controlled makes a World with a control plane that has DaemonSets, a Service and a kubectl.
func controlled(t *testing.T) (*cluster.ControlPlane, *kubectl) {
	t.Helper()
	w := harness.New(t, harness.Options{})
	cp, err := cluster.Start(w, w.Nodes[2].Host, "daemonset-controller", "garbage-collector-controller")
	require.NoError(t, err)
	t.Cleanup(cp.Close)
	k := &kubectl{path: tool(t, "kubectl"), node: w.Node1(), dir: w.Dir}
	require.NoError(t, k.login(cp))
	require.NoError(t, createService(t.Context(), cp, w, w.Nodes...))
	require.NoError(t, cp.StartScheduler())
	return cp, k
}

// TestInstallPages runs the commands of the pages on a real control plane, with objects such as such clusters have: to install, to roll back, to install
// again, where the page has it with one node rolled back meanwhile, and to uninstall. Pods only seem to run; for those of kubeadm.md, they do so in TestNodeKubeadm.
// No node is without a pod for tooLong. After the way back, kube-proxy's DaemonSet is what it was, and at last nothing of nodeproxy is left.
func TestInstallPages(t *testing.T) {
	t.Parallel()
	cp, k := controlled(t)
	for _, test := range []struct{ name, page, objects string }{
		{"k3s", "k3s", "k3s"}, {"kubeadm", "kubeadm", "kubeadm"}, {"kind", "kind", "kubeadm"}, {"minikube", "minikube", "kubeadm"},
		{"eks", "eks", "eks"}, {"talos", "talos", "talos"}, {"aks", "aks", "aks"}, {"rke2", "k3s", "rke2"},
	} {
		t.Run(test.name, func(t *testing.T) { // one after the other, as they are one cluster
			i := newInstallation(t, cp, k, test.page, test.objects)
			var before *apps.DaemonSet
			switch test.name {
			case "aks":
				i.instead = i.azure(t.Context())
			case "rke2":
				i.instead = i.rancher(t.Context())
				require.NoError(t, i.instead("rm"))
			case "k3s": // It has none.
			default:
				before = i.kubeProxy(t)
			}
			require.NoError(t, i.settle(t.Context()))
			i.do(t, "Install")
			i.do(t, "Check")
			i.do(t, "Roll back")
			i.nothingLeft(t)
			if before == nil {
				i.do(t, "Install")
			} else {
				if after := i.kubeProxy(t); !reflect.DeepEqual(after, before) {
					t.Errorf("kube-proxy's DaemonSet before:\n%s\nand after:\n%s", asYAML(t, before), asYAML(t, after))
				}
				i.installTwice(t)
			}
			i.do(t, "Uninstall")
			i.nothingLeft(t)
		})
	}
}

// rancher does what RKE2 does when it starts with kube-proxy switched off by a file, or without that file: it ends the static pods, or makes them.
func (i *installation) rancher(ctx context.Context) func(string) error {
	return func(command string) error {
		program := strings.Fields(command)[0]
		if program == "systemctl" {
			return nil
		}
		nodes, err := i.cp.Admin.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		api := i.cp.Admin.CoreV1().Pods("kube-system")
		for _, n := range nodes.Items {
			pod := i.static.DeepCopy()
			pod.Name, pod.Spec.NodeName = "kube-proxy-"+n.Name, n.Name
			pod.OwnerReferences[0].Name, pod.OwnerReferences[0].UID = n.Name, n.UID
			if program == "rm" {
				_, err = api.Create(ctx, pod, metav1.CreateOptions{})
			} else {
				err = api.Delete(ctx, pod.Name, metav1.DeleteOptions{})
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// azure does what az aks does with kube-proxy.json.
func (i *installation) azure(ctx context.Context) func(string) error {
	return func(command string) error {
		text, err := os.ReadFile(filepath.Join(i.dir, "kube-proxy.json"))
		if err != nil {
			return err
		}
		if strings.Contains(string(text), "false") {
			return i.cp.Admin.AppsV1().DaemonSets("kube-system").Delete(ctx, "kube-proxy", metav1.DeleteOptions{})
		}
		return i.shell("kubectl apply --server-side -f cluster.yaml")
	}
}
