// Package install finds out how kube-proxy is set up in a cluster, and makes what puts nodeproxy in its place: manifests or values of
// the chart, a patch that keeps kube-proxy off the nodes, and the one that undoes it. It changes nothing, and reads nothing itself.
package install

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

// Cluster is what is known of a cluster. Objects that say nothing about its kube-proxy or its API server are not kept.
type Cluster struct {
	// Server is the URL at which the API server was asked; empty if it was not.
	Server string

	configMaps map[string]*v1.ConfigMap // by namespace and name
	daemonSets []*daemonSet             // that run a kube-proxy on Linux
	pods       []*v1.Pod                // with a kube-proxy
	nodes      []*v1.Node
	kubernetes []netip.Addr // the cluster IPs of the Service default/kubernetes
	podCIDRs   string       // the DaemonSet of a CNI plugin that is known to use the Nodes' podCIDRs; empty if there is none
}

// daemonSet has the fields of a DaemonSet that count here. The affinity stays as it is written, with fields that this program does not know.
type daemonSet struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Template struct {
			metav1.ObjectMeta `json:"metadata"`
			Spec              v1.PodSpec `json:"spec"`
		} `json:"template"`
	} `json:"spec"`

	affinity any
}

func (d *daemonSet) String() string { return fmt.Sprintf("DaemonSet %s/%s", d.Namespace, d.Name) }

// Read adds the objects of a stream of YAML or JSON documents, such as the output of kubectl get.
func (c *Cluster) Read(in io.Reader) error {
	for docs := utilyaml.NewYAMLOrJSONDecoder(bufio.NewReader(in), 4096); ; {
		var raw json.RawMessage
		err := docs.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && len(bytes.TrimSpace(raw)) > 0 && string(raw) != "null" {
			err = c.Add(raw)
		}
		if err != nil {
			return err
		}
	}
}

// Add adds an object, or the objects of a list, in JSON. An item of a list may lack its kind, which is the list's then.
func (c *Cluster) Add(raw []byte) error { return c.add(raw, "") }

func (c *Cluster) add(raw []byte, kind string) error {
	var meta struct {
		Kind     string
		Metadata metav1.ObjectMeta
		Items    []json.RawMessage
	}
	if err := json.Unmarshal(raw, &meta); err != nil {
		return fmt.Errorf("this is no Kubernetes object: %w", err)
	}
	if meta.Kind == "" {
		meta.Kind = kind
	}
	if of, ok := strings.CutSuffix(meta.Kind, "List"); ok {
		for _, item := range meta.Items {
			if err := c.add(item, of); err != nil {
				return err
			}
		}
		return nil
	}
	object, known := map[string]any{
		"ConfigMap": &v1.ConfigMap{}, "DaemonSet": &daemonSet{}, "Pod": &v1.Pod{}, "Node": &v1.Node{}, "Service": &v1.Service{},
	}[meta.Kind]
	if !known {
		return nil
	}
	if err := json.Unmarshal(raw, object); err != nil {
		return fmt.Errorf("%s %s/%s: %w", meta.Kind, meta.Metadata.Namespace, meta.Metadata.Name, err)
	}
	switch o := object.(type) {
	case *v1.ConfigMap:
		if c.configMaps == nil {
			c.configMaps = map[string]*v1.ConfigMap{}
		}
		c.configMaps[o.Namespace+"/"+o.Name] = o
	case *daemonSet:
		return c.addDaemonSet(o, raw)
	case *v1.Pod:
		if isKubeProxy(o.Labels) && !forWindows(&o.Spec) {
			c.pods = append(c.pods, o)
		}
	case *v1.Node:
		if o.Labels["kubernetes.io/os"] != "windows" {
			c.nodes = append(c.nodes, o)
		}
	case *v1.Service:
		if o.Namespace == "default" && o.Name == "kubernetes" {
			for _, text := range append([]string{o.Spec.ClusterIP}, o.Spec.ClusterIPs...) {
				if ip, err := netip.ParseAddr(text); err == nil {
					c.kubernetes = append(c.kubernetes, ip)
				}
			}
		}
	}
	return nil
}

func (c *Cluster) addDaemonSet(o *daemonSet, raw []byte) error {
	pod := &o.Spec.Template.Spec
	if forWindows(pod) {
		return nil
	}
	if usesPodCIDRs(pod) {
		c.podCIDRs = o.String()
	}
	if o.container() == nil {
		return nil
	}
	var asWritten struct {
		Spec struct {
			Template struct{ Spec struct{ Affinity any } }
		}
	}
	err := json.Unmarshal(raw, &asWritten)
	o.affinity = asWritten.Spec.Template.Spec.Affinity
	c.daemonSets = append(c.daemonSets, o)
	return err
}

// forWindows reports whether a pod is one of Windows nodes.
func forWindows(pod *v1.PodSpec) bool {
	return pod.NodeSelector["kubernetes.io/os"] == "windows" || pod.OS != nil && pod.OS.Name == v1.Windows
}

// usesPodCIDRs reports whether a pod is that of a CNI plugin which gives pods the addresses of their Node's podCIDRs: kindnet, or flannel (Canal too) as
// long as it does not have its ranges in etcd. Nothing of that kind is known of others: Calico and Cilium have ranges of their own by default, and the
// Nodes' podCIDRs, which the control plane allocates all the same, say nothing then.
func usesPodCIDRs(pod *v1.PodSpec) bool {
	return slices.ContainsFunc(pod.Containers, func(c v1.Container) bool {
		return c.Name == "kindnet-cni" || slices.Contains(words(&c), "--kube-subnet-mgr")
	})
}

