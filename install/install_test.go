package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// clusterOf reads a file of testdata, after each replacement of old and new text.
func clusterOf(t *testing.T, kind string, replacements ...string) *Cluster {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", kind+".yaml"))
	require.NoError(t, err)
	for i := 0; i < len(replacements); i += 2 {
		if !strings.Contains(string(text), replacements[i]) {
			t.Fatalf("%s has no %q", kind, replacements[i])
		}
		text = []byte(strings.ReplaceAll(string(text), replacements[i], replacements[i+1]))
	}
	c := &Cluster{}
	require.NoError(t, c.Read(bytes.NewReader(text)))
	return c
}

// said collects what is said.
type said struct{ bytes.Buffer }

func (s *said) say(format string, args ...any) { fmt.Fprintf(s, format+"\n", args...) }

func detected(t *testing.T, c *Cluster, o Options) *Setup {
	t.Helper()
	s, err := c.Detect(o, new(said).say)
	require.NoError(t, err)
	return s
}

// must returns a function that takes what another one returns, which must not fail.
func must(t *testing.T) func([]byte, error) []byte {
	return func(text []byte, err error) []byte {
		t.Helper()
		require.NoError(t, err)
		return text
	}
}

// parsed is like must for what is to be read.
func parsed[T any](t *testing.T) func([]byte, error) T {
	return func(text []byte, err error) (out T) {
		t.Helper()
		require.NoError(t, yaml.Unmarshal(must(t)(text, err), &out))
		return out
	}
}

// chartValues are some of the values of the chart.
type chartValues struct {
	Affinity     *v1.Affinity
	NodeSelector map[string]string
}

func probesOf(d daemonSet) []*v1.Probe {
	c := d.Spec.Template.Spec.Containers[0]
	return []*v1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe}
}

