package manifest

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// findings collects what is reported.
type findings []source.Finding

func (f *findings) report(x source.Finding) { *f = append(*f, x) }

func (f findings) String() string {
	var b strings.Builder
	for _, x := range f {
		fmt.Fprintf(&b, "%s: %s\n", x.Severity, x)
	}
	return b.String()
}

// writeFiles makes a directory of files. The text of one is given as "name: content".
func writeFiles(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		write(t, filepath.Join(dir, name), content)
	}
	return dir
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// load loads one manifest; names of files in the findings are without their directory.
func load(t testing.TB, manifest string, change ...func(*Config)) (source.Batch, findings) {
	t.Helper()
	return loadFiles(t, map[string]string{"m.yaml": manifest}, change...)
}

func loadFiles(t testing.TB, files map[string]string, change ...func(*Config)) (source.Batch, findings) {
	t.Helper()
	dir := writeFiles(t, files)
	var f findings
	cfg := Config{Path: dir, Report: f.report}
	for _, c := range change {
		c(&cfg)
	}
	batch, err := Load(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for i := range f {
		f[i].Where = strings.ReplaceAll(f[i].Where, dir+"/", "")
		f[i].Detail = strings.ReplaceAll(f[i].Detail, dir+"/", "")
	}
	return batch, f
}

// describe prints a batch for comparison, a line an object.
func describe(b source.Batch) string {
	var lines []string
	for _, svc := range b.Services {
		lines = append(lines, describeService(svc))
	}
	for _, es := range b.EndpointSlices {
		lines = append(lines, describeSlice(es))
	}
	for _, name := range slices.Sorted(maps.Keys(b.Nodes)) {
		lines = append(lines, "node "+name)
	}
	for name, c := range b.ServiceCIDRs {
		lines = append(lines, fmt.Sprintf("cidr %s %s", name, c.Spec.CIDRs))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func describeService(svc *v1.Service) string {
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
		for _, x := range []struct {
			mark string
			on   *bool
		}{{"r", c.Ready}, {"s", c.Serving}, {"t", c.Terminating}} {
			if x.on != nil && *x.on {
				s += "," + x.mark
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

// same compares texts line by line.
func same(t testing.TB, what, got, want string) {
	t.Helper()
	got, want = strings.TrimSpace(got), strings.TrimSpace(want)
	if got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

func nameOf(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}