// proxyLabels are the names of the labels of which kube-proxy's pods have one at least, with the value kube-proxy.
var proxyLabels = []string{"k8s-app", "component"}

// proxyLabel returns the one that kube-proxy's pods have in the cluster, or would have.
func (c *Cluster) proxyLabel() string {
	var found []map[string]string
	for _, d := range c.daemonSets {
		found = append(found, d.Spec.Template.Labels)
	}
	for _, p := range c.pods {
		found = append(found, p.Labels)
	}
	for _, labels := range found {
		for _, name := range proxyLabels {
			if labels[name] == "kube-proxy" {
				return name
			}
		}
	}
	switch kind, _ := c.Kind(); kind {
	case "RKE2", "AKS", "GKE":
		return "component"
	}
	return "k8s-app"
}

// isKubeProxy reports whether the labels of a pod are those that kube-proxy's pods have.
func isKubeProxy(labels map[string]string) bool {
	return slices.ContainsFunc(proxyLabels, func(name string) bool { return labels[name] == "kube-proxy" })
}

func (d *daemonSet) container() *v1.Container { return proxyContainer(&d.Spec.Template.Spec) }

// proxyContainer returns the container of a pod that runs kube-proxy; nil if there is none.
func proxyContainer(pod *v1.PodSpec) *v1.Container {
	containers := pod.Containers
	i := slices.IndexFunc(containers, func(c v1.Container) bool {
		if c.Name == "kube-proxy" {
			return true
		}
		for _, word := range words(&c) {
			if path.Base(word) == "kube-proxy" {
				return true
			}
			if strings.HasPrefix(word, "-") { // What follows may be a file that has to do with kube-proxy, such as its log.
				return false
			}
		}
		return false
	})
	if i < 0 {
		return nil
	}
	return &containers[i]
}

// words are those of a container's command line. Where a shell runs kube-proxy, they are those that the shell gives it.
func words(c *v1.Container) []string {
	out := append(slices.Clone(c.Command), c.Args...)
	for _, script := range out {
		list := strings.Fields(strings.ReplaceAll(script, "\\\n", " "))
		i := 0
		for i < len(list) && (path.Base(list[i]) != "kube-proxy" || i > 0 && list[i-1] != "exec" && !strings.ContainsAny(list[i-1], ";&|")) {
			i++
		}
		if i == len(list) || len(list) == 1 {
			continue
		}
		list = list[i:]
		if end := slices.IndexFunc(list, func(word string) bool { return strings.ContainsAny(word, "<>|&;") }); end >= 0 {
			list = list[:end]
		}
		for i := range list {
			list[i] = strings.NewReplacer(`"`, "", "'", "").Replace(list[i])
		}
		return list
	}
	return out
}

func (d *daemonSet) flags() []string { return flagsOf(d.container()) }

// flagsOf are the flags of a kube-proxy's command line, in its order.
func flagsOf(c *v1.Container) []string { return joined(words(c)) }

// joined are the flags among some words, each as --name=value if it has a value.
func joined(words []string) []string {
	var out []string
	for i := 0; i < len(words); i++ {
		word := words[i]
		if !strings.HasPrefix(word, "-") {
			continue
		}
		word = "--" + strings.TrimLeft(word, "-")
		// What k3s passes to a component may begin with dashes itself, as in --kube-proxy-arg --proxy-mode=ipvs.
		if !strings.Contains(word, "=") && i+1 < len(words) && (!strings.HasPrefix(words[i+1], "-") || strings.HasSuffix(word, "-arg")) {
			i++
			word += "=" + words[i]
		}
		out = append(out, word)
	}
	return out
}

func (d *daemonSet) flag(name string) string { return flagValue(d.flags(), name) }

// flagValue is the value of the last flag of this name; empty if there is none.
func flagValue(flags []string, name string) string {
	value := ""
	for _, f := range flags {
		if v, ok := strings.CutPrefix(f, "--"+name+"="); ok {
			value = v
		}
	}
	return value
}

// file returns a file of the container that comes from a ConfigMap, and where it is.
func (c *Cluster) file(d *daemonSet, name string) (text, where string, ok bool) {
	for _, m := range d.container().VolumeMounts {
		rest, inside := strings.CutPrefix(path.Clean(name), path.Clean(m.MountPath)+"/")
		if !inside {
			continue
		}
		volumes := d.Spec.Template.Spec.Volumes
		i := slices.IndexFunc(volumes, func(v v1.Volume) bool { return v.Name == m.Name })
		if i < 0 || volumes[i].ConfigMap == nil {
			continue
		}
		source, key := volumes[i].ConfigMap, rest
		for _, item := range source.Items {
			if item.Path == rest {
				key = item.Key
			}
		}
		if text, where, ok := c.entry(d.Namespace, source.Name, key); ok {
			return text, where, true
		}
	}
	return "", "", false
}

// entry returns an entry of a ConfigMap, and where it is.
func (c *Cluster) entry(namespace, name, key string) (text, where string, ok bool) {
	if m := c.configMaps[namespace+"/"+name]; m != nil {
		text, ok = m.Data[key]
	}
	return text, fmt.Sprintf("%s of ConfigMap %s/%s", key, namespace, name), ok
}