// flannel is the DaemonSet of a CNI plugin that uses the Nodes' podCIDRs.
const flannel = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-flannel-ds, namespace: kube-flannel}
spec: {template: {spec: {containers: [{name: kube-flannel, command: [/opt/bin/flanneld], args: [--ip-masq, --kube-subnet-mgr]}]}}}
`

// TestDetect: of each kind of cluster, what is found, and what has to be given.
func TestDetect(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, kind   string
		replacements []string
		options      Options
		host         string
		port         int
		config       map[string]any // these fields
		says         []string
	}{
		{
			name: "kubeadm", kind: "kubeadm", host: "10.0.0.5", port: 6443,
			config: map[string]any{
				"mode": "iptables", "clusterCIDR": "10.244.0.0/16", "detectLocalMode": "ClusterCIDR", "oomScoreAdj": -997,
				"healthzBindAddress": "0.0.0.0:10256", "metricsBindAddress": "127.0.0.1:10249", "winkernel": nil, "hostnameOverride": nil,
			},
			says: []string{"cluster: kubeadm", "DaemonSet kube-system/kube-proxy\n", "config.conf of ConfigMap", "kubeconfig.conf of ConfigMap"},
		},
		{
			name: "mode nftables of kubeadm", kind: "kubeadm", replacements: []string{`    mode: ""`, "    mode: nftables"}, host: "10.0.0.5", port: 6443,
			config: map[string]any{"mode": "nftables"},
		},
		{
			name: "mode ipvs of kubeadm", kind: "kubeadm",
			replacements: []string{`    mode: ""`, "    mode: ipvs", `scheduler: ""`, "scheduler: lc"}, host: "10.0.0.5", port: 6443,
			config: map[string]any{"mode": "ipvs", "ipvs": map[string]any{
				"scheduler": "lc", "strictARP": false, "minSyncPeriod": "0s", "syncPeriod": "0s", "tcpFinTimeout": "0s", "tcpTimeout": "0s", "udpTimeout": "0s",
			}},
		},
		{
			name: "fields that nobody knows", kind: "kubeadm", replacements: []string{`    mode: ""`, "    mode: \"\"\n    novelty: {depth: 3}"},
			host: "10.0.0.5", port: 6443, config: map[string]any{"novelty": map[string]any{"depth": 3.0}},
		},
		{
			name: "kube-proxy told the cluster IP", kind: "kubeadm",
			replacements: []string{"        server: https://10.0.0.5:6443\n      name: default", "        server: https://10.96.0.1\n      name: default"},
			host:         "10.0.0.5", port: 6443, says: []string{"it is the cluster IP", "kubeconfig of ConfigMap kube-public/cluster-info"},
		},
		{
			name: "no Service of the API server", kind: "kubeadm", replacements: []string{"{name: kubernetes, namespace: default}", "{name: other, namespace: default}"},
			host: "10.0.0.5", port: 6443, says: []string{"make sure that 10.0.0.5 is not its cluster IP"},
		},
		{
			name: "no range but those of the nodes, which flannel uses", kind: "kubeadm",
			replacements: []string{"    clusterCIDR: 10.244.0.0/16\n", "", "      podSubnet: 10.244.0.0/16\n", "", "apiVersion: v1\nkind: Node\n", flannel +
				"---\napiVersion: v1\nkind: Node\n"}, host: "10.0.0.5", port: 6443,
			config: map[string]any{"clusterCIDR": nil, "detectLocalMode": "NodeCIDR"}, says: []string{"which DaemonSet kube-flannel/kube-flannel-ds uses"},
		},
		{
			name: "no range but those of the nodes, which another network plugin may not use", kind: "kubeadm",
			replacements: []string{"    clusterCIDR: 10.244.0.0/16\n", "", "      podSubnet: 10.244.0.0/16\n", ""}, host: "10.0.0.5", port: 6443,
			config: map[string]any{"clusterCIDR": nil, "detectLocalMode": "ClusterCIDR"}, says: []string{"cluster CIDR: none, as for kube-proxy"},
		},
		{
			name: "range of kubeadm-config", kind: "kubeadm", replacements: []string{"    clusterCIDR: 10.244.0.0/16\n", ""}, host: "10.0.0.5", port: 6443,
			config: map[string]any{"clusterCIDR": "10.244.0.0/16"}, says: []string{"ClusterConfiguration of ConfigMap kube-system/kubeadm-config"},
		},
		{
			name: "IPv6", kind: "kubeadm", replacements: []string{"bindAddress: 0.0.0.0", "bindAddress: '::'"}, host: "10.0.0.5", port: 6443,
			config: map[string]any{"healthzBindAddress": "[::]:10256", "metricsBindAddress": "[::1]:10249"},
		},
		{
			name: "given", kind: "kubeadm",
			options: Options{APIServer: "api.example.org:443", ClusterCIDR: "10.1.0.0/16,fd01::/48", Mode: "nftables"}, host: "api.example.org", port: 443,
			config: map[string]any{"mode": "nftables", "clusterCIDR": "10.1.0.0/16,fd01::/48"},
		},
		{
			name: "k3s", kind: "k3s", host: "127.0.0.1", port: 6444,
			config: map[string]any{"mode": "iptables", "detectLocalMode": "ClusterCIDR", "clusterCIDR": "10.42.0.0/16"},
			says:   []string{"switched off by --disable-kube-proxy", "from the default of k3s"},
		},
		{
			name: "k3s of IPv6", kind: "k3s", host: "127.0.0.1", port: 6444,
			replacements: []string{"10.43.0.1", "'fd00:43::1'", "10.42.0.0/24", "'fd00:42::/64'", "10.42.1.0/24", "'fd00:42:0:1::/64'"},
			config:       map[string]any{"detectLocalMode": "ClusterCIDR", "clusterCIDR": "fd00:42::/56"},
		},
		{
			name: "k3s with its kube-proxy", kind: "k3s", replacements: []string{`"--disable-kube-proxy",`, ""}, host: "127.0.0.1", port: 6444,
			says: []string{"start all servers with --disable-kube-proxy"},
		},
		{
			name: "k3s with flags", kind: "k3s", host: "127.0.0.1", port: 6444,
			replacements: []string{`"--disable-kube-proxy",`, `"--cluster-cidr","10.52.0.0/16","--cluster-cidr","fd00:52::/56",`,
				`"--node-ip"`, `"--kube-proxy-arg","--proxy-mode=ipvs","--kube-proxy-arg","ipvs-strict-arp","--node-ip"`,
				`["agent"]`, `["agent","--kube-proxy-arg","ipvs-strict-arp=true","--kube-proxy-arg","proxy-mode=ipvs"]`},
			config: map[string]any{"mode": "ipvs", "clusterCIDR": "10.52.0.0/16,fd00:52::/56"},
			says:   []string{"the flags of Node server1, --kube-proxy-arg", "from the flags of k3s servers", "1 of 2 kube-proxies have other flags"},
		},
		{
			name: "k3s whose kube-proxy has a range", kind: "k3s", host: "127.0.0.1", port: 6444,
			replacements: []string{`"--disable-kube-proxy",`, `"--kube-proxy-arg","--cluster-cidr=10.40.0.0/14",`},
			config:       map[string]any{"clusterCIDR": "10.40.0.0/14"}, says: []string{"from kube-proxy's configuration"},
		},
		{
			name: "RKE2", kind: "rke2", host: "127.0.0.1", port: 6443,
			config: map[string]any{"mode": "ipvs", "clusterCIDR": "10.52.0.0/16", "detectLocalMode": "ClusterCIDR", "healthzBindAddress": "0.0.0.0:10256"},
			says:   []string{"1 static pods", "health is at 0.0.0.0", "the flags of Pod kube-system/kube-proxy-server1", "from kube-proxy's configuration"},
		},
		{
			name: "RKE2 without kube-proxy", kind: "rke2", replacements: []string{"component: kube-proxy", "component: other"}, host: "127.0.0.1", port: 6443,
			config: map[string]any{"mode": "ipvs", "clusterCIDR": "10.52.0.0/16", "detectLocalMode": "ClusterCIDR"},
			says:   []string{"the flags of Node server1, --kube-proxy-arg", "from the flags of RKE2 servers"},
		},
		{
			name: "RKE2 whose kube-proxy reads a file", kind: "rke2", replacements: []string{"--ipvs-strict-arp=true\n", "--config=/etc/kube-proxy.yaml\n"},
			host: "127.0.0.1", port: 6443, config: map[string]any{"mode": "iptables", "clusterCIDR": "10.52.0.0/16"},
			says: []string{"in the file /etc/kube-proxy.yaml of a node (Pod kube-system/kube-proxy-server1)", "defaults are used"},
		},
		{
			name: "EKS", kind: "eks", host: "0123456789abcdef.gr7.eu-west-1.eks.amazonaws.com", port: 443,
			config: map[string]any{
				"mode": "iptables", "clusterCIDR": nil, "metricsBindAddress": "0.0.0.0:10249", "oomScoreAdj": -997,
				"conntrack": map[string]any{"maxPerCore": 32768.0, "min": 131072.0, "tcpCloseWaitTimeout": "1h0m0s", "tcpEstablishedTimeout": "24h0m0s"},
			},
			says: []string{"EKS add-on", "config of ConfigMap kube-system/kube-proxy-config"},
		},
		{
			name: "Talos", kind: "talos", host: "localhost", port: 7445,
			config: map[string]any{"mode": "nftables", "clusterCIDR": "10.244.0.0/16"}, says: []string{"the flags of DaemonSet kube-system/kube-proxy"},
		},
		{
			name: "AKS", kind: "aks", options: Options{APIServer: "shop.hcp.westeurope.azmk8s.io"}, host: "shop.hcp.westeurope.azmk8s.io", port: 443,
			config: map[string]any{"metricsBindAddress": "0.0.0.0:10249", "clusterCIDR": "10.244.0.0/16"}, says: []string{"add-on manager"},
		},
		{
			name: "GKE", kind: "gke", options: Options{APIServer: "10.128.0.2", ClusterCIDR: NoCIDR}, host: "10.128.0.2", port: 443,
			says: []string{"cluster: GKE", "1 static pods"},
		},
		{
			name: "range of GKE", kind: "gke", options: Options{APIServer: "10.128.0.2"}, host: "10.128.0.2", port: 443,
			config: map[string]any{"clusterCIDR": "10.8.0.0/14"}, says: []string{"the flags of Pod kube-system/kube-proxy-gke-pool-1"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var out said
			s, err := clusterOf(t, test.kind, test.replacements...).Detect(test.options, out.say)
			if err != nil {
				t.Fatalf("%v\n%s", err, &out)
			}
			if s.Host != test.host || s.Port != test.port {
				t.Errorf("API server %s, %d; want %s, %d", s.Host, s.Port, test.host, test.port)
			}
			for field, want := range test.config {
				if got := s.Config[field]; !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %#v, want %#v", field, got, want)
				}
			}
			for _, text := range test.says {
				if !strings.Contains(out.String(), text) {
					t.Errorf("it does not say %q:\n%s", text, &out)
				}
			}
			if _, err := s.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestDetectMisses: what can't be found is an error that names the flag; no address is taken that works only with Services.
func TestDetectMisses(t *testing.T) {
	t.Parallel()
	const server = "https://10.0.0.5:6443"
	for _, test := range []struct {
		name, kind   string
		replacements []string
		options      Options
		flag, says   string
	}{
		{name: "no address", kind: "aks", flag: "--api-server", says: "not to be found"},
		{name: "cluster IP only", kind: "kubeadm", replacements: []string{server, "https://10.96.0.1:443"}, flag: "--api-server", says: "not to be found"},
		{name: "name of cluster DNS", kind: "kubeadm", replacements: []string{server, "https://kubernetes.default.svc"}, flag: "--api-server"},
		{name: "short name", kind: "kubeadm", replacements: []string{server, "https://kubernetes"}, flag: "--api-server"},
		{name: "loopback", kind: "kubeadm", replacements: []string{server, "https://127.0.0.1:6443"}, flag: "--api-server"},
		{name: "given cluster IP", kind: "kubeadm", options: Options{APIServer: "10.96.0.1:443"}, flag: "--api-server", says: "cluster IP"},
		{name: "given nonsense", kind: "kubeadm", options: Options{APIServer: "10.0.0.5:x"}, flag: "--api-server"},
		{name: "no range", kind: "kubeadm", flag: "--cluster-cidr", says: "--cluster-cidr=none",
			replacements: []string{"name: kube-proxy\n", "name: other\n", "/kube-proxy\n", "/other\n", "      podSubnet: 10.244.0.0/16\n", ""}},
		{name: "not the default range", kind: "rke2", flag: "--cluster-cidr", says: "it is not the default, 10.42.0.0/16, as Node server1 has 10.52.0.0/24",
			replacements: []string{`,"--cluster-cidr","10.52.0.0/16"`, "", "    - --cluster-cidr=10.52.0.0/16\n", ""}},
		{name: "broken range", kind: "kubeadm", options: Options{ClusterCIDR: "10.0.0.0"}, flag: "--cluster-cidr"},
		{name: "userspace", kind: "kubeadm", replacements: []string{`    mode: ""`, "    mode: userspace"}, flag: "--mode"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var out said
			s, err := clusterOf(t, test.kind, test.replacements...).Detect(test.options, out.say)
			if err == nil {
				t.Fatalf("no error, but %+v", s)
			}
			if !strings.Contains(err.Error(), test.flag) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v; want %s, %s", err, test.flag, test.says)
			}
		})
	}
	c := clusterOf(t, "kubeadm")
	c.Server = "https://10.0.0.9:6443"
	delete(c.configMaps, "kube-system/kube-proxy")
	if _, err := c.Detect(Options{}, new(said).say); err == nil || !strings.Contains(err.Error(), "/var/lib/kube-proxy/config.conf") {
		t.Errorf("without the ConfigMap of kube-proxy: %v", err)
	}
}

// affinities are what a DaemonSet may have had before.
var affinities = map[string]string{
	"none":            `null`,
	"empty":           `{}`,
	"empty inside":    `{"nodeAffinity":{}}`,
	"of pods":         `{"podAntiAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":[{"topologyKey":"kubernetes.io/hostname"}]}}`,
	"preferred":       `{"nodeAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[{"weight":1,"preference":{"matchExpressions":[{"key":"a","operator":"Exists"}]}}]}}`,
	"one term":        `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}`,
	"two terms":       `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]},{"matchFields":[{"key":"metadata.name","operator":"In","values":["n"]}]}]}}}`,
	"a term for none": `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{},{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}`,
	"novelty":         `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"novelty":1,"matchExpressions":[{"key":"a","operator":"Exists"}]}]}},"more":[1]}`,
}

