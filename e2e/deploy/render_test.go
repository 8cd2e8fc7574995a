package deploy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/diff"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// object is a Kubernetes object as it is written.
type object map[string]any

// kustomized renders a directory below deploy.
func kustomized(t testing.TB, dir string) string {
	t.Helper()
	return output(t, tool(t, "kubectl"), "kustomize", project(t, "deploy", dir))
}

// charted renders the chart, with flags of helm template.
func charted(t testing.TB, flags ...string) string {
	t.Helper()
	args := append([]string{"template", "nodeproxy", project(t, "deploy", "chart"), "--namespace=kube-system"}, flags...)
	return output(t, tool(t, "helm"), args...)
}

// objects reads manifests, by kind and name. The configuration in the ConfigMap is made an object too, for its layout and
// comments do not matter. Labels that only helm gives are taken away.
func objects(t testing.TB, text string) map[string]object {
	t.Helper()
	out := map[string]object{}
	for docs := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		var o object
		if err := yaml.UnmarshalStrict(doc, &o); err != nil {
			t.Fatalf("%v in\n%s", err, doc)
		}
		if len(o) == 0 {
			continue
		}
		metadata := o["metadata"].(map[string]any)
		key := fmt.Sprintf("%s %v/%v", o["kind"], metadata["namespace"], metadata["name"])
		if out[key] != nil {
			t.Fatalf("%s is there twice", key)
		}
		labels := metadata["labels"].(map[string]any)
		for label := range labels {
			if label != "app.kubernetes.io/name" {
				delete(labels, label)
			}
		}
		if data, ok := o["data"].(map[string]any); ok {
			for name, content := range data {
				var parsed object
				if err := yaml.UnmarshalStrict([]byte(content.(string)), &parsed); err != nil {
					t.Fatalf("%s, %s: %v", key, name, err)
				}
				data[name] = parsed
			}
		}
		out[key] = o
	}
}

// modes are those that there are overlays for, with the flags by which the chart is the same.
var modes = []struct {
	overlay string
	flags   []string
}{
	{"overlays/iptables", nil},
	{"overlays/ipvs", []string{"--set=config.mode=ipvs,config.ipvs.scheduler=,config.ipvs.strictARP=false"}},
	{"overlays/nftables", []string{"--set=config.mode=nftables", "--set-json=config.nodePortAddresses=[]"}},
	{"overlays/migrate", []string{"--set=nodeSelector.service-proxy=nodeproxy"}},
}

// TestChartIsWhatKustomizeMakes: chart and overlays are two ways to the same objects.
func TestChartIsWhatKustomizeMakes(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		want, got := objects(t, kustomized(t, mode.overlay)), objects(t, charted(t, mode.flags...))
		if len(want) != 5 {
			t.Errorf("%s: %d objects, want 5", mode.overlay, len(want))
		}
		if !reflect.DeepEqual(want, got) {
			t.Errorf("%s and the chart with %q differ:\n%s", mode.overlay, mode.flags, diff.Diff(want, got))
		}
	}
}

