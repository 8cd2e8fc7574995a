package controlplane

import (
	"fmt"
	"strings"
	"testing"
)

func TestPodSlices(t *testing.T) {
	t.Parallel()
	web := service("web", "clusterIP: 10.96.0.2", webSelector, "ports: [{port: 80, targetPort: 8080}]")
	const svc = "svc default/web ClusterIP 10.96.0.2 :80/TCP->8080"
	for name, test := range map[string]struct{ manifest, want, finding string }{
		"ready": {web + pod("a", "10.0.0.1") + pod("b", "10.0.0.2"), "slice default/web IPv4 :8080/TCP 10.0.0.1,r,s on node-a 10.0.0.2,r,s on node-a\n" + svc, ""},
		"not ready": {web + strings.Replace(pod("a", "10.0.0.1"), `"True"`, `"False"`, 1),
			"slice default/web IPv4 :8080/TCP 10.0.0.1 on node-a\n" + svc, ""},
		"no condition": {web + strings.Replace(pod("a", "10.0.0.1"), "type: Ready", "type: Initialized", 1),
			"slice default/web IPv4 :8080/TCP 10.0.0.1 on node-a\n" + svc, ""},
		"terminating": {web + strings.Replace(pod("a", "10.0.0.1"), "{name: a,", `{name: a, deletionTimestamp: "2026-01-01T00:00:00Z",`, 1),
			"slice default/web IPv4 :8080/TCP 10.0.0.1,s,t on node-a\n" + svc, ""},
		"ended":   {web + strings.Replace(pod("a", "10.0.0.1"), "Running", "Succeeded", 1), svc, "the Pod has ended (Succeeded)"},
		"failed":  {web + strings.Replace(pod("a", "10.0.0.1"), "Running", "Failed", 1), svc, "the Pod has ended (Failed)"},
		"no IP":   {web + strings.Replace(pod("a", "10.0.0.1"), "  podIP: 10.0.0.1\n", "", 1), svc, "the Pod has no status.podIP"},
		"no node": {web + strings.Replace(pod("a", "10.0.0.1"), "nodeName: node-a", "hostNetwork: true", 1), svc, "the Pod has no spec.nodeName"},
		"no status": {web + "---\napiVersion: v1\nkind: Pod\nmetadata: {name: a, labels: {app: web}}\nspec: {containers: [{name: x}]}\n",
			svc, "Pod default/a: status: the Pod has no status.podIP; nothing here runs it and gives it one; it is not an endpoint of any Service"},
		"other label": {web + strings.Replace(pod("a", "10.0.0.1"), "app: web", "app: other", 1), svc, "no Pod in the manifests matches"},
		"published": {strings.Replace(web, webSelector, webSelector+"\n  publishNotReadyAddresses: true", 1) +
			strings.Replace(strings.Replace(pod("a", "10.0.0.1"), `"True"`, `"False"`, 1), "nodeName: node-a", "hostNetwork: true", 1),
			"slice default/web IPv4 :8080/TCP 10.0.0.1,r\n" + svc, ""},
		"host network": {web + strings.Replace(pod("a", "192.168.1.1"), "nodeName", "hostNetwork: true\n  nodeName", 1),
			"slice default/web IPv4 :8080/TCP 192.168.1.1,r,s on node-a\n" + svc, ""},
		"zone": {web + pod("a", "10.0.0.1") + "---\napiVersion: v1\nkind: Node\nmetadata: {name: node-a, labels: {topology.kubernetes.io/zone: z1}}\n",
			"node node-a\nslice default/web IPv4 :8080/TCP 10.0.0.1,r,s on node-a in z1\n" + svc, ""},
		"named": {strings.ReplaceAll(web, "8080", "http") + pod("a", "10.0.0.1") + strings.ReplaceAll(pod("b", "10.0.0.2"), "8080", "9090"),
			"slice default/web IPv4 :8080/TCP 10.0.0.1,r,s on node-a\nslice default/web IPv4 :9090/TCP 10.0.0.2,r,s on node-a\n" +
				strings.Replace(svc, "8080", "http", 1), ""},
		"named of another protocol": {strings.ReplaceAll(web, "8080", "dns") + pod("a", "10.0.0.1"), strings.Replace(svc, "8080", "dns", 1),
			"spec.ports[0].targetPort: no container port of this name and protocol in Pod a"},
		"sidecar": {strings.ReplaceAll(web, "8080", "side") + strings.Replace(pod("a", "10.0.0.1"), "  containers:",
			"  initContainers:\n  - {name: i, ports: [{name: side, containerPort: 1}]}\n"+
				"  - {name: s, restartPolicy: Always, ports: [{name: side, containerPort: 2}]}\n  containers:", 1),
			"slice default/web IPv4 :2/TCP 10.0.0.1,r,s on node-a\n" + strings.Replace(svc, "8080", "side", 1), ""},
		"same zone": {strings.Replace(web, webSelector, webSelector+"\n  trafficDistribution: PreferClose", 1) + pod("a", "10.0.0.1") +
			"---\napiVersion: v1\nkind: Node\nmetadata: {name: node-a, labels: {topology.kubernetes.io/zone: z1}}\n",
			"node node-a\nslice default/web IPv4 :8080/TCP 10.0.0.1,r,s on node-a in z1 for [{z1}][]\n" + svc, ""},
		"same node": {strings.Replace(web, webSelector, webSelector+"\n  trafficDistribution: PreferSameNode", 1) + pod("a", "10.0.0.1"),
			"slice default/web IPv4 :8080/TCP 10.0.0.1,r,s on node-a for [][{node-a}]\n" + svc, ""},
		"topology mode": {strings.Replace(web, "name: web", "name: web\n  annotations: {service.kubernetes.io/topology-mode: Auto}", 1) + pod("a", "10.0.0.1") +
			"---\napiVersion: v1\nkind: Node\nmetadata: {name: node-a, labels: {topology.kubernetes.io/zone: z1}}\n",
			"node node-a\nslice default/web IPv4 :8080/TCP 10.0.0.1,r,s on node-a in z1 for [{z1}][]\n" + svc, "as with trafficDistribution PreferSameZone"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, f := load(t, test.manifest)
			same(t, "objects", describe(b), test.want)
			if !strings.Contains(f.String(), test.finding) {
				t.Errorf("want %s\ngot %s", test.finding, f)
			}
		})
	}
}

