package install

import (
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"

	"nodeproxy/deploy"
)

// Namespace is where everything is installed.
const Namespace = "kube-system"

// handOver is the flag with which nodeproxy gives a node back to a kube-proxy in mode nftables.
const handOver = "--hand-over-to=nftables"

// Values returns values of the chart.
func (s *Setup) Values() ([]byte, error) {
	if host, _, err := net.SplitHostPort(s.Config["healthzBindAddress"].(string)); err == nil && loopback(host) {
		return nil, fmt.Errorf("healthzBindAddress: %s: the probes of the chart ask the node's address, so the kubelet would restart nodeproxy again and again; "+
			"use -o manifests, whose probes ask %s", s.Config["healthzBindAddress"], host)
	}
	values := map[string]any{
		"apiServer": map[string]any{"host": s.Host, "port": s.Port},
		"config":    maps.Clone(s.Config),
	}
	for _, field := range []string{"apiVersion", "kind"} { // The chart adds them.
		delete(values["config"].(map[string]any), field)
	}
	if s.NoKernelModules {
		values["loadKernelModules"] = false
	}
	if s.handOver {
		values["extraArgs"] = []any{handOver}
	}
	if s.Migrate {
		values["nodeSelector"] = map[string]any{Label: labelOurs}
	}
	if s.label != proxyLabels[0] || s.nodeAffinity != nil {
		ds, err := manifest("base/daemonset.yaml")
		if err != nil {
			return nil, err
		}
		pod := podOf(ds)
		keepApart(pod, s.label)
		withNodeAffinity(pod, s.nodeAffinity)
		values["affinity"] = pod["affinity"]
	}
	if s.Image != "" {
		repository, tag := s.Image, ""
		if i := strings.LastIndexByte(repository, ':'); i > strings.LastIndexByte(repository, '/') {
			repository, tag = repository[:i], repository[i+1:]
		}
		if strings.Contains(s.Image, "@") {
			return nil, fmt.Errorf("--image: %q has a digest; set it in the values of the chart yourself", s.Image)
		}
		values["image"] = map[string]any{"repository": repository, "tag": tag}
	}
	return yaml.Marshal(values)
}

// loopback reports whether a host is an address that only the node itself reaches.
func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

// Manifests returns all objects, for kubectl apply.
func (s *Setup) Manifests() ([]byte, error) {
	rbac, err := fs.ReadFile(deploy.Files, "base/rbac.yaml")
	if err != nil {
		return nil, err
	}
	file, err := yaml.Marshal(s.Config)
	if err != nil {
		return nil, err
	}
	configMap, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{
			"name": "nodeproxy", "namespace": Namespace, "labels": map[string]any{"app.kubernetes.io/name": "nodeproxy"},
		},
		"data": map[string]any{"config.yaml": string(file)},
	})
	if err != nil {
		return nil, err
	}
	daemonSet, err := s.daemonSet()
	if err != nil {
		return nil, err
	}
	return bytes.Join([][]byte{rbac, configMap, daemonSet}, []byte("---\n")), nil
}