// apply applies what KeepOff and Restore make, as an API server does.
func apply(t *testing.T, d *daemonSet, patch []byte) {
	t.Helper()
	for _, o := range parsed[[]operation](t)(patch, nil) {
		switch {
		case o.Op == "test" && o.Path == "/metadata/generation":
			if float64(d.Generation) != o.Value {
				t.Fatalf("generation %d: %v", d.Generation, o)
			}
		case o.Op == "add" && o.Path == "/metadata/annotations":
			d.Annotations = map[string]string{}
		case o.Op == "add" && o.Path == "/metadata/annotations/nodeproxy~1affinity-before":
			d.Annotations[annotation] = o.Value.(string)
		case o.Op == "remove" && o.Path == "/metadata/annotations/nodeproxy~1affinity-before" && d.Annotations[annotation] != "":
			delete(d.Annotations, annotation)
		case o.Op == "add" && o.Path == affinityPath && o.Value != nil:
			d.affinity = o.Value
		case o.Op == "remove" && o.Path == affinityPath && d.affinity != nil:
			d.affinity = nil
		default:
			t.Fatalf("operation %+v on affinity %v, annotations %v", o, d.affinity, d.Annotations)
		}
	}
	d.Generation++
}

// TestKeepOffAndRestore: the patch adds to every term what keeps kube-proxy off and changes nothing else, and its undo brings back exactly
// what there was, also after both patches, one after the other.
func TestKeepOffAndRestore(t *testing.T) {
	t.Parallel()
	for name, text := range affinities {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := clusterOf(t, "kubeadm")
			d := c.daemonSets[0]
			d.Generation = 1
			want := parsed[any](t)([]byte(text), nil)
			d.affinity = want
			step := func(migrate bool) {
				t.Helper()
				apply(t, d, must(t)(c.KeepOff(migrate, new(said).say)))
				checkTerms(t, want, d.affinity, requirement(migrate))
			}
			step(true)
			apply(t, d, must(t)(c.Restore(new(said).say)))
			if !reflect.DeepEqual(d.affinity, want) {
				t.Errorf("affinity %v, want %v", d.affinity, want)
			}
			step(true)
			step(false)
			step(false) // It changes nothing.
			apply(t, d, must(t)(c.Restore(new(said).say)))
			if _, left := d.Annotations[annotation]; !reflect.DeepEqual(d.affinity, want) || left {
				t.Errorf("affinity %v with annotations %v, want %v", d.affinity, d.Annotations, want)
			}
			apply(t, d, must(t)(c.Restore(new(said).say))) // It changes nothing.
			if !reflect.DeepEqual(d.affinity, want) {
				t.Errorf("after a second time: %v, want %v", d.affinity, want)
			}
		})
	}
}