func TestPodSlicesDualStack(t *testing.T) {
	t.Parallel()
	b, _ := load(t, service("web", "ipFamilyPolicy: PreferDualStack", "clusterIP: 10.96.0.2", "clusterIPs: [10.96.0.2, 'fd00:10:96::2']",
		webSelector, "ports: [{port: 80}]")+pod("a", "10.0.0.1", "  podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}]")+pod("b", "10.0.0.2"),
		func(r *Ranges) { r.ServiceCIDRs = prefixes("10.96.0.0/16", "fd00:10:96::/112") })
	same(t, "objects", describe(b), `
slice default/web IPv4 :80/TCP 10.0.0.1,r,s on node-a 10.0.0.2,r,s on node-a
slice default/web IPv6 :80/TCP fd00::1,r,s on node-a
svc default/web ClusterIP 10.96.0.2,fd00:10:96::2 :80/TCP->80`)
}

func TestManyPods(t *testing.T) {
	t.Parallel()
	manifest := service("web", webSelector, "ports: [{port: 80}]")
	for i := range 250 {
		manifest += pod(fmt.Sprintf("p%d", i), fmt.Sprintf("10.0.%d.%d", i/100, i%100+1))
	}
	b, _ := load(t, manifest)
	total := 0
	for _, es := range b.EndpointSlices {
		if len(es.Endpoints) > maxPodSlice {
			t.Errorf("%s has %d endpoints", es.Name, len(es.Endpoints))
		}
		total += len(es.Endpoints)
	}
	if len(b.EndpointSlices) != 3 || total != 250 {
		t.Errorf("%d slices with %d endpoints", len(b.EndpointSlices), total)
	}
}

