package install

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"nodeproxy/config"
	"nodeproxy/source"
)

// Options are what a user says, which comes before what is found.
type Options struct {
	// APIServer is the address and port of the API server as nodes reach it.
	APIServer string
	// ClusterCIDR is the range of the pods' addresses, or NoCIDR.
	ClusterCIDR string
	// Mode is nodeproxy's; that of kube-proxy by default.
	Mode string
	// Image is nodeproxy's; that of the manifests by default.
	Image string
	// NoKernelModules leaves out the init container of mode ipvs, which loads kernel modules.
	NoKernelModules bool
	// Migrate has nodeproxy serve only the nodes with Label, and kube-proxy the others.
	Migrate bool
}

// NoCIDR says that pods shall not be told from other clients.
const NoCIDR = "none"

// Label tells, while a cluster is switched over, the nodes that nodeproxy serves from those of kube-proxy.
const (
	Label      = "service-proxy"
	labelOurs  = "nodeproxy"
	labelOther = "kube-proxy"
)

// Setup is how to install nodeproxy in a cluster.
type Setup struct {
	Options
	// Host and Port are where the API server is, for a node on which no Service works.
	Host string
	Port int
	// Config is the KubeProxyConfiguration.
	Config map[string]any

	label        string // by which the scheduler keeps pods of kube-proxy and nodeproxy apart
	nodeAffinity any    // that of kube-proxy; nil if it has none
	handOver     bool   // a DaemonSet runs kube-proxy in mode nftables
}

// Detect decides how nodeproxy takes the place of the cluster's kube-proxy. It says what it has found and where; the error has a line for
// each thing that is missing, with the flag that gives it.
func (c *Cluster) Detect(o Options, say func(format string, args ...any)) (*Setup, error) {
	s := &Setup{Options: o, label: c.proxyLabel()}
	kind, why := c.Kind()
	say("cluster: %s, %s", kind, why)
	for _, line := range c.howKubeProxyRuns(kind) {
		say("kube-proxy: %s", line)
	}
	known, err := c.configuration(s, say)
	if err == nil {
		err = c.localTraffic(s, kind, known, say)
	}
	if err == nil {
		s.nodeAffinity, err = c.nodeAffinity()
	}
	if kind == "Talos" && s.Config["mode"] == "ipvs" && !s.NoKernelModules {
		say("kernel modules: Talos lets no pod load them, so there is no init container for that; what its kernel does not have built in, the machine " +
			"configuration has to load (machine.kernel.modules)")
		s.NoKernelModules = true
	}
	if s.nodeAffinity != nil {
		text, _ := json.Marshal(s.nodeAffinity) // It has been read from JSON.
		say("node affinity: that of kube-proxy's DaemonSet: %s", text)
	}
	return s, errors.Join(c.apiServer(s, kind, say), err)
}

// Kind returns what made the cluster, and how that shows.
func (c *Cluster) Kind() (kind, why string) {
	for _, n := range c.nodes {
		version, where := n.Status.NodeInfo.KubeletVersion, "as Node "+n.Name+" says: "
		switch {
		case strings.Contains(version, "+k3s"):
			return "k3s", where + "kubelet " + version
		case strings.Contains(version, "+rke2"):
			return "RKE2", where + "kubelet " + version
		case strings.HasPrefix(n.Status.NodeInfo.OSImage, "Talos"):
			return "Talos", where + n.Status.NodeInfo.OSImage
		case strings.Contains(version, "-eks-"):
			return "EKS", where + "kubelet " + version
		case strings.Contains(version, "-gke."):
			return "GKE", where + "kubelet " + version
		case n.Labels["kubernetes.azure.com/cluster"] != "":
			return "AKS", where + "label kubernetes.azure.com/cluster"
		case n.Labels["minikube.k8s.io/name"] != "":
			return "minikube", where + "label minikube.k8s.io/name"
		case strings.HasPrefix(n.Spec.ProviderID, "kind://"):
			return "kind", where + "provider " + n.Spec.ProviderID
		}
	}
	if c.configMaps["kube-system/kubeadm-config"] != nil {
		return "kubeadm", "as ConfigMap kube-system/kubeadm-config is there"
	}
	return "of an unknown kind", fmt.Sprintf("as %d nodes and %d ConfigMaps show", len(c.nodes), len(c.configMaps))
}