// checkTerms checks that each term that meets any node has the requirement and what it had, and that the others meet none.
func checkTerms(t *testing.T, before, after any, requirement map[string]any) {
	t.Helper()
	terms := func(affinity any) []v1.NodeSelectorTerm {
		a := parsed[v1.Affinity](t)(json.Marshal(affinity))
		if a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			return nil
		}
		return a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	was, is := terms(before), terms(after)
	if len(was) == 0 {
		was = []v1.NodeSelectorTerm{{}}
	} else if len(is) != len(was) {
		t.Fatalf("%d terms, want %d", len(is), len(was))
	}
	for i, term := range is {
		if len(terms(before)) > 0 && len(was[i].MatchExpressions)+len(was[i].MatchFields) == 0 {
			if len(term.MatchExpressions)+len(term.MatchFields) > 0 {
				t.Errorf("term %d met no node, and now it does: %v", i, term)
			}
			continue
		}
		n := len(term.MatchExpressions)
		if n != len(was[i].MatchExpressions)+1 || !reflect.DeepEqual(append([]v1.NodeSelectorRequirement{}, was[i].MatchExpressions...), term.MatchExpressions[:n-1]) ||
			!reflect.DeepEqual(term.MatchFields, was[i].MatchFields) {
			t.Errorf("term %d: %v, want one more requirement than %v", i, term, was[i])
			continue
		}
		if last := term.MatchExpressions[n-1]; last.Key != Label || string(last.Operator) != requirement["operator"] {
			t.Errorf("term %d: %v", i, last)
		}
	}
}