func TestMirror(t *testing.T) {
	t.Parallel()
	endpoints := func(meta, subsets string) string {
		return "---\napiVersion: v1\nkind: Endpoints\nmetadata: {name: web" + meta + "}\nsubsets:\n" + subsets
	}
	web := service("web", "clusterIP: 10.96.0.2", "ports: [{port: 80}]")
	const svc = "svc default/web ClusterIP 10.96.0.2 :80/TCP->80"
	const one = "- {addresses: [{ip: 10.0.0.1, nodeName: 'n'}], ports: [{port: 80}]}\n"
	for name, test := range map[string]struct{ manifest, want, finding string }{
		"plain": {web + endpoints("", one), "slice default/web IPv4 :80/TCP 10.0.0.1,r on n\n" + svc, ""},
		"not ready and two families": {web + endpoints("", "- {addresses: [{ip: 10.0.0.1}, {ip: 'fd00::1'}], notReadyAddresses: [{ip: 10.0.0.2}], ports: [{port: 80}]}\n"),
			"slice default/web IPv4 :80/TCP 10.0.0.1,r 10.0.0.2\nslice default/web IPv6 :80/TCP fd00::1,r\n" + svc, ""},
		"subsets that share an address": {web + endpoints("", "- {addresses: [{ip: 10.0.0.1}], ports: [{name: a, port: 80}]}\n"+
			"- {addresses: [{ip: 10.0.0.1}, {ip: 10.0.0.2}], ports: [{name: b, port: 81}]}\n"),
			"slice default/web IPv4 a:80/TCP b:81/TCP 10.0.0.1,r\nslice default/web IPv4 b:81/TCP 10.0.0.2,r\n" + svc, `has a port named ""`},
		"ready and not": {web + endpoints("", one+"- {notReadyAddresses: [{ip: 10.0.0.1, nodeName: 'n'}], ports: [{port: 80}]}\n"),
			"slice default/web IPv4 :80/TCP 10.0.0.1 on n\n" + svc, ""},
		"sloppy":      {web + endpoints("", "- {addresses: [{ip: 010.000.000.001}], ports: [{port: 80}]}\n"), "slice default/web IPv4 :80/TCP 10.0.0.1,r\n" + svc, ""},
		"skip-mirror": {web + endpoints(", labels: {endpointslice.kubernetes.io/skip-mirror: 'true'}", one), svc, "marked not to be mirrored"},
		"leader":      {web + endpoints(", annotations: {control-plane.alpha.kubernetes.io/leader: '{}'}", one), svc, "marked not to be mirrored"},
		"no Service":  {endpoints("", one), "", "there is no Service of this name in the namespace"},
		"selector": {strings.Replace(web, "spec:", "spec:\n  "+webSelector, 1) + endpoints("", one),
			"slice default/web IPv4 :80/TCP 10.0.0.1,r on n\n" + svc, "the Endpoints are used"},
		"selector and Pod": {strings.Replace(web, "spec:", "spec:\n  "+webSelector, 1) + endpoints("", one) + pod("a", "10.0.0.9"),
			"slice default/web IPv4 :80/TCP 10.0.0.9,r,s on node-a\n" + svc, "its endpoints are the Pods that match; not used"},
		"selector and slice": {strings.Replace(web, "spec:", "spec:\n  "+webSelector, 1) + endpoints("", one) + "---\n" +
			slice("s", "web", "IPv4", "ports: [{port: 81}]", "endpoints: [{addresses: [10.0.0.7]}]"),
			"slice default/web IPv4 :81/TCP 10.0.0.7\n" + svc, "not used"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, f := load(t, test.manifest)
			same(t, "objects", describe(b), test.want)
			if !strings.Contains(f.String(), test.finding) {
				t.Errorf("want %s\ngot %s", test.finding, f)
			}
		})
	}
}

// TestPodChangeTouchesItsServicesOnly holds that a changed Pod costs nothing for Services that do not select it.
func TestPodChangeTouchesItsServicesOnly(t *testing.T) {
	t.Parallel()
	c := newCluster(t, Ranges{}, nil)
	put := func(content string) (services, slices int) {
		b := c.Update(objects(t, content, nil))
		return len(b.Services), len(b.EndpointSlices)
	}
	put(service("web", webSelector, "ports: [{port: 80}]") + "---\n" + service("other", "selector: {app: other}", "ports: [{port: 80}]"))
	if services, slices := put(pod("a", "10.0.0.1")); services != 0 || slices != 1 {
		t.Errorf("a new Pod: %d Services, %d slices", services, slices)
	}
	if len(c.dirty) != 1 || !c.dirty[nameOf("default", "web")] {
		t.Errorf("touched: %v", c.dirty)
	}
	put(strings.Replace(pod("a", "10.0.0.1"), "app: web", "app: other", 1))
	if len(c.dirty) != 2 {
		t.Errorf("a Pod that goes from one Service to the other touches %v", c.dirty)
	}
	if services, slices := put(strings.Replace(pod("a", "10.0.0.1"), "app: web", "app: other", 1)); services+slices+len(c.dirty) != 0 {
		t.Errorf("the same Pod again touches %v", c.dirty)
	}
}