// daemonSet is that of the mode's overlay, with what is found.
func (s *Setup) daemonSet() ([]byte, error) {
	ds, err := manifest("base/daemonset.yaml")
	if err != nil {
		return nil, err
	}
	in(ds, "metadata")["namespace"] = Namespace
	spec := in(ds, "spec")
	template := in(spec, "template")
	if mode := s.Config["mode"].(string); mode != "iptables" {
		overlay, err := manifest("overlays/" + mode + "/daemonset.yaml")
		if err != nil {
			return nil, err
		}
		patch := in(overlay, "spec", "template")
		if template, err = strategicpatch.StrategicMergeMapPatch(template, patch, v1.PodTemplateSpec{}); err != nil {
			return nil, fmt.Errorf("overlay of mode %s: %w", mode, err)
		}
		spec["template"] = template
	}
	pod := in(template, "spec")
	if s.NoKernelModules {
		delete(pod, "initContainers") // The only one is that of mode ipvs, and so is the volume.
		pod["volumes"] = slices.DeleteFunc(pod["volumes"].([]any), func(v any) bool { return v.(map[string]any)["name"] == "modules" })
	}
	if s.Migrate {
		in(pod, "nodeSelector")[Label] = labelOurs
	}
	keepApart(pod, s.label)
	withNodeAffinity(pod, s.nodeAffinity)
	withImage(pod, s.Image)
	host, port, err := net.SplitHostPort(s.Config["healthzBindAddress"].(string))
	if err != nil {
		return nil, fmt.Errorf("healthzBindAddress: %w", err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		return nil, fmt.Errorf("healthzBindAddress: %w", err)
	}
	for _, c := range pod["containers"].([]any) {
		c := c.(map[string]any)
		if s.handOver {
			c["args"] = append(c["args"].([]any), handOver)
		}
		env, _ := c["env"].([]any)
		c["env"] = append(env, map[string]any{"name": "KUBERNETES_SERVICE_HOST", "value": s.Host},
			map[string]any{"name": "KUBERNETES_SERVICE_PORT", "value": strconv.Itoa(s.Port)})
		for _, probe := range []string{"startupProbe", "livenessProbe", "readinessProbe"} {
			get := in(c, probe, "httpGet")
			if get["port"] = number; loopback(host) { // By default the kubelet asks the node's address.
				get["host"] = host
			}
		}
	}
	return yaml.Marshal(ds)
}

// Cleanup returns the DaemonSet that removes everything from the nodes that neither nodeproxy nor kube-proxy serves; with onlyNFTables, only the
// tables of mode nftables, also where kube-proxy serves the node.
func (c *Cluster) Cleanup(image string, onlyNFTables bool) ([]byte, error) {
	ds, err := manifest("cleanup/daemonset.yaml")
	if err != nil {
		return nil, err
	}
	pod := podOf(ds)
	withImage(pod, image)
	selector := keepApart(pod, c.proxyLabel())
	// Nodes that kube-proxy leaves out may have the rules of one that no pod runs.
	node, err := c.nodeAffinity()
	if err != nil {
		return nil, err
	}
	withNodeAffinity(pod, node)
	if onlyNFTables {
		cleanup := pod["initContainers"].([]any)[0].(map[string]any)
		cleanup["args"] = append(cleanup["args"].([]any), "--nftables-only")
		selector["matchExpressions"].([]any)[0].(map[string]any)["values"] = []any{"nodeproxy"}
	}
	return yaml.Marshal(ds)
}

// in returns an object in another one, by the path to it.
func in(m map[string]any, path ...string) map[string]any {
	for _, name := range path {
		m = m[name].(map[string]any)
	}
	return m
}

// podOf returns the specification of the pods of a DaemonSet.
func podOf(ds map[string]any) map[string]any { return in(ds, "spec", "template", "spec") }

// keepApart has the scheduler recognise the pods of a proxy by a label, and returns the selector of the only term that keeps them apart.
func keepApart(pod map[string]any, label string) map[string]any {
	apart := in(pod, "affinity", "podAntiAffinity")[required].([]any)
	selector := in(apart[0].(map[string]any), "labelSelector")
	if _, is := selector["matchLabels"]; is {
		selector["matchLabels"] = map[string]any{label: "kube-proxy"}
		return selector
	}
	selector["matchExpressions"].([]any)[0].(map[string]any)["key"] = label
	return selector
}

// withNodeAffinity leaves out the nodes that kube-proxy leaves out. It needs no terms of nodeproxy's own, which each of its terms would have to have: the
// label of --migrate is in the nodeSelector, and a node has to meet both.
func withNodeAffinity(pod map[string]any, node any) {
	if node != nil {
		in(pod, "affinity")["nodeAffinity"] = node
	}
}

func withImage(pod map[string]any, image string) {
	if image == "" {
		return
	}
	for _, of := range []string{"initContainers", "containers"} {
		containers, _ := pod[of].([]any)
		for _, c := range containers {
			c.(map[string]any)["image"] = image
		}
	}
}

func manifest(name string) (map[string]any, error) {
	text, err := fs.ReadFile(deploy.Files, name)
	if err != nil {
		return nil, err
	}
	var out map[string]any
	err = yaml.Unmarshal(text, &out)
	return out, err
}
