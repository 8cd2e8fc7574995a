package sourcetest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// Service returns the manifest of a Service: its name, and the lines of its spec.
func Service(name string, spec ...string) string {
	return "apiVersion: v1\nkind: Service\nmetadata:\n  name: " + name + "\nspec:\n  " + strings.Join(spec, "\n  ") + "\n"
}

// Services returns the manifests of n Services whose names begin alike.
func Services(prefix string, n int, spec ...string) string {
	var b strings.Builder
	for i := range n {
		b.WriteString("---\n" + Service(fmt.Sprintf("%s-%d", prefix, i), spec...))
	}
	return b.String()
}

// Slice returns the manifest of an EndpointSlice.
func Slice(name, service, addressType string, lines ...string) string {
	return "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: " + name +
		"\n  labels:\n    kubernetes.io/service-name: " + service + "\naddressType: " + addressType + "\n" + strings.Join(lines, "\n") + "\n"
}

// Pod returns the manifest of a Pod with label app: web, that is ready on node-a unless lines say otherwise.
func Pod(name, ip string, lines ...string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: web}}
spec:
  nodeName: node-a
  containers:
  - name: main
    ports: [{name: http, containerPort: 8080}, {name: dns, containerPort: 53, protocol: UDP}]
status:
  phase: Running
  podIP: %s
  conditions: [{type: Ready, status: "True"}]
%s
`, name, ip, strings.Join(lines, "\n"))
}

// WebSelector is the line of a spec that selects such Pods.
const WebSelector = "selector: {app: web}"

// Name is the name of an object.
func Name(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// Prefixes are CIDRs.
func Prefixes(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// Findings collects what is reported.
type Findings []source.Finding

// Report implements source.Report.
func (f *Findings) Report(x source.Finding) { *f = append(*f, x) }

func (f Findings) String() string {
	var b strings.Builder
	for _, x := range f {
		fmt.Fprintf(&b, "%s: %s\n", x.Severity, x)
	}
	return b.String()
}

// Same compares texts but for blank space around them.
func Same(t testing.TB, what, got, want string) {
	t.Helper()
	got, want = strings.TrimSpace(got), strings.TrimSpace(want)
	if got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

// Describe prints a batch for comparison, a line an object; those that are gone are left out, and Services that are not proxied.
func Describe(b source.Batch) string {
	var lines []string
	for _, svc := range b.Services {
		if svc == nil {
			continue
		}
		if _, why := source.NotProxied(svc); why == "" {
			lines = append(lines, DescribeService(svc))
		}
	}
	for _, es := range b.EndpointSlices {
		if es != nil {
			lines = append(lines, describeSlice(es))
		}
	}
	for name := range b.Nodes {
		lines = append(lines, "node "+name)
	}
	for name, c := range b.ServiceCIDRs {
		lines = append(lines, fmt.Sprintf("cidr %s %s", name, c.Spec.CIDRs))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// DescribeService prints a Service.
func DescribeService(svc *v1.Service) string {
	s := fmt.Sprintf("svc %s/%s %s %s", svc.Namespace, svc.Name, svc.Spec.Type, strings.Join(svc.Spec.ClusterIPs, ","))
	for _, p := range svc.Spec.Ports {
		s += fmt.Sprintf(" %s:%d/%s->%s", p.Name, p.Port, p.Protocol, p.TargetPort.String())
		if p.NodePort != 0 {
			s += fmt.Sprintf("@%d", p.NodePort)
		}
	}
	if svc.Spec.HealthCheckNodePort != 0 {
		s += fmt.Sprintf(" health@%d", svc.Spec.HealthCheckNodePort)
	}
	return s
}

func describeSlice(es *discovery.EndpointSlice) string {
	s := fmt.Sprintf("slice %s/%s %s", es.Namespace, es.Labels[discovery.LabelServiceName], es.AddressType)
	for _, p := range es.Ports {
		s += fmt.Sprintf(" %s:%d/%s", *p.Name, *p.Port, *p.Protocol)
	}
	for _, e := range es.Endpoints {
		s += " " + strings.Join(e.Addresses, "+")
		c := e.Conditions
		for i, is := range []*bool{c.Ready, c.Serving, c.Terminating} {
			if is != nil && *is {
				s += "," + "rst"[i:i+1]
			}
		}
		if e.NodeName != nil {
			s += " on " + *e.NodeName
		}
		if e.Zone != nil {
			s += " in " + *e.Zone
		}
		if h := e.Hints; h != nil {
			s += fmt.Sprintf(" for %v%v", h.ForZones, h.ForNodes)
		}
	}
	return s
}