// TestRestoreAfterAnotherChange: what somebody else has changed meanwhile stays, also where a kubectl patch without our annotation kept
// kube-proxy off.
func TestRestoreAfterAnotherChange(t *testing.T) {
	t.Parallel()
	const changed = `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[
		{"key":"service-proxy","operator":"NotIn","values":["nodeproxy"]},{"key":"later","operator":"Exists"}]}]}}}`
	const want = `{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"later","operator":"Exists"}]}]}}}`
	for _, annotated := range []bool{true, false} {
		c := clusterOf(t, "kubeadm")
		d := c.daemonSets[0]
		if annotated {
			d.Annotations = map[string]string{annotation: "null"}
		}
		d.affinity = parsed[any](t)([]byte(changed), nil)
		apply(t, d, must(t)(c.Restore(new(said).say)))
		if got, _ := json.Marshal(d.affinity); string(got) != want {
			t.Errorf("annotated %t: %s, want %s", annotated, got, want)
		}
	}
}

// TestNothingToPatch: where a patch would not last or there is nothing to patch, the error says what to do instead.
func TestNothingToPatch(t *testing.T) {
	t.Parallel()
	for kind, says := range map[string]string{
		"k3s": "--disable-kube-proxy", "rke2": "--disable-kube-proxy", "gke": "static pod", "aks": "az aks",
	} {
		c := clusterOf(t, kind)
		for _, do := range []func() ([]byte, error){
			func() ([]byte, error) { return c.KeepOff(true, new(said).say) }, func() ([]byte, error) { return c.Restore(new(said).say) },
		} {
			if patch, err := do(); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: %s %v, want %s", kind, patch, err, says)
			}
		}
	}
}

// TestOtherDaemonSets: another one that runs a kube-proxy is named, unless it is for Windows.
func TestOtherDaemonSets(t *testing.T) {
	t.Parallel()
	for linux, more := range map[bool]string{true: "", false: "os: {name: windows}, "} {
		c := clusterOf(t, "kubeadm")
		if err := c.Read(strings.NewReader("apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: second, namespace: kube-system}\n" +
			"spec: {template: {spec: {" + more + "containers: [{name: kube-proxy}]}}}\n")); err != nil {
			t.Fatal(err)
		}
		var out said
		if _, err := c.KeepOff(true, out.say); err != nil || strings.Contains(out.String(), "second runs a kube-proxy too") != linux {
			t.Errorf("for Linux %t: %v, %s", linux, err, &out)
		}
	}
}