// howKubeProxyRuns tells what runs kube-proxy, and what to know about switching it off.
func (c *Cluster) howKubeProxyRuns(kind string) []string {
	var out []string
	for _, d := range c.daemonSets {
		line := d.String()
		if d.Labels["addonmanager.kubernetes.io/mode"] == "Reconcile" {
			line += ", which the provider's add-on manager keeps as it is"
		}
		if slices.ContainsFunc(d.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == "eks" }) {
			line += ", which is an EKS add-on: an update of it undoes patches"
		}
		out = append(out, line)
	}
	static := 0
	for _, p := range c.pods {
		if isStatic(p) {
			static++
		}
	}
	if static > 0 {
		out = append(out, fmt.Sprintf("%d static pods, which only the node itself can end", static))
	}
	if kind == "k3s" && len(out) == 0 {
		line := "part of the k3s process: start all servers with --disable-kube-proxy"
		if slices.Contains(c.serverArgs("disable-kube-proxy"), "true") {
			line = "switched off by --disable-kube-proxy"
		}
		out = append(out, line)
	}
	if len(out) == 0 {
		out = append(out, "no DaemonSet and no static pod runs one")
	}
	return out
}

// isStatic reports whether a pod is the image of one that a kubelet runs from a file.
func isStatic(p *v1.Pod) bool {
	return slices.ContainsFunc(p.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Node" })
}

// serverArgs returns the values of a flag of k3s or RKE2 servers; none if no server is a Node, or has it.
func (c *Cluster) serverArgs(flag string) []string {
	for _, n := range c.nodes {
		if role, values := nodeArgs(n, flag); role == "server" && len(values) > 0 {
			return values
		}
	}
	return nil
}

// nodeArgs returns whether a Node is that of a k3s or RKE2 server or agent, and the values of a flag that this has been given on its command line or
// in its configuration file: both are in an annotation, where a flag and its value are two words.
func nodeArgs(n *v1.Node, flag string) (role string, values []string) {
	var args []string
	for _, name := range []string{"k3s.io/node-args", "rke2.io/node-args"} {
		if json.Unmarshal([]byte(n.Annotations[name]), &args) == nil && len(args) > 0 {
			role = args[0]
			break
		}
	}
	for _, f := range joined(args) {
		if name, value, given := strings.Cut(f, "="); name == "--"+flag {
			if !given {
				value = "true"
			}
			values = append(values, value)
		}
	}
	return role, values
}

// commandLine has the flags of a kube-proxy that no DaemonSet runs.
type commandLine struct {
	of    string
	flags []string
}

// commandLines returns those of static pods, or else those that k3s or RKE2 give their kube-proxies on each node, without the flags that are about one
// node or pod; none if nothing is known.
func (c *Cluster) commandLines() []commandLine {
	var out []commandLine
	add := func(of string, flags []string) {
		out = append(out, commandLine{of, slices.DeleteFunc(flags, func(f string) bool {
			name, _, _ := strings.Cut(strings.TrimPrefix(f, "--"), "=")
			return slices.Contains(podFlags, name)
		})})
	}
	for _, p := range c.pods {
		if container := proxyContainer(&p.Spec); container != nil && isStatic(p) {
			add(fmt.Sprintf("Pod %s/%s", p.Namespace, p.Name), flagsOf(container))
		}
	}
	if len(out) > 0 {
		return out
	}
	known := false
	for _, n := range c.nodes {
		role, flags := nodeArgs(n, "kube-proxy-arg")
		if role == "" {
			continue
		}
		for i := range flags {
			flags[i] = "--" + strings.TrimLeft(flags[i], "-")
		}
		known = known || len(flags) > 0
		add("Node "+n.Name+", --kube-proxy-arg", flags)
	}
	if !known {
		return nil
	}
	return out
}

// usual returns the command line that most of them have, or the first of those, and says how others differ: a DaemonSet can have only one configuration.
func usual(lines []commandLine, say func(string, ...any)) commandLine {
	key := func(l commandLine) string { return strings.Join(slices.Sorted(slices.Values(l.flags)), " ") }
	count := map[string]int{}
	for _, l := range lines {
		count[key(l)]++
	}
	most := lines[0]
	for _, l := range lines {
		if count[key(l)] > count[key(most)] {
			most = l
		}
	}
	if others := len(lines) - count[key(most)]; others > 0 {
		i := slices.IndexFunc(lines, func(l commandLine) bool { return key(l) != key(most) })
		say("configuration: %d of %d kube-proxies have other flags, which are not used, such as %s: %s",
			others, len(lines), lines[i].of, cmp.Or(strings.Join(lines[i].flags, " "), "none"))
	}
	return most
}

// KubeProxy returns the DaemonSet that runs kube-proxy; nil if there is none.
func (c *Cluster) kubeProxy() (*daemonSet, error) {
	switch len(c.daemonSets) {
	case 0:
		return nil, nil
	case 1:
		return c.daemonSets[0], nil
	}
	var names []string
	for _, d := range c.daemonSets {
		if d.Namespace == "kube-system" && d.Name == "kube-proxy" {
			return d, nil
		}
		names = append(names, d.String())
	}
	return nil, fmt.Errorf("several DaemonSets run a kube-proxy: %s", strings.Join(names, ", "))
}

// configuration makes nodeproxy's of kube-proxy's, if that is to be had: known tells.
func (c *Cluster) configuration(s *Setup, say func(string, ...any)) (known bool, err error) {
	d, err := c.kubeProxy()
	if err != nil {
		return false, err
	}
	text, where, known := "", "", false
	if d != nil && d.flag("config") != "" {
		if text, where, known = c.file(d, d.flag("config")); !known {
			return false, fmt.Errorf("kube-proxy's configuration: %s reads it from %s, which is in no ConfigMap that is given", d, d.flag("config"))
		}
	} else if d != nil {
		if text, err = fromFlags(d.flags(), say); err != nil {
			return false, err
		}
		where, known = "the flags of "+d.String(), true
	} else if lines := c.commandLines(); len(lines) > 0 {
		line := usual(lines, say)
		if kind, _ := c.Kind(); kind == "RKE2" {
			for i, f := range line.flags {
				if wide := rke2Health[f]; wide != "" {
					say("configuration: health is at %s, since the chart's probes would not reach RKE2's default (%s)", wide, f)
					line.flags[i] = "--healthz-bind-address=" + wide
				}
			}
		}
		if file := flagValue(line.flags, "config"); file != "" { // Of other flags, kube-proxy ignores most then.
			say("configuration: not that of kube-proxy, which is in the file %s of a node (%s)", file, line.of)
		} else if text, err = fromFlags(line.flags, say); err != nil {
			return false, err
		} else {
			where, known = "the flags of "+line.of, true
		}
	} else {
		for _, e := range [][2]string{{"kube-proxy", "config.conf"}, {"kube-proxy-config", "config"}} {
			if text, where, known = c.entry("kube-system", e[0], e[1]); known {
				break
			}
		}
	}
	s.Config = map[string]any{}
	if known {
		say("configuration: %s", where)
		if err := yaml.Unmarshal([]byte(text), &s.Config); err != nil {
			return true, fmt.Errorf("kube-proxy's configuration, %s: %w", where, err)
		}
		s.handOver = d != nil && s.Config["mode"] == "nftables"
	} else {
		say("configuration: none of kube-proxy is to be found; defaults are used")
	}
	return known, s.adapt(say)
}

// rke2Health has the addresses of health that take the place of RKE2's defaults: the chart's probes ask the node's address, and RKE2's users did not
// choose a loopback address.
var rke2Health = map[string]string{"--healthz-bind-address=127.0.0.1": "0.0.0.0", "--healthz-bind-address=::1": "::"}

// podFlags are flags of kube-proxy that are about a pod or node of its own.
var podFlags = []string{"kubeconfig", "master", "hostname-override", "v", "logtostderr", "oom-score-adj"}

// fromFlags makes a configuration of the flags of a kube-proxy without a file.
func fromFlags(given []string, say func(string, ...any)) (string, error) {
	var flags config.Flags
	fs := pflag.NewFlagSet("kube-proxy", pflag.ContinueOnError)
	flags.Add(fs)
	for _, f := range given {
		name, value, ok := strings.Cut(strings.TrimPrefix(f, "--"), "=")
		if slices.Contains(podFlags, name) {
			continue
		}
		if !ok {
			value = "true"
		}
		if fs.Lookup(name) == nil {
			say("configuration: kube-proxy's flag %s means nothing to nodeproxy", f)
		} else if err := fs.Set(name, value); err != nil {
			return "", fmt.Errorf("kube-proxy's flag %s: %w", f, err)
		}
	}
	effective, err := flags.Effective()
	if err != nil {
		return "", err
	}
	text, err := effective.YAML()
	return string(text), err
}

// adapt changes what means something else in nodeproxy's pod, and leaves out what says nothing.
func (s *Setup) adapt(say func(string, ...any)) error {
	m := s.Config
	v6 := false
	if bind, ok := m["bindAddress"].(string); ok {
		ip, err := netip.ParseAddr(bind)
		v6 = err == nil && ip.Is6()
	}
	delete(m, "winkernel") // for Windows
	delete(m, "hostnameOverride")
	if client, ok := m["clientConnection"].(map[string]any); ok {
		delete(client, "kubeconfig") // It is the pod's own ServiceAccount, at the address that is found.
	}
	prune(m)
	m["apiVersion"], m["kind"] = "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"
	if s.Mode != "" {
		m["mode"] = s.Mode
	}
	for field, value := range map[string]any{"mode": "iptables", "detectLocalMode": "ClusterCIDR", "oomScoreAdj": -997} {
		if m[field] == nil {
			m[field] = value
		}
	}
	if n, ok := m["oomScoreAdj"].(float64); ok && n < -997 {
		say("configuration: oomScoreAdj is -997 in place of %v, which takes a capability that nodeproxy does without", n)
		m["oomScoreAdj"] = -997
	}
	for field, defaults := range map[string][2]string{
		"healthzBindAddress": {"0.0.0.0:10256", "[::]:10256"}, "metricsBindAddress": {"127.0.0.1:10249", "[::1]:10249"},
	} {
		byDefault := defaults[0]
		if v6 {
			byDefault = defaults[1]
		}
		text, ok := m[field].(string)
		switch ip, err := netip.ParseAddr(text); {
		case !ok:
			m[field] = byDefault
		case err == nil: // without a port
			_, port, _ := net.SplitHostPort(byDefault)
			m[field] = net.JoinHostPort(ip.String(), port)
		}
	}
	mode, _ := m["mode"].(string)
	if !slices.Contains(config.Modes(), mode) {
		return fmt.Errorf("--mode: kube-proxy's mode is %q; choose one of %s", mode, strings.Join(config.Modes(), ", "))
	}
	say("mode: %s", mode)
	return nil
}

// prune takes out what a file has only because a program wrote it: null, empty text, empty lists and objects.
func prune(m map[string]any) {
	for name, value := range m {
		object, isObject := value.(map[string]any)
		list, isList := value.([]any)
		prune(object)
		if value == nil || value == "" || isObject && len(object) == 0 || isList && len(list) == 0 {
			delete(m, name)
		}
	}
}

// localTraffic sets how pods of the node are told from other clients.
func (c *Cluster) localTraffic(s *Setup, kind string, known bool, say func(string, ...any)) error {
	set := func(cidr, where string) error {
		for _, text := range strings.Split(cidr, ",") {
			if _, err := netip.ParsePrefix(strings.TrimSpace(text)); err != nil {
				return fmt.Errorf("--cluster-cidr: %s has %q: %w", where, cidr, err)
			}
		}
		s.Config["clusterCIDR"], s.Config["detectLocalMode"] = cidr, "ClusterCIDR"
		say("cluster CIDR: %s, from %s", cidr, where)
		return nil
	}
	mode, _ := s.Config["detectLocalMode"].(string)
	cidr, _ := s.Config["clusterCIDR"].(string)
	switch {
	case s.ClusterCIDR == NoCIDR:
		delete(s.Config, "clusterCIDR")
		s.Config["detectLocalMode"] = "ClusterCIDR"
		say("cluster CIDR: none, as --cluster-cidr says")
		return nil
	case s.ClusterCIDR != "":
		return set(s.ClusterCIDR, "--cluster-cidr")
	case mode != "ClusterCIDR":
		say("cluster CIDR: not needed, as detectLocalMode is %s", mode)
		return nil
	case cidr != "":
		return set(cidr, "kube-proxy's configuration")
	}
	kubeadm, where, err := c.kubeadm()
	if err != nil {
		return fmt.Errorf("--cluster-cidr: %s: %w", where, err)
	}
	if kubeadm.Networking.PodSubnet != "" {
		return set(kubeadm.Networking.PodSubnet, where)
	}
	if cidr := strings.Join(c.serverArgs("cluster-cidr"), ","); cidr != "" {
		return set(cidr, "the flags of "+kind+" servers")
	}
	if kind == "k3s" || kind == "RKE2" {
		byDefault := "10.42.0.0/16"
		if len(c.kubernetes) > 0 && c.kubernetes[0].Is6() {
			byDefault = "fd00:42::/56"
		}
		// A server that runs no kubelet has no Node which says its flags.
		if n, other := c.otherPodCIDR(netip.MustParsePrefix(byDefault)); n != nil {
			return fmt.Errorf("--cluster-cidr: the range of the pods' addresses is not to be found: no Node of a %s server says its --cluster-cidr, "+
				"and it is not the default, %s, as Node %s has %s", kind, byDefault, n.Name, other)
		}
		return set(byDefault, "the default of "+kind)
	}
	if c.podCIDRs != "" && len(c.nodes) > 0 && !slices.ContainsFunc(c.nodes, func(n *v1.Node) bool { return len(podCIDRs(n)) == 0 }) {
		s.Config["detectLocalMode"] = "NodeCIDR"
		say("cluster CIDR: not to be found; each node has a range of its own for its pods (Node, spec.podCIDRs), which %s uses, and so does nodeproxy "+
			"(detectLocalMode: NodeCIDR)", c.podCIDRs)
		return nil
	}
	if known {
		say("cluster CIDR: none, as for kube-proxy: connections to cluster IPs from outside the cluster are not masqueraded; --cluster-cidr sets one")
		return nil
	}
	return errors.New("--cluster-cidr: the range of the pods' addresses is not to be found: neither in kube-proxy's configuration, nor in kubeadm-config, " +
		"nor as podCIDRs of all Nodes that a CNI plugin is known to use; --cluster-cidr=" + NoCIDR + " does without")
}

// clusterConfiguration is what counts of kubeadm's.
type clusterConfiguration struct {
	Networking           struct{ PodSubnet string }
	ControlPlaneEndpoint string
}

// kubeadm returns kubeadm's configuration, which is empty if there is none, and where it is.
func (c *Cluster) kubeadm() (out clusterConfiguration, where string, err error) {
	text, where, _ := c.entry("kube-system", "kubeadm-config", "ClusterConfiguration")
	return out, where, yaml.Unmarshal([]byte(text), &out)
}

// podCIDRs are the ranges that the control plane has allocated to a Node.
func podCIDRs(n *v1.Node) []string {
	if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "" {
		return []string{n.Spec.PodCIDR}
	}
	return n.Spec.PodCIDRs
}

// otherPodCIDR returns a Node with one of its ranges that is not within another range; nil if there is none.
func (c *Cluster) otherPodCIDR(within netip.Prefix) (*v1.Node, string) {
	for _, n := range c.nodes {
		for _, text := range podCIDRs(n) {
			if p, err := netip.ParsePrefix(text); err == nil && (!within.Contains(p.Addr()) || p.Bits() < within.Bits()) {
				return n, text
			}
		}
	}
	return nil, ""
}

// apiServer finds the address of the API server that needs no Service to work.
func (c *Cluster) apiServer(s *Setup, kind string, say func(string, ...any)) error {
	type candidate struct {
		where, server string
		local         bool // It is on each node.
	}
	var all []candidate
	add := func(where, server string, local bool) { all = append(all, candidate{where, server, local}) }
	if s.APIServer != "" {
		add("--api-server", s.APIServer, true)
	}
	switch kind {
	case "k3s":
		add("k3s, which has it on each node", "127.0.0.1:6444", true)
	case "RKE2":
		add("RKE2, which has it on each node", "127.0.0.1:6443", true)
	case "Talos":
		add("Talos, whose KubePrism has it on each node unless it is switched off", "localhost:7445", true)
	}
	d, _ := c.kubeProxy()
	if d != nil {
		for _, name := range []string{d.flag("kubeconfig"), c.kubeconfigPath(d)} {
			if text, where, ok := c.file(d, name); ok && name != "" {
				add(where, serverOf(text), false)
			}
		}
		if server := d.flag("master"); server != "" {
			add("flag --master of "+d.String(), server, false)
		}
	}
	for _, e := range [][3]string{{"kube-system", "kube-proxy", "kubeconfig.conf"}, {"kube-system", "kube-proxy", "kubeconfig"},
		{"kube-public", "cluster-info", "kubeconfig"}} {
		if text, where, ok := c.entry(e[0], e[1], e[2]); ok {
			add(where, serverOf(text), false)
		}
	}
	if kubeadm, where, err := c.kubeadm(); err == nil && kubeadm.ControlPlaneEndpoint != "" {
		add(where, kubeadm.ControlPlaneEndpoint, false)
	}
	if c.Server != "" {
		add("the kubeconfig in use; nodes must reach this address too", c.Server, false)
	}
	for _, a := range all {
		host, port, err := c.usable(a.server, a.local)
		if err != nil {
			say("API server: not %q (%s): %v", a.server, a.where, err)
			if s.APIServer != "" {
				return fmt.Errorf("--api-server: %q: %w", a.server, err)
			}
			continue
		}
		if _, err := netip.ParseAddr(host); err == nil && len(c.kubernetes) == 0 {
			say("API server: the Service default/kubernetes is not given; make sure that %s is not its cluster IP, which works only once nodeproxy has programmed it", host)
		}
		s.Host, s.Port = host, port
		say("API server: %s, from %s", net.JoinHostPort(host, strconv.Itoa(port)), a.where)
		return nil
	}
	return errors.New("--api-server: the address of the API server is not to be found, and without it a node that starts has no rules: neither a kubeconfig " +
		"of kube-proxy, nor ConfigMap kube-public/cluster-info, nor kubeadm-config has one that nodes can use; give one that each node reaches " +
		"and that the API server's certificate names")
}

// kubeconfigPath is where the file of a kube-proxy's configuration says that the kubeconfig is.
func (c *Cluster) kubeconfigPath(d *daemonSet) string {
	text, _, _ := c.file(d, d.flag("config"))
	var file struct{ ClientConnection struct{ Kubeconfig string } }
	_ = yaml.Unmarshal([]byte(text), &file) // Where it is broken, that is reported as a fault of the configuration.
	return file.ClientConnection.Kubeconfig
}

// serverOf returns the server of a kubeconfig's current context, or of its only cluster; empty if there is none.
func serverOf(kubeconfig string) string {
	file, err := clientcmd.Load([]byte(kubeconfig))
	if err != nil {
		return ""
	}
	context := cmp.Or(file.Contexts[file.CurrentContext], &clientcmdapi.Context{})
	for name, cluster := range file.Clusters {
		if name == context.Cluster || len(file.Clusters) == 1 {
			return cluster.Server
		}
	}
	return ""
}

// usable returns host and port of a server, and an error if a node that has no rules, or another node, can't reach it.
func (c *Cluster) usable(server string, local bool) (string, int, error) {
	if server == "" {
		return "", 0, errors.New("there is no server in it")
	}
	if !strings.Contains(server, "://") {
		server = "https://" + server
	}
	u, err := url.Parse(server)
	if err != nil {
		return "", 0, err
	}
	host, port := u.Hostname(), 443
	if p := u.Port(); p != "" {
		if port, err = strconv.Atoi(p); err != nil || port < 1 || port > 65535 {
			return "", 0, fmt.Errorf("%q is no port", p)
		}
	}
	switch {
	case u.Scheme != "https":
		return "", 0, fmt.Errorf("nodeproxy's ServiceAccount needs https, not %s", u.Scheme)
	case host == "":
		return "", 0, errors.New("there is no host in it")
	case u.Path != "" && u.Path != "/":
		return "", 0, fmt.Errorf("a pod can be told an address and a port, but not the path %s", u.Path)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		switch {
		case slices.Contains(c.kubernetes, ip.Unmap()):
			return "", 0, errors.New("it is the cluster IP of the Service kubernetes, which works only once nodeproxy has programmed it")
		case ip.IsLoopback() && !local, ip.IsUnspecified():
			return "", 0, errors.New("on another node it is not the API server")
		}
		return host, port, nil
	}
	name := strings.TrimSuffix(strings.ToLower(host), ".")
	switch {
	case name == "kubernetes" || strings.HasPrefix(name, "kubernetes.default") || strings.HasSuffix(name, ".svc") || strings.Contains(name, ".svc."):
		return "", 0, errors.New("it is a name of cluster DNS, which works only once nodeproxy has programmed it")
	case name == "localhost" && !local:
		return "", 0, errors.New("on another node it is not the API server")
	}
	return host, port, nil
}

// Check returns what nodeproxy says of the configuration, or the error for which it would refuse it.
func (s *Setup) Check() ([]source.Finding, error) {
	text, err := yaml.Marshal(s.Config)
	if err != nil {
		return nil, err
	}
	cfg, err := config.Parse("configuration", text)
	if err != nil {
		return nil, fmt.Errorf("nodeproxy would refuse the configuration made of kube-proxy's: %w", err)
	}
	return cfg.Findings, nil
}
