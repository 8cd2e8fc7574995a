package manifest

import (
	"strings"
	"testing"

	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/source/controlplane"
)

func serviceCIDR(cidrs string) string {
	return "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\nspec: {cidrs: " + cidrs + "}\n"
}

// bystander is an object that must come through, whatever stands beside it.
const bystander = "---\napiVersion: v1\nkind: Service\nmetadata: {name: bystander}\nspec: {ports: [{port: 80}]}\n"

// onePort is the ports of a Service in which something else is wrong.
var onePort = []string{"ports:", "- port: 80"}

// faults are manifests with a fault each.
var faults = map[string]struct {
	manifest string
	want     string // the beginning of the finding
	used     bool   // the object is used all the same
}{
	"indentation": {service("web", "ports:", "- port: 80", " targetPort: 80"),
		"m.yaml:8: Service default/web: broken YAML: ", false},
	"tab": {service("web", "\tports: []"),
		"m.yaml:6: Service default/web: broken YAML: found character that cannot start", false},
	"open bracket": {service("web", "ports: [{port: 80}"),
		"m.yaml:6: Service default/web: broken YAML: did not find expected ',' or ']'", false},
	"open quote": {service(`"web`, onePort...), "m.yaml:4: broken YAML: ", false},
	"control":    {service("we\x01b", onePort...), `m.yaml:4: character '\x01' is not allowed`, false},
	"no anchor":  {service("*web", onePort...), "m.yaml:4: broken YAML: unknown anchor 'web'", false},
	"own anchor": {"apiVersion: v1\nkind: Service\nmetadata: &m\n  name: web\n  labels: *m\n",
		"m.yaml:3: ", false},
	"no separator": {service("web", onePort...) + "\n# another\n" + service("api", onePort...),
		`m.yaml:10: a second "apiVersion" in one object: two objects need a line "---" between them, or in a List a "- " before each`, false},
	"no separator, kind first": {"kind: Service\nmetadata: {name: a}\napiVersion: v1\nkind: Service\nmetadata: {name: b}\napiVersion: v1\n",
		`m.yaml:4: a second "kind" in one object: two objects need a line "---" between them, or in a List a "- " before each`, false},
	"no separator, in a List": {"apiVersion: v1\nkind: List\nitems:\n- kind: Service\n  apiVersion: v1\n  kind: Service\n",
		`m.yaml:6: a second "kind" in one object: two objects need a line "---" between them, or in a List a "- " before each`, false},
	"items twice, in a List": {"apiVersion: v1\nkind: List\nitems:\n- kind: Service\nitems:\n- kind: Service\n",
		"m.yaml:5: List: items: the field is given more than once", false},
	"name twice": {service("web\n  name: api", onePort...), "m.yaml:5: Service: metadata.name: the field is given more than once", false},
	"label twice": {service("web\n  labels:\n    a: x\n    a: y", onePort...),
		"m.yaml:7: Service default/web: metadata.labels.a: the field is given more than once", false},
	"no mapping":    {"- a\n- b\n", "m.yaml:1: a document must be one object", false},
	"a word":        {"hello\n", "m.yaml:1: a document must be one object", false},
	"nothing known": {"# comment\nfoo: bar\n", "m.yaml:2: kind: neither apiVersion nor kind", false},
	"no kind":       {"apiVersion: v1\nmetadata:\n  name: web\n", "m.yaml:1: web: kind: no kind is given", false},
	"no apiVersion": {"kind: Service\nmetadata:\n  name: web\n",
		"m.yaml:1: Service default/web: apiVersion: no apiVersion", false},
	"unknown kind": {"apiVersion: v1\nkind: Servcie\nmetadata:\n  name: web\n",
		`m.yaml:2: Servcie web: kind: v1 has no kind "Servcie"`, false},
	"wrong version": {"kind: Service\napiVersion: v2\nmetadata:\n  name: web\n",
		`m.yaml:2: Service default/web: apiVersion: "v2" has no kind Service`, false},
	"old version": {"apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata:\n  name: web\n",
		"m.yaml:1: EndpointSlice default/web: apiVersion: ", false},

	"word for number": {service("web", "ports:", "- port: eighty"),
		`m.yaml:7: Service default/web: spec.ports[0].port: must be a whole number of 32 bits, not "eighty"`, false},
	"second of a list": {service("web", "ports:", "- port: 80", "- port: 81", "  nodePort: x"),
		"m.yaml:9: Service default/web: spec.ports[1].nodePort: must be a whole number", false},
	"map for list": {service("web", "ports:", "  port: 80"),
		"m.yaml:6: Service default/web: spec.ports: must be a list, not {\"port\":80}", false},
	"number for text": {service("web\n  annotations:\n    a: 60", onePort...),
		"m.yaml:6: Service default/web: metadata.annotations.a: must be a string (quote it), not 60", false},
	"bool for text": {service("web\n  annotations:\n    a: yes", onePort...),
		"m.yaml:6: Service default/web: metadata.annotations.a: must be a string (quote it), not true", false},
	"bad time": {service("web\n  creationTimestamp: yesterday", onePort...),
		"m.yaml:5: Service default/web: metadata.creationTimestamp: can't be read: ", false},
	"bad target": {service("web", "ports:", "- port: 80", "  targetPort: {}"),
		"m.yaml:8: Service default/web: spec.ports[0].targetPort: ", false},
	"unknown field": {service("web", "prots: []", "ports:", "- port: 80"),
		"m.yaml:6: Service default/web: spec.prots: unknown field; the field is ignored", true},
	"nested unknown": {service("web", "ports:", "- port: 80", "  prot: TCP"),
		"m.yaml:8: Service default/web: spec.ports[0].prot: unknown field", true},
	"twice": {service("web", "type: NodePort", "type: ClusterIP", "ports:", "- port: 80"),
		"m.yaml:7: Service default/web: spec.type: the field is given more than once; the Service is not proxied until this is corrected; all other objects are used", false},

	"no name": {service("", onePort...), "m.yaml:4: Service: metadata.name: required", false},
	"generated name": {"apiVersion: v1\nkind: Service\nmetadata:\n  generateName: web-\nspec:\n  ports: [{port: 80}]\n",
		"m.yaml:3: Service: metadata.name: required; generateName", false},
	"long name":     {service(strings.Repeat("a", 300), onePort...), `m.yaml:4: Service "default/aaa`, false},
	"64 characters": {service(strings.Repeat("a", 64), onePort...), "m.yaml:4: Service default/aaa", false},
	"digit first": {service("1web", onePort...),
		`m.yaml:4: Service default/1web: metadata.name: "1web": a DNS-1035 label`, false},
	"injection": {service(`"a\n-A KUBE-SERVICES -j ACCEPT"`, onePort...),
		`m.yaml:4: Service "default/a\n-A KUBE-SERVICES -j ACCEPT": metadata.name: `, false},
	"injected port": {service("web", "ports:", "- port: 80", "  name: 'x\" -j DROP'"),
		`m.yaml:8: Service default/web: spec.ports[0].name: "x\" -j DROP"`, false},
	"bad namespace": {service("web\n  namespace: a.b", onePort...),
		`m.yaml:5: Service a.b/web: metadata.namespace: "a.b"`, false},
	"bad annotation": {service("web\n  annotations:\n    a/b/c: x", onePort...),
		"m.yaml:6: Service default/web: metadata.annotations[a/b/c]: \"a/b/c\" is not a valid key", true},
	"bad label": {service("web\n  labels:\n    a: 'x y'", onePort...),
		`m.yaml:6: Service default/web: metadata.labels[a]: "x y" is not a valid label value`, true},
	"no range":     {serviceCIDR("[]"), "m.yaml:4: ServiceCIDR a: spec.cidrs: 0 ranges; a ServiceCIDR has one, or one of each family", false},
	"bad range":    {serviceCIDR("[10.96.0.0]"), `m.yaml:4: ServiceCIDR a: spec.cidrs[0]: "10.96.0.0" is not a CIDR`, false},
	"mapped range": {serviceCIDR("['::ffff:10.96.0.0/112']"), `m.yaml:4: ServiceCIDR a: spec.cidrs[0]: "::ffff:10.96.0.0/112" is not a CIDR`, false},
	"unmasked range": {serviceCIDR("[10.96.0.1/16]"),
		"m.yaml:4: ServiceCIDR a: spec.cidrs[0]: 10.96.0.1/16 has host bits set; the range is 10.96.0.0/16", false},
	"two of a family": {serviceCIDR("[10.96.0.0/16, 10.97.0.0/16]"),
		"m.yaml:4: ServiceCIDR a: spec.cidrs[1]: 10.97.0.0/16 is the second range of its family", false},
	"old ServiceCIDR": {strings.Replace(serviceCIDR("[10.96.0.0/16]"), "/v1", "/v1beta1", 1),
		`m.yaml:1: ServiceCIDR a: apiVersion: "networking.k8s.io/v1beta1" has no kind ServiceCIDR; it is read in networking.k8s.io/v1`, false},
	"no ports": {service("web", "type: ClusterIP"),
		"m.yaml:5: Service default/web: spec.ports: required", false},
	"port 0": {service("web", "ports:", "- port: 0"),
		"m.yaml:7: Service default/web: spec.ports[0].port: 0 is not within 1-65535", false},
	"port 65536": {service("web", "ports:", "- port: 65536"),
		"m.yaml:7: Service default/web: spec.ports[0].port: 65536 is not within", false},
	"targetPort 70000": {service("web", "ports:", "- port: 80", "  targetPort: 70000"),
		"m.yaml:8: Service default/web: spec.ports[0].targetPort: 70000", false},
	"targetPort name": {service("web", "ports:", "- port: 80", "  targetPort: a_b"),
		`m.yaml:8: Service default/web: spec.ports[0].targetPort: "a_b"`, false},
	"protocol": {service("web", "ports:", "- port: 80", "  protocol: HTTP"),
		`m.yaml:8: Service default/web: spec.ports[0].protocol: "HTTP" is not one of TCP, UDP, SCTP`, false},
	"same port": {service("web", "ports:", "- {name: a, port: 80}", "- {name: b, port: 80}"),
		"m.yaml:8: Service default/web: spec.ports[1].port: 80/TCP is the port of spec.ports[0] too", false},
	"same name": {service("web", "ports:", "- {name: a, port: 80}", "- {name: a, port: 81}"),
		`m.yaml:8: Service default/web: spec.ports[1].name: "a" is the name of spec.ports[0] too`, false},
	"name missing": {service("web", "ports:", "- {name: a, port: 80}", "- {port: 81}"),
		"m.yaml:8: Service default/web: spec.ports[1].name: required", false},
	"same node port": {service("web", "type: NodePort", "ports:", "- {name: a, port: 80, nodePort: 30001}", "- {name: b, port: 81, nodePort: 30001}"),
		"m.yaml:9: Service default/web: spec.ports[1].nodePort: 30001/TCP is the node port of spec.ports[0] too", false},
	"idle node port": {service("web", "ports:", "- {port: 80, nodePort: 30001}"),
		"m.yaml:7: Service default/web: spec.ports[0].nodePort: may not be set where spec.type is ClusterIP", false},
	"node port range": {service("web", "type: NodePort", "ports:", "- {port: 80, nodePort: 80}"),
		"m.yaml:8: Service default/web: spec.ports[0].nodePort: 80 is not within the range of node ports, 30000-32767", false},
	"type": {service("web", "type: Nodeport", "ports: [{port: 80}]"),
		`m.yaml:6: Service default/web: spec.type: "Nodeport" is not one of`, false},
	"clusterIP": {service("web", "clusterIP: 10.96.0.999", "ports: [{port: 80}]"),
		`m.yaml:6: Service default/web: spec.clusterIP: "10.96.0.999" is not an IP address`, false},
	"clusterIPs": {service("web", "clusterIP: 10.96.0.9", "clusterIPs: [10.96.0.8]", "ports: [{port: 80}]"),
		"m.yaml:7: Service default/web: spec.clusterIPs: the first value must be", false},
	"loopback": {service("web", "clusterIP: 127.0.0.1", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.clusterIP: 127.0.0.1 is a loopback address", false},
	"elsewhere": {service("web", "clusterIP: 10.0.0.9", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.clusterIP: 10.0.0.9 is outside the service CIDR 10.96.0.0/16; it is used as given", true},
	"headless nodeport": {service("web", "type: NodePort", "clusterIP: None", "ports: [{port: 80}]"),
		"m.yaml:7: Service default/web: spec.clusterIP: may not be None where", false},
	"families": {service("web", "ipFamilies: [IPv4, IPv4]", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.ipFamilies[1]: IPv4 is given twice", false},
	"two families": {service("web", "ipFamilies: [IPv4, IPv6]", "ports: [{port: 80}]"),
		"m.yaml:5: Service default/web: spec.ipFamilyPolicy: must be PreferDualStack", false},
	"no such family": {service("web", "ipFamilies: [IPv6]", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.ipFamilies: there is no service CIDR for IPv6", false},
	"dual stack": {service("web", "ipFamilyPolicy: RequireDualStack", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.ipFamilyPolicy: RequireDualStack, but there is no service CIDR for IPv6", false},
	"external IP": {service("web", "externalIPs: [1.2.3]", "ports: [{port: 80}]"),
		`m.yaml:6: Service default/web: spec.externalIPs[0]: "1.2.3" is not an IP address`, false},
	"external loopback": {service("web", "externalIPs: [127.0.0.2]", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.externalIPs[0]: 127.0.0.2 is a loopback address", false},
	"affinity": {service("web", "sessionAffinity: Client", "ports: [{port: 80}]"),
		`m.yaml:6: Service default/web: spec.sessionAffinity: "Client" is not one of`, false},
	"affinity 0": {service("web", "sessionAffinity: ClientIP", "sessionAffinityConfig:", "  clientIP:", "    timeoutSeconds: 0", "ports: [{port: 80}]"),
		"m.yaml:9: Service default/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not within 1-86400", false},
	"affinity 2 days": {service("web", "sessionAffinity: ClientIP", "sessionAffinityConfig:", "  clientIP:", "    timeoutSeconds: 172800", "ports: [{port: 80}]"),
		"m.yaml:9: Service default/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 172800", false},
	"internal policy": {service("web", "internalTrafficPolicy: local", "ports: [{port: 80}]"),
		`m.yaml:6: Service default/web: spec.internalTrafficPolicy: "local" is not one of Cluster, Local`, false},
	"external policy": {service("web", "type: NodePort", "externalTrafficPolicy: Node", "ports: [{port: 80}]"),
		`m.yaml:7: Service default/web: spec.externalTrafficPolicy: "Node" is not one of`, false},
	"idle policy": {service("web", "externalTrafficPolicy: Local", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.externalTrafficPolicy: may be set only where", false},
	"distribution": {service("web", "trafficDistribution: Near", "ports: [{port: 80}]"),
		`m.yaml:6: Service default/web: spec.trafficDistribution: "Near" is not one of`, false},
	"source range": {service("web", "type: LoadBalancer", "loadBalancerSourceRanges:", "- 10.0.0.0/8", "- 10.0.0.0/33", "ports: [{port: 80}]"),
		`m.yaml:9: Service default/web: spec.loadBalancerSourceRanges[1]: "10.0.0.0/33" is not a CIDR`, false},
	"idle ranges": {service("web", "loadBalancerSourceRanges: [10.0.0.0/8]", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.loadBalancerSourceRanges: may be set only", false},
	"health port": {service("web", "healthCheckNodePort: 30001", "ports: [{port: 80}]"),
		"m.yaml:6: Service default/web: spec.healthCheckNodePort: may be set only", false},
	"ingress IP": {service("web", "type: LoadBalancer", "ports: [{port: 80}]") + "status:\n  loadBalancer:\n    ingress:\n    - ip: x\n",
		`m.yaml:11: Service default/web: status.loadBalancer.ingress[0].ip: "x" is not an IP address`, false},
	"ipMode": {service("web", "type: LoadBalancer", "ports: [{port: 80}]") + "status:\n  loadBalancer:\n    ingress:\n    - ip: 1.2.3.4\n      ipMode: Vip\n",
		`m.yaml:12: Service default/web: status.loadBalancer.ingress[0].ipMode: "Vip" is not one of VIP, Proxy`, false},

	"address type": {slice("s", "web", "ipv4"),
		`m.yaml:7: EndpointSlice default/s: addressType: "ipv4" is not one of IPv4, IPv6, FQDN`, false},
	"no address type": {"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s}\n",
		"m.yaml:1: EndpointSlice default/s: addressType: required", false},
	"slice loopback": {slice("s", "web", "IPv4", "endpoints:", "- addresses: [10.0.0.1]", "- addresses: [127.0.0.1]"),
		"m.yaml:10: EndpointSlice default/s: endpoints[1].addresses[0]: 127.0.0.1 is a loopback address", false},
	"slice link-local": {slice("s", "web", "IPv6", "endpoints:", "- addresses: ['fe80::1']"),
		"m.yaml:9: EndpointSlice default/s: endpoints[0].addresses[0]: fe80::1 is a link-local address", false},
	"slice multicast": {slice("s", "web", "IPv4", "endpoints:", "- addresses: [224.0.0.1]"),
		"m.yaml:9: EndpointSlice default/s: endpoints[0].addresses[0]: 224.0.0.1 is a multicast address", false},
	"slice zero": {slice("s", "web", "IPv4", "endpoints:", "- addresses: [0.0.0.0]"),
		"m.yaml:9: EndpointSlice default/s: endpoints[0].addresses[0]: 0.0.0.0 is the unspecified address", false},
	"slice family": {slice("s", "web", "IPv4", "endpoints:", "- addresses: ['fd00::1']"),
		"m.yaml:9: EndpointSlice default/s: endpoints[0].addresses[0]: fd00::1 is not an IPv4 address", false},
	"slice address": {slice("s", "web", "IPv4", "endpoints:", "- addresses: []"),
		"m.yaml:9: EndpointSlice default/s: endpoints[0].addresses: 0 addresses", false},
	"slice port": {slice("s", "web", "IPv4", "ports:", "- port: 0"),
		"m.yaml:9: EndpointSlice default/s: ports[0].port: 0 is not within", false},
	"slice names": {slice("s", "web", "IPv4", "ports:", "- {name: a, port: 1}", "- {name: a, port: 2}"),
		`m.yaml:10: EndpointSlice default/s: ports[1].name: "a" is the name of ports[0] too`, false},
	"slice headless": {slice("s", "web\n    service.kubernetes.io/headless: ''", "IPv4"),
		"m.yaml:7: EndpointSlice default/s: metadata.labels[service.kubernetes.io/headless]: the slice belongs to a headless Service; not proxied", false},
	"slice FQDN": {slice("s", "web", "FQDN", "endpoints:", "- addresses: [a.example.com]"),
		"m.yaml:7: EndpointSlice default/s: addressType: a proxy can't forward to names; not proxied", false},
	"endpoints": {"apiVersion: v1\nkind: Endpoints\nmetadata: {name: e}\nsubsets:\n- addresses:\n  - ip: 127.1.1.1\n  ports:\n  - port: 80\n",
		"m.yaml:6: Endpoints default/e: subsets[0].addresses[0].ip: 127.1.1.1 is a loopback address", false},
	"pod IP": {"apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nstatus:\n  podIP: 10.0.0.300\n",
		`m.yaml:5: Pod default/p: status.podIP: "10.0.0.300" is not an IP address`, false},
	"list in list": {"apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n  items:\n  - {}\n",
		"m.yaml:6: List: items: a List within a List", false},
	"proxy name": {service("web\n  labels:\n    service.kubernetes.io/service-proxy-name: other", onePort...),
		`m.yaml:6: Service default/web: metadata.labels[service.kubernetes.io/service-proxy-name]: the label gives the Service to the proxy "other"; not proxied`, false},
}

// TestFaults holds that each fault is reported with its line, object and field, and that nothing else suffers from it.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, test := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, f := load(t, test.manifest+bystander)
			found := false
			for _, x := range f {
				found = found || strings.HasPrefix(x.String(), test.want) && x.Effect != ""
			}
			if !found {
				t.Errorf("want %s\ngot %s", test.want, f)
			}
			text := describe(b)
			if !strings.Contains(text, "default/bystander") {
				t.Errorf("the bystander is gone:\n%s", f)
			}
			if used := strings.Contains(text, "default/web"); used != test.used {
				t.Errorf("used: %v\n%s\n%s", used, text, f)
			}
		})
	}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	b, f := loadFiles(t, map[string]string{
		"stream.json": `{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"ports":[{"port":80}],"clusterIP":"10.96.0.2"}}
{"apiVersion":"v1","kind":"Service","metadata":{"name":"b"},"spec":{"ports":[{"port":"x"}]}}`,
		"list.json": "{\"apiVersion\":\"v1\",\"kind\":\"List\",\"metadata\":{},\"items\":[\n" +
			"{\"apiVersion\":\"v1\",\"kind\":\"Service\",\"metadata\":{\"name\":\"c\"},\n\"spec\":{\"ports\":[{\"port\":0}]}},\n" +
			"{\"apiVersion\":\"v1\",\"kind\":\"Service\",\"metadata\":{\"name\":\"d\"},\n\"spec\":{\"clusterIP\":\"10.96.0.3\",\"ports\":[{\"port\":80,\n\"x\":1}]}}]}",
		"typed.json":  `{"kind":"ServiceList","apiVersion":"v1","items":[{"metadata":{"name":"e"},"spec":{"clusterIP":"10.96.0.4","ports":[{"port":80}]}}]}`,
		"broken.json": "{\"apiVersion\":\"v1\",\n\"kind\":\"Service\",\n\"metadata\":{\"name\":\"g\"},\n\"spec\":{\"ports\":[{\"port\":80}\n,]}}",
		"short.json":  "{\"apiVersion\":\"v1\",\n\"kind\":\"Service\",\"metadata\":",
		"flow.yaml":   `{apiVersion: v1, kind: Service, metadata: {name: h}, spec: {clusterIP: 10.96.0.5, ports: [{port: 80}]}}`,
		"json.yaml":   `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "i"}, "spec": {"clusterIP": "10.96.0.6", "ports": [{"port": 80}]}}`,
		"empty.json":  "", "comments.yaml": "# nothing\n---\n# at all\n", "notes.txt": "kind: Service\n", ".hidden.yaml": "kind: Service\n",
	})
	same(t, "objects", describe(b), `
svc default/a ClusterIP 10.96.0.2 :80/TCP->80
svc default/d ClusterIP 10.96.0.3 :80/TCP->80
svc default/e ClusterIP 10.96.0.4 :80/TCP->80
svc default/h ClusterIP 10.96.0.5 :80/TCP->80
svc default/i ClusterIP 10.96.0.6 :80/TCP->80`)
	var problems findings
	for _, x := range f {
		if x.Severity == source.Problem {
			x.Effect = ""
			problems = append(problems, x)
		}
	}
	same(t, "problems", problems.String(), `
problem: broken.json:5: Service default/g: broken JSON: invalid character ']' looking for beginning of value
problem: list.json:3: Service default/c: spec.ports[0].port: 0 is not within 1-65535
problem: list.json:6: Service default/d: spec.ports[0].x: unknown field
problem: short.json:2: broken JSON: unexpected end of JSON input
problem: stream.json:2: Service default/b: spec.ports[0].port: must be a whole number of 32 bits, not "x"`)
}

// TestYAML holds that the many ways to write the same thing in YAML are understood.
func TestYAML(t *testing.T) {
	t.Parallel()
	b, f := loadFiles(t, map[string]string{
		"bom.yaml":  "\ufeff---\r\napiVersion: v1\r\nkind: Service\r\nmetadata:\r\n  name: a\r\nspec:\r\n  clusterIP: 10.96.0.2\r\n  ports:\r\n  - port: 0x50\r\n---\r\n",
		"doc.yaml":  "%YAML 1.2\n--- # first\n" + service("b", "clusterIP: 10.96.0.3", "ports: [{port: 80}]") + "...\n# end\n--- {apiVersion: v1, kind: Service, metadata: {name: c}, spec: {clusterIP: 10.96.0.4, ports: [{port: 80}]}}\n",
		"text.yaml": "apiVersion: v1\nkind: Service\nmetadata:\n  name: d\n  annotations:\n    text: |\n      a\n      --- not a marker\n      b\nspec: {clusterIP: 10.96.0.5, publishNotReadyAddresses: yes, ports: [{port: 80}]}\n",
		"merge.yml": "apiVersion: v1\nkind: List\nitems:\n- &base\n  apiVersion: v1\n  kind: Service\n  metadata: {name: e}\n  spec: &spec {clusterIP: 10.96.0.6, ports: [{port: 80}]}\n- <<: *base\n  metadata: {name: f}\n  spec:\n    <<: *spec\n    clusterIP: 10.96.0.7\n",
		"sub/x.yml": service("g", "clusterIP: 010.096.000.008", "ports: [{port: 80}]"),
	})
	for _, x := range f {
		if x.Severity == source.Problem {
			t.Error(x)
		}
	}
	same(t, "objects", describe(b), `
svc default/a ClusterIP 10.96.0.2 :80/TCP->80
svc default/b ClusterIP 10.96.0.3 :80/TCP->80
svc default/c ClusterIP 10.96.0.4 :80/TCP->80
svc default/d ClusterIP 10.96.0.5 :80/TCP->80
svc default/e ClusterIP 10.96.0.6 :80/TCP->80
svc default/f ClusterIP 10.96.0.7 :80/TCP->80
svc default/g ClusterIP 010.096.000.008 :80/TCP->80`)
}

func TestOtherKinds(t *testing.T) {
	t.Parallel()
	_, f := load(t, `apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: a}
spec: {rules: 1}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: b, namespace: x}
---
apiVersion: example.com/v1
kind: Widget
metadata: {name: c}
`)
	for i := range f {
		f[i].Detail = ""
	}
	same(t, "findings", f.String(), `
note: m.yaml:1: Ingress a: ; not proxied
note: m.yaml:6: ConfigMap x/b: ; not proxied
note: m.yaml:10: Widget c: ; not proxied`)
}

func TestServiceCIDR(t *testing.T) {
	t.Parallel()
	b, f := load(t, serviceCIDR("[10.98.0.0/16, 'fd00:98::/112']")+"---\n"+service("web", "clusterIP: 10.96.0.2", "ports: [{port: 80}]"))
	same(t, "objects", describe(b), "cidr a [10.98.0.0/16 fd00:98::/112]\nsvc default/web ClusterIP 10.96.0.2 :80/TCP->80")
	for _, finding := range f {
		if strings.Contains(finding.Object, "ServiceCIDR") {
			t.Errorf("reported: %s", finding)
		}
	}
}

func TestDuplicates(t *testing.T) {
	t.Parallel()
	b, f := loadFiles(t, map[string]string{
		"b.yaml": service("web", "clusterIP: 10.96.0.2", "ports: [{port: 80}]"),
		"a.yaml": "# one\n" + service("web", "clusterIP: 10.96.0.3", "ports: [{port: 80}]"),
		"c.yaml": service("web", "clusterIP: 10.96.0.4", "ports: [{port: 80}]"),
	})
	same(t, "objects", describe(b), "svc default/web ClusterIP 10.96.0.3 :80/TCP->80")
	for _, want := range []string{"problem: b.yaml:4: Service default/web: metadata.name: the same object is defined at a.yaml:5; ",
		"problem: c.yaml:4: Service default/web: metadata.name: the same object is defined at a.yaml:5; "} {
		if !strings.Contains(f.String(), want) {
			t.Errorf("want %s\ngot %s", want, f)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{
		{},
		{Path: "x", Ranges: controlplane.Ranges{ServiceCIDRs: prefixes("10.0.0.0/8", "10.96.0.0/16")}},
		{Path: "x", Ranges: controlplane.Ranges{ServiceCIDRs: prefixes("10.0.0.0/8", "fd00::/112", "fd01::/112")}},
		{Path: "x", Ranges: controlplane.Ranges{NodePorts: plan.PortRange{First: 2, Last: 1}}},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v is accepted", cfg)
		}
	}
	if _, err := Load(Config{Path: "/does/not/exist"}); err == nil {
		t.Error("a path that does not exist is loaded")
	}
}
