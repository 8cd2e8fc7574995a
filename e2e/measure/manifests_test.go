package measure

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// readCluster reads the manifests in dir back: the services' addresses, and their endpoints by service.
func readCluster(t *testing.T, dir string) (services map[string]string, endpoints map[string][]string, local int) {
	t.Helper()
	services, endpoints = map[string]string{}, map[string][]string{}
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var list struct{ Items []json.RawMessage }
		if err := json.Unmarshal(text, &list); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, item := range list.Items {
			var slice discovery.EndpointSlice
			if err := json.Unmarshal(item, &slice); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if slice.Kind == "Service" {
				var s v1.Service
				if err := json.Unmarshal(item, &s); err != nil {
					t.Fatalf("%s: %v", file, err)
				}
				services[s.Name] = s.Spec.ClusterIP
				continue
			}
			owner := slice.Labels[discovery.LabelServiceName]
			for _, e := range slice.Endpoints {
				endpoints[owner] = append(endpoints[owner], e.Addresses...)
				if *e.NodeName == "node1" {
					local++
				}
			}
		}
	}
	return services, endpoints, local
}

func TestClusterIsWhatItsManifestsSay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	sizes := append(Uniform(perFile, 2), 3*PerSlice+1)
	c, err := NewCluster(dir, sizes...)
	if err != nil {
		t.Fatal(err)
	}
	services, endpoints, local := readCluster(t, dir)
	seen := map[string]bool{}
	for i, s := range c.Services {
		if services[s.Name] != s.Addr.String() || len(endpoints[s.Name]) != sizes[i] {
			t.Errorf("%s: %q with %d endpoints in the manifests, want %s with %d", s.Name, services[s.Name],
				len(endpoints[s.Name]), s.Addr, sizes[i])
		}
		for _, e := range append(endpoints[s.Name], services[s.Name]) {
			if seen[e] {
				t.Errorf("%s: %s is in use twice", s.Name, e)
			}
			seen[e] = true
		}
	}
	if total := 2*perFile + 3*PerSlice + 1; local < total/NodesOfCluster || local > total/NodesOfCluster+1 {
		t.Errorf("%d of %d endpoints are on node1, want one in %d", local, total, NodesOfCluster)
	}
}

func TestPrepareChangesNothingUntilReplaced(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c, err := NewCluster(dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	was := c.Services[0].Endpoints[0].String()
	c.Services[0].Endpoints[0] = netip.MustParseAddr("10.190.0.1")
	replace, err := c.Prepare(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, got, _ := readCluster(t, dir); got["svc-00000"][0] != was {
		t.Errorf("before replace: %s, want %s", got["svc-00000"][0], was)
	}
	if err := replace(); err != nil {
		t.Fatal(err)
	}
	if _, got, _ := readCluster(t, dir); got["svc-00000"][0] != "10.190.0.1" {
		t.Errorf("after replace: %s, want 10.190.0.1", got["svc-00000"][0])
	}
}
