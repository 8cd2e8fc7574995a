package deploy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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
	args := append([]string{"template", "nodeproxy", project(t, "deploy", "chart"), "--namespace=kube-system", "--skip-tests"}, flags...)
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
		require.NoError(t, err)
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
				require.NoError(t, yaml.UnmarshalStrict([]byte(content.(string)), &parsed), "%s, %s", key, name)
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
		if len(want) != 7 {
			t.Errorf("%s: %d objects, want 7", mode.overlay, len(want))
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
		"config.mode=ebpf", "config.mode=", "config.healthzBindAddress=localhost", "config.healthzBindAddress=localhost:10256",
		"config.healthzBindAddress=::1:99", "config.metricsBindAddress=::1:99", "config.metricsBindAddress=10.0.0.1:0", "apiServer.port=0",
		"apiServer.host=https://10.0.0.5", "config.ipvs.strictArp=true", "config.conntrack.udpTimeout=5", "config.oomScoreAdj=-1001",
		"config.iptables.masqueradeBit=a", "config.featureGates.WinDSR=maybe", "config.nodePortAddresses=primary", "config.kind=Config",
		"image.digest=sha256:0", "extraEnv[0].value=x", "extraVolumes[0].hostPath.path=/x", "extraVolumeMounts[0].mountPath=x",
		"serviceAccount.create=1", "podMonitor.interval=often", "serviceMonitor.port=1", "prometheusRule.labels.a=1", "existingConfigMap.mode=ebpf", "capabilities={NET_RAW}", "colour=red", "seLinuxOptions.kind=spc_t", "image.repository=", "extraArgs={run}",
		"seccompProfile.type=None", "seccompProfile.localhostProfile=nodeproxy.json",
	} {
		out, err := attempt(helm, "template", "nodeproxy", chart, "--set="+flag)
		// The message names the value or, where something is missing in it or it is unknown, the one that it is in.
		path, _, _ := strings.Cut(flag, "=")
		last := path[strings.LastIndexByte(path, '.')+1:]
		_, said, ofSchema := strings.Cut(fmt.Sprint(err), "specifications of the schema")
		if strings.HasPrefix(path, "extra") {
			last, _, _ = strings.Cut(path, "[")
		}
		if !ofSchema || !strings.Contains(said, last) {
			t.Errorf("--set %s: the schema does not refuse it by its name: %v %s", flag, err, out)
		}
	}

	values := "--set=apiServer.host=api.example.org,apiServer.port=443,config.healthzBindAddress=0.0.0.0:20256," +
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

// TestChartNull: null leaves out a default that is a map, or a key of it. An empty map does not, as helm merges maps.
func TestChartNull(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(project(t, "deploy", "chart", "values.yaml"))
	require.NoError(t, err)
	var values map[string]any
	require.NoError(t, yaml.Unmarshal(text, &values))
	rendered := func(set string) string {
		return asYAML(t, objects(t, charted(t, "--set-json="+set))["DaemonSet kube-system/nodeproxy"])
	}
	// The values that are fields of the DaemonSet as they are.
	for _, name := range []string{"affinity", "nodeSelector", "resources", "seLinuxOptions", "updateStrategy"} {
		if got := rendered(name + "={}"); !strings.Contains(got, " "+name+":\n") || got != rendered("podLabels={}") {
			t.Errorf("%s={} is not the default:\n%s", name, got)
		}
		if got := rendered(name + "=null"); strings.Contains(got, " "+name+":") {
			t.Errorf("%s=null leaves it in:\n%s", name, got)
		}
		for key, value := range values[name].(map[string]any) {
			field := " " + key + ":"
			if text, ok := value.(string); ok {
				field += " " + text
			}
			if got := rendered(fmt.Sprintf(`%s={%q:null}`, name, key)); strings.Contains(got, field) {
				t.Errorf("%s.%s=null leaves it in:\n%s", name, key, got)
			}
		}
	}
}