// TestManifests: the objects of each mode, with what was found.
func TestManifests(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"iptables", "ipvs", "nftables"} {
		c := clusterOf(t, "kubeadm", `healthzBindAddress: ""`, `healthzBindAddress: 0.0.0.0:20256`)
		s := detected(t, c, Options{Mode: mode, Image: "registry.example.org/nodeproxy:v1", Migrate: true})
		var ds daemonSet
		kinds := map[string]int{}
		for doc := range bytes.SplitSeq(must(t)(s.Manifests()), []byte("---\n")) {
			o := parsed[daemonSet](t)(doc, nil)
			if kinds[o.Kind]++; o.Kind == "DaemonSet" {
				ds = o
			}
		}
		if want := map[string]int{"ServiceAccount": 1, "ClusterRole": 1, "ClusterRoleBinding": 1, "Role": 1, "RoleBinding": 1, "ConfigMap": 1, "DaemonSet": 1}; !reflect.DeepEqual(kinds, want) {
			t.Errorf("%s: %v, want %v", mode, kinds, want)
		}
		pod := ds.Spec.Template.Spec
		env := map[string]string{}
		for _, e := range pod.Containers[0].Env {
			env[e.Name] = e.Value
		}
		if env["KUBERNETES_SERVICE_HOST"] != "10.0.0.5" || env["KUBERNETES_SERVICE_PORT"] != "6443" {
			t.Errorf("%s: variables %v", mode, env)
		}
		if pod.NodeSelector[Label] != "nodeproxy" || pod.NodeSelector["kubernetes.io/os"] != "linux" {
			t.Errorf("%s: node selector %v", mode, pod.NodeSelector)
		}
		if got := len(pod.InitContainers); (got == 1) != (mode == "ipvs") {
			t.Errorf("%s: %d init containers", mode, got)
		}
		if got := len(pod.Containers[0].SecurityContext.Capabilities.Add); (got == 1) != (mode == "nftables") {
			t.Errorf("%s: %d capabilities", mode, got)
		}
		for _, x := range append(pod.InitContainers, pod.Containers...) {
			if x.Image != "registry.example.org/nodeproxy:v1" {
				t.Errorf("%s, %s: image %s", mode, x.Name, x.Image)
			}
		}
		for _, p := range probesOf(ds) {
			if p.HTTPGet.Port.IntVal != 20256 {
				t.Errorf("%s: probe at %v", mode, p.HTTPGet.Port)
			}
		}
		values := must(t)(s.Values())
		var v struct {
			Image        struct{ Repository, Tag string }
			NodeSelector map[string]string
			APIServer    struct {
				Host string
				Port int
			} `json:"apiServer"`
			Config map[string]any
		}
		require.NoError(t, yaml.UnmarshalStrict(values, &v))
		if v.Image.Repository != "registry.example.org/nodeproxy" || v.Image.Tag != "v1" || v.NodeSelector[Label] != "nodeproxy" || v.APIServer.Port != 6443 ||
			v.Config["mode"] != mode {
			t.Errorf("%s: values\n%s", mode, values)
		}
	}
}

// TestNoKernelModules: on Talos, and elsewhere if the user says so, no container of mode ipvs asks for the capability to load kernel modules.
func TestNoKernelModules(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		kind   string
		o      Options
		loaded bool
	}{
		{"kubeadm", Options{Mode: "ipvs"}, true}, {"kubeadm", Options{Mode: "ipvs", NoKernelModules: true}, false}, {"talos", Options{Mode: "ipvs"}, false},
		{"talos", Options{Mode: "ipvs", NoKernelModules: true}, false},
	} {
		s := detected(t, clusterOf(t, test.kind), test.o)
		manifests := must(t)(s.Manifests())
		for _, text := range []string{"SYS_MODULE", "/lib/modules", "initContainers"} {
			if bytes.Contains(manifests, []byte(text)) != test.loaded {
				t.Errorf("%s, %+v: manifests have %s: %t\n%s", test.kind, test.o, text, !test.loaded, manifests)
			}
		}
		if values := must(t)(s.Values()); bytes.Contains(values, []byte("loadKernelModules: false")) == test.loaded {
			t.Errorf("%s, %+v: values\n%s", test.kind, test.o, values)
		}
	}
}

// TestApartFromKubeProxy: pods are kept apart by the one label that kube-proxy's have, and by one term, since schedulers wake those that wait by
// several only after minutes; in the manifests, the values of the chart and the cleanup.
func TestApartFromKubeProxy(t *testing.T) {
	t.Parallel()
	term := func(t *testing.T, affinity *v1.Affinity) *metav1.LabelSelector {
		t.Helper()
		terms := affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		if len(terms) != 1 || terms[0].TopologyKey != v1.LabelHostname || !reflect.DeepEqual(terms[0].NamespaceSelector, &metav1.LabelSelector{}) {
			t.Fatalf("terms %+v", terms)
		}
		return terms[0].LabelSelector
	}
	for kind, label := range map[string]string{"kubeadm": "k8s-app", "eks": "k8s-app", "talos": "k8s-app", "k3s": "k8s-app", "rke2": "component", "aks": "component"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			for _, there := range []bool{true, false} { // With nothing that runs kube-proxy, the nodes tell.
				c := clusterOf(t, kind)
				o := Options{APIServer: "10.0.0.5:6443", ClusterCIDR: "10.244.0.0/16", Mode: "nftables"}
				s := detected(t, c, o)
				if !there {
					c.daemonSets, c.pods = nil, nil
					s.label = c.proxyLabel()
				}
				ds := parsed[apps.DaemonSet](t)(s.daemonSet())
				want := &metav1.LabelSelector{MatchLabels: map[string]string{label: "kube-proxy"}}
				if got := term(t, ds.Spec.Template.Spec.Affinity); !reflect.DeepEqual(got, want) {
					t.Errorf("nodeproxy is apart from %v, want %v", got, want)
				}
				if values := parsed[chartValues](t)(s.Values()); values.Affinity == nil {
					if label != "k8s-app" {
						t.Error("the values leave the chart's own affinity")
					}
				} else if got := term(t, values.Affinity); !reflect.DeepEqual(got, want) {
					t.Errorf("by the values, nodeproxy is apart from %v, want %v", got, want)
				}
				for only, from := range map[bool][]string{false: {"nodeproxy", "kube-proxy"}, true: {"nodeproxy"}} {
					cleanup := parsed[apps.DaemonSet](t)(c.Cleanup("", only))
					want := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: label, Operator: metav1.LabelSelectorOpIn, Values: from}}}
					if got := term(t, cleanup.Spec.Template.Spec.Affinity); !reflect.DeepEqual(got, want) {
						t.Errorf("the cleanup is apart from %v, want %v", got, want)
					}
					if selector, _ := metav1.LabelSelectorAsSelector(want); !selector.Matches(labels.Set(ds.Spec.Template.Labels)) {
						t.Errorf("the cleanup is not apart from nodeproxy's pods, which have %v", ds.Spec.Template.Labels)
					}
				}
			}
		})
	}
}