// TestChart holds the real helm's opinion of the chart, and what its values do.
func TestChart(t *testing.T) {
	t.Parallel()
	helm, chart := tool(t, "helm"), project(t, "deploy", "chart")
	output(t, helm, "lint", "--strict", "--namespace=kube-system", chart)

	for _, flag := range []string{
		"config.mode=ebpf", "config.mode=", "config.healthzBindAddress=localhost", "apiServer.port=0",
		"apiServer.host=https://10.0.0.5", "capabilities={NET_RAW}", "colour=red", "seLinuxOptions.kind=spc_t", "image.repository=", "extraArgs={run}",
	} {
		out, err := attempt(helm, "template", "nodeproxy", chart, "--set="+flag)
		if err == nil || !strings.Contains(err.Error(), "schema") {
			t.Errorf("--set %s: the schema does not refuse it: %v %s", flag, err, out)
		}
	}

	values := "--set=apiServer.host=api.example.org,apiServer.port=443,config.healthzBindAddress=127.0.0.1:20256," +
		"image.repository=registry.example.org/np,image.tag=v2,extraArgs={--v=4},capabilities={NET_ADMIN}," +
		"config.clusterCIDR=10.244.0.0/16,podAnnotations.a=b,podLabels.c=d,imagePullSecrets[0].name=key,seLinuxOptions.type=unconfined_t," +
		"updateStrategy.rollingUpdate.maxSurge=1,updateStrategy.rollingUpdate.maxUnavailable=0"
	ds := daemonSet(t, charted(t, values))
	pod := ds.Spec.Template.Spec
	c := pod.Containers[0]
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	for what, ok := range map[string]bool{
		"API server": env["KUBERNETES_SERVICE_HOST"] == "api.example.org" && env["KUBERNETES_SERVICE_PORT"] == "443",
		"health port": c.StartupProbe.HTTPGet.Port.IntVal == 20256 && c.LivenessProbe.HTTPGet.Port.IntVal == 20256 &&
			c.ReadinessProbe.HTTPGet.Port.IntVal == 20256,
		"SELinux":       pod.SecurityContext.SELinuxOptions.Type == "unconfined_t",
		"surge":         ds.Spec.UpdateStrategy.RollingUpdate.MaxSurge.IntVal == 1,
		"image":         c.Image == "registry.example.org/np:v2",
		"extra flag":    c.Args[len(c.Args)-1] == "--v=4",
		"capabilities":  len(c.SecurityContext.Capabilities.Add) == 1,
		"annotation":    ds.Spec.Template.Annotations["a"] == "b",
		"label":         ds.Spec.Template.Labels["c"] == "d",
		"pull secret":   len(pod.ImagePullSecrets) == 1 && pod.ImagePullSecrets[0].Name == "key",
		"configuration": strings.Contains(charted(t, values), "\n    clusterCIDR: 10.244.0.0/16\n"),
	} {
		if !ok {
			t.Errorf("%s: the value has no effect in\n%+v", what, ds.Spec.Template)
		}
	}
	// A whole file of kube-proxy's may be given as the value config.
	file := objects(t, charted(t, "--set-json=config="+
		`{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","iptables":{"masqueradeBit":13}}`))
	cm := file["ConfigMap kube-system/nodeproxy"]["data"].(map[string]any)["config.yaml"].(object)
	if want := map[string]any{"masqueradeBit": 13.0}; !reflect.DeepEqual(cm["iptables"], any(want)) || cm["mode"] != "iptables" {
		t.Errorf("configuration %v", cm)
	}
}

// TestPodsMayOverlap: an update with maxSurge puts a second pod on a node, which the scheduler does not do for pods with host ports; with
// hostNetwork, each port that a pod declares is one. SELinux lets the pods do their work.
func TestPodsMayOverlap(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		for what, text := range map[string]string{"kustomize": kustomized(t, mode.overlay), "chart": charted(t, mode.flags...)} {
			pod := daemonSet(t, text).Spec.Template.Spec
			for _, c := range append(pod.InitContainers, pod.Containers...) {
				if len(c.Ports) > 0 {
					t.Errorf("%s, %s: container %s declares ports %v", mode.overlay, what, c.Name, c.Ports)
				}
			}
			if o := pod.SecurityContext.SELinuxOptions; o == nil || o.Type != "spc_t" {
				t.Errorf("%s, %s: SELinux options %v", mode.overlay, what, o)
			}
		}
	}
	if o := daemonSet(t, charted(t, "--set-json=seLinuxOptions=null")).Spec.Template.Spec.SecurityContext.SELinuxOptions; o != nil {
		t.Errorf("without them, SELinux options %v", o)
	}
}

func asYAML(t testing.TB, value any) string {
	t.Helper()
	text, err := yaml.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