// TestChartExtras: what clusters need beside the usual reaches the containers.
func TestChartExtras(t *testing.T) {
	t.Parallel()
	digest := "sha256:" + strings.Repeat("0a", 32)
	text := charted(t, "--set=config.mode=ipvs,image.repository=r.example.org/np,image.tag=v2,image.digest="+digest,
		"--set=extraEnv[0].name=HTTPS_PROXY,extraEnv[0].value=http://p:3128",
		"--set=extraVolumes[0].name=certs,extraVolumes[0].hostPath.path=/etc/ssl,extraVolumeMounts[0].name=certs,extraVolumeMounts[0].mountPath=/etc/ssl",
		"--set=serviceAccount.name=np,serviceAccount.annotations.a=b")
	pod := daemonSet(t, text).Spec.Template.Spec
	containers := append(pod.InitContainers, pod.Containers...)
	if len(containers) != 2 || pod.ServiceAccountName != "np" || pod.Volumes[len(pod.Volumes)-1].HostPath.Path != "/etc/ssl" {
		t.Errorf("pod %+v", pod)
	}
	for _, c := range containers {
		env, mount := c.Env[len(c.Env)-1], c.VolumeMounts[len(c.VolumeMounts)-1]
		if c.Image != "r.example.org/np@"+digest || env.Name != "HTTPS_PROXY" || env.Value != "http://p:3128" ||
			mount.Name != "certs" || mount.MountPath != "/etc/ssl" {
			t.Errorf("container %+v", c)
		}
	}
	all := objects(t, text)
	account := all["ServiceAccount kube-system/np"]
	if account == nil || account["metadata"].(map[string]any)["annotations"].(map[string]any)["a"] != "b" {
		t.Errorf("ServiceAccount %v", account)
	}
	subject := func(all map[string]object) any {
		return all["ClusterRoleBinding <nil>/nodeproxy"]["subjects"].([]any)[0].(map[string]any)["name"]
	}
	if got := subject(all); got != "np" {
		t.Errorf("the role is bound to %v", got)
	}
	all = objects(t, charted(t, "--set=serviceAccount.name=np,serviceAccount.create=false"))
	if all["ServiceAccount kube-system/np"] != nil || len(all) != 6 || subject(all) != "np" {
		t.Errorf("with a ServiceAccount that is there: %v", all)
	}
}

// refused wants the chart to be refused, for a reason.
func refused(t *testing.T, reason string, flags ...string) {
	t.Helper()
	args := append([]string{"template", "nodeproxy", project(t, "deploy", "chart"), "--namespace=kube-system"}, flags...)
	if out, err := attempt(tool(t, "helm"), args...); err == nil || !strings.Contains(err.Error(), reason) {
		t.Errorf("%q: got %v, want %s\n%s", flags, err, reason, out)
	}
}

// TestChartExistingConfigMap: with kubeadm's ConfigMap the chart is the overlay kubeadm, but that flags keep what the pods are made for.
// TestManifests has helm read the mode in the cluster.
func TestChartExistingConfigMap(t *testing.T) {
	t.Parallel()
	const existing = "--set=existingConfigMap.name=kube-proxy"
	refused(t, "existingConfigMap.mode must name its mode", existing)
	refused(t, "serviceAccount.name must name", "--set=serviceAccount.create=false")

	pinned := func(mode string) []any {
		return []any{"--proxy-mode=" + mode, "--healthz-bind-address=0.0.0.0:10256", "--metrics-bind-address=127.0.0.1:10249"}
	}
	want := objects(t, kustomized(t, "overlays/kubeadm"))
	container := want["DaemonSet kube-system/nodeproxy"]
	for _, field := range []string{"spec", "template", "spec"} {
		container = container[field].(map[string]any)
	}
	container = container["containers"].([]any)[0].(map[string]any)
	args := container["args"].([]any)
	container["args"] = append(append(append([]any{}, args[:2]...), pinned("iptables")...), args[2:]...)
	got := objects(t, charted(t, existing, "--set=existingConfigMap.mode=iptables"))
	// Their order does not matter, nor that of volumes.
	inOrder(want)
	inOrder(got)
	if !reflect.DeepEqual(want, got) {
		t.Errorf("the overlay kubeadm and the chart differ:\n%s", diff.Diff(want, got))
	}

	pod := daemonSet(t, charted(t, existing, "--set=existingConfigMap.mode=ipvs")).Spec.Template.Spec
	if len(pod.InitContainers) != 1 || !slices.Contains(pod.InitContainers[0].Args, "--proxy-mode=ipvs") {
		t.Errorf("init containers of mode ipvs: %+v", pod.InitContainers)
	}
	pod = daemonSet(t, charted(t, existing, "--set=existingConfigMap.mode=nftables,existingConfigMap.kubeconfigKey=")).Spec.Template.Spec
	if c := pod.Containers[0].SecurityContext.Capabilities.Add; len(c) != 1 || len(pod.InitContainers) != 0 {
		t.Errorf("mode nftables: capabilities %v, init containers %v", c, pod.InitContainers)
	}
	for _, m := range pod.Containers[0].VolumeMounts {
		if m.MountPath == "/var/lib/kube-proxy" {
			t.Error("a kubeconfig is mounted although there is none")
		}
	}
}