// goesTo reports whether the scheduler would put a pod on a node with these labels: it has all of the nodeSelector, and meets all requirements of one term.
func goesTo(selector map[string]string, affinity *v1.Affinity, node labels.Set) bool {
	meets := func(r v1.NodeSelectorRequirement) bool {
		value, has := node[r.Key]
		switch r.Operator {
		case v1.NodeSelectorOpIn:
			return has && slices.Contains(r.Values, value)
		case v1.NodeSelectorOpNotIn:
			return !slices.Contains(r.Values, value)
		}
		return has == (r.Operator == v1.NodeSelectorOpExists)
	}
	if !labels.SelectorFromSet(selector).Matches(node) {
		return false
	}
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	return slices.ContainsFunc(affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, func(term v1.NodeSelectorTerm) bool {
		return len(term.MatchExpressions) > 0 && !slices.ContainsFunc(term.MatchExpressions, func(r v1.NodeSelectorRequirement) bool { return !meets(r) })
	})
}

// TestNodeAffinity: nodeproxy and the cleanup leave out the nodes that kube-proxy's DaemonSet leaves out, by the manifests and by the values of the
// chart, before and after that has been kept off the nodes; with --migrate, nodeproxy also leaves out those without its label, whichever term they meet.
func TestNodeAffinity(t *testing.T) {
	t.Parallel()
	const term = "            - matchExpressions:\n              - {key: kubernetes.io/os"
	c := clusterOf(t, "eks", term, "            - matchExpressions:\n              - {key: dedicated, operator: Exists}\n"+term)
	ec2 := labels.Set{"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", Label: "nodeproxy"}
	with := func(key, value string) labels.Set { return labels.Merge(ec2, labels.Set{key: value}) }
	d := c.daemonSets[0]
	d.Generation = 1
	for _, kept := range []string{"", "some", "all"} {
		if kept != "" {
			apply(t, d, must(t)(c.KeepOff(kept == "some", new(said).say)))
		}
		for _, migrate := range []bool{true, false} {
			s := detected(t, c, Options{Migrate: migrate})
			ds, cleanup := parsed[apps.DaemonSet](t)(s.daemonSet()), parsed[apps.DaemonSet](t)(c.Cleanup("", false))
			values := parsed[chartValues](t)(s.Values())
			if values.Affinity == nil || values.Affinity.PodAntiAffinity == nil || ds.Spec.Template.Spec.Affinity.PodAntiAffinity == nil {
				t.Errorf("nothing keeps the pods of the proxies apart: values\n%+v\npods\n%+v", values, ds.Spec.Template.Spec.Affinity)
			}
			for _, test := range []struct {
				name      string
				node      labels.Set
				want      bool
				withLabel bool // It has nodeproxy's, without which --migrate leaves it out.
			}{
				{"ec2", ec2, true, true},
				{"fargate", with("eks.amazonaws.com/compute-type", "fargate"), false, true},
				{"hybrid", with("eks.amazonaws.com/compute-type", "hybrid"), false, true},
				{"auto", with("eks.amazonaws.com/compute-type", "auto"), false, true},
				{"a node of the other term", with("dedicated", "x"), true, true},
				{"ec2 of kube-proxy", with(Label, "kube-proxy"), true, false},
				{"of the other term and of kube-proxy", labels.Merge(with("dedicated", "x"), labels.Set{Label: "kube-proxy"}), true, false},
			} {
				want := test.want && (test.withLabel || !migrate)
				for what, got := range map[string]bool{
					"manifests": goesTo(ds.Spec.Template.Spec.NodeSelector, ds.Spec.Template.Spec.Affinity, test.node),
					"values":    goesTo(values.NodeSelector, values.Affinity, test.node),
				} {
					if got != want {
						t.Errorf("kube-proxy kept off %q, --migrate %t, %s: nodeproxy goes to %s: %t, want %t", kept, migrate, what, test.name, got, want)
					}
				}
				if got := goesTo(cleanup.Spec.Template.Spec.NodeSelector, cleanup.Spec.Template.Spec.Affinity, test.node); got != test.want {
					t.Errorf("kube-proxy kept off %q: the cleanup goes to %s: %t, want %t", kept, test.name, got, test.want)
				}
			}
		}
	}
}