// TestChartRefuses: what would make pods that are restarted again and again, or whose image has no valid name, is refused, and a sentence says
// where what is wrong belongs. Forms that look like it are taken.
func TestChartRefuses(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"127.0.0.1", "127.1.2.3", "[::1]", "[0:0:0:0:0:0:0:1]", "[::0001]", "[::ffff:127.0.0.1]", "[::FFFF:7F00:1]"} {
		refused(t, "set it to 0.0.0.0:20256, or [::]:20256 where nodes have no IPv4", "--set=config.healthzBindAddress="+at+":20256")
	}
	for _, host := range []string{"10.0.0.5:6443", "api.example.org:443", "[fd00::5]", "[fd00::5]:6443"} {
		refused(t, "the port belongs in apiServer.port, and an IPv6 address has no brackets here", "--set=apiServer.host="+host)
	}
	digest := "@sha256:" + strings.Repeat("0a", 32)
	for _, repository := range []string{"r.example.org/np:v2", "r.example.org/np" + digest, "r.example.org:5000/np:v2" + digest, "localhost:5000", "https://r.example.org/np"} {
		refused(t, "a tag belongs in image.tag, a digest in image.digest", "--set=image.repository="+repository)
	}

	for flag, want := range map[string]string{
		"config.healthzBindAddress=[::]:20256":                "port: 20256",
		"config.healthzBindAddress=[2001:db8::1]:20256":       "port: 20256",
		"apiServer.host=fd00::5":                              `value: "fd00::5"`, // client-go adds the brackets.
		"apiServer.host=::ffff:10.0.0.5":                      `value: "::ffff:10.0.0.5"`,
		"image.repository=localhost:5000/a_b/n-p,image.tag=v": `image: "localhost:5000/a_b/n-p:v"`,
		"image.repository=nodeproxy,image.tag=v":              `image: "nodeproxy:v"`,
		"image.repository=[fd00::1]:5000/np,image.tag=v":      `image: "[fd00::1]:5000/np:v"`,
	} {
		if text := charted(t, "--set="+flag); !strings.Contains(text, want+"\n") {
			t.Errorf("--set %s: %s is not in\n%s", flag, want, text)
		}
	}
}

// TestChartNotes: what is printed after an installation warns of metrics that others can read, and only of those.
func TestChartNotes(t *testing.T) {
	t.Parallel()
	// "helm template" does not print NOTES.txt, so a copy of the chart has it as an object.
	chart := t.TempDir()
	require.NoError(t, os.CopyFS(chart, os.DirFS(project(t, "deploy", "chart"))))
	templates := filepath.Join(chart, "templates")
	notes, err := os.ReadFile(filepath.Join(templates, "NOTES.txt"))
	require.NoError(t, err)
	object := `{{ define "notes" }}` + string(notes) + "{{ end }}\nnotes: {{ include \"notes\" . | toJson }}\n"
	require.NoError(t, os.WriteFile(filepath.Join(templates, "notes.yaml"), []byte(object), 0o644))
	for at, want := range map[string]bool{
		"": false, "127.0.0.1:10249": false, "[::1]:10249": false, "[0:0:0:0:0:0:0:1]:10249": false, "[::ffff:127.0.0.1]:10249": false,
		"0.0.0.0:10249": true, "[::]:10249": true, "[2001:db8::1]:10249": true, "[1::1]:10249": true,
	} {
		text := output(t, tool(t, "helm"), "template", "nodeproxy", chart, "--show-only=templates/notes.yaml", "--set=config.metricsBindAddress="+at)
		if !strings.Contains(text, "nodeproxy runs in mode iptables") || strings.Contains(text, "can be read at "+at+" of each node by everyone") != want {
			t.Errorf("metrics at %q: warning wanted: %t; got\n%s", at, want, text)
		}
	}
}

// inOrder sorts the volumes of the DaemonSet, and the mounts of its first container.
func inOrder(all map[string]object) {
	pod := all["DaemonSet kube-system/nodeproxy"]["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	by := func(field string) func(a, b any) int {
		return func(a, b any) int {
			return strings.Compare(a.(map[string]any)[field].(string), b.(map[string]any)[field].(string))
		}
	}
	slices.SortFunc(pod["volumes"].([]any), by("name"))
	slices.SortFunc(pod["containers"].([]any)[0].(map[string]any)["volumeMounts"].([]any), by("mountPath"))
}

// TestChartMonitors: no monitor without an address of metrics that Prometheus reaches; and none of them is there unasked.
func TestChartMonitors(t *testing.T) {
	t.Parallel()
	for _, monitor := range []string{"podMonitor", "serviceMonitor"} {
		for _, at := range []string{"127.0.0.1:10249", "[::1]:10249", "[0:0:0:0:0:0:0:1]:10249", "[::ffff:127.0.0.1]:10249", ""} {
			refused(t, "which Prometheus can't reach", "--set="+monitor+".enabled=true,config.metricsBindAddress="+at)
		}
	}
	all := objects(t, charted(t, "--set=podMonitor.enabled=true,serviceMonitor.enabled=true,prometheusRule.enabled=true",
		"--set=config.metricsBindAddress=[::]:20249,podMonitor.interval=15s,serviceMonitor.interval=15s"))
	if len(all) != 11 {
		t.Errorf("%d objects, want 11", len(all))
	}
	service := all["Service kube-system/nodeproxy-metrics"]["spec"].(map[string]any)
	if port := service["ports"].([]any)[0].(map[string]any); port["port"] != 20249.0 || service["clusterIP"] != "None" {
		t.Errorf("Service %v", service)
	}
	text := asYAML(t, all["PodMonitor kube-system/nodeproxy"])
	for _, want := range []string{"interval: 15s", "replacement: $1:20249", "replacement: '[$1]:20249'"} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is not in\n%s", want, text)
		}
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
	require.NoError(t, err)
	return string(text)
}