// TestReadBroken: what is no object is an error.
func TestReadBroken(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"a: b: c", "[]", "kind: ConfigMapList\nitems: [{data: 5}]", "kind: Node\nstatus: 7"} {
		if err := new(Cluster).Read(strings.NewReader(text)); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
	list := `{"kind":"DaemonSetList","items":[{"metadata":{"name":"p","namespace":"x"},"spec":{"template":{"spec":{"containers":[{"name":"kube-proxy"}]}}}}]}`
	c := &Cluster{}
	if err := errors.Join(c.Read(strings.NewReader(list)), c.Read(strings.NewReader(""))); err != nil || len(c.daemonSets) != 1 {
		t.Errorf("of a list whose items have no kind: %d DaemonSets, %v", len(c.daemonSets), err)
	}
}

// TestCommandLine: how kube-proxy is found in a DaemonSet, and with which flags.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, container string
		want            []string
		none            bool
	}{
		{name: "shell", container: `{"name": "proxy", "command": ["/bin/sh", "-c", "mkdir -p /x; exec /bin/kube-proxy --proxy-mode='ipvs' --v 2 1>>/var/log/kube-proxy.log 2>&1"]}`,
			want: []string{"--proxy-mode=ipvs", "--v=2"}},
		{name: "shell of old", container: `{"name": "kube-proxy", "command": ["sh", "-c"], "args": ["kube-proxy \\\\\n --cluster-cidr=10.0.0.0/8 && true"]}`,
			want: []string{"--cluster-cidr=10.0.0.0/8"}},
		{name: "hyperkube", container: `{"name": "proxy", "command": ["/hyperkube", "kube-proxy", "--v=2"]}`, want: []string{"--v=2"}},
		{name: "a script that reads its log", container: `{"name": "tail", "command": ["sh", "-c", "tail -f /var/log/kube-proxy >&2"]}`, none: true},
		{name: "what reads its log", container: `{"name": "tail", "args": ["--path", "/var/log/kube-proxy"]}`, none: true},
	} {
		var c Cluster
		err := c.Add([]byte(`{"kind": "DaemonSet", "metadata": {"name": "x"}, "spec": {"template": {"spec": {"containers": [` + test.container + `]}}}}`))
		require.NoError(t, err)
		if len(c.daemonSets) == 0 || test.none {
			if test.none != (len(c.daemonSets) == 0) {
				t.Errorf("%s: it is taken for %d kube-proxies", test.name, len(c.daemonSets))
			}
			continue
		}
		if got := c.daemonSets[0].flags(); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: flags %q, want %q", test.name, got, test.want)
		}
	}
}

// TestHealthOnLoopback: where only the node itself may ask for health, the kubelet does so at that address: it would restart the pod else.
func TestHealthOnLoopback(t *testing.T) {
	t.Parallel()
	for addr, host := range map[string]string{"127.0.0.1:10256": "127.0.0.1", "'[::1]:10256'": "::1", "0.0.0.0:10256": ""} {
		c := clusterOf(t, "kubeadm", `    healthzBindAddress: ""`, "    healthzBindAddress: "+addr)
		s := detected(t, c, Options{})
		for _, probe := range probesOf(parsed[daemonSet](t)(s.daemonSet())) {
			if probe.HTTPGet.Host != host {
				t.Errorf("health at %s: the kubelet asks %q, want %q", addr, probe.HTTPGet.Host, host)
			}
		}
		if _, err := s.Values(); (err != nil) != (host != "") {
			t.Errorf("health at %s: values of the chart: %v", addr, err)
		}
	}
}

// TestHandOver: nodeproxy hands over where a DaemonSet runs kube-proxy in mode nftables, whatever its own mode is.
func TestHandOver(t *testing.T) {
	t.Parallel()
	for _, of := range []string{"iptables", "nftables"} {
		for _, mode := range []string{"iptables", "ipvs", "nftables"} {
			s := detected(t, clusterOf(t, "kubeadm", `    mode: ""`, "    mode: "+of), Options{Mode: mode})
			var args []string
			for doc := range bytes.SplitSeq(must(t)(s.Manifests()), []byte("---\n")) {
				if ds := parsed[daemonSet](t)(doc, nil); ds.Kind == "DaemonSet" {
					args = ds.Spec.Template.Spec.Containers[0].Args
				}
			}
			values := string(must(t)(s.Values()))
			if want := of == "nftables"; slices.Contains(args, handOver) != want || strings.Contains(values, "extraArgs:\n- "+handOver) != want {
				t.Errorf("from mode %s of kube-proxy to mode %s: arguments %q, values\n%s", of, mode, args, values)
			}
		}
	}
}
