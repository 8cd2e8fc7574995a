package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/source/apiserver/apiservertest"
)

// alias is all that there is to say of these objects.
var alias = regexp.MustCompile(`^note: Service shop/named: [^\n]* not proxied\n$`)

// versionedCluster has the objects of one cluster as each version of Kubernetes serialises them; hack/kubernetes-objects writes it.
const versionedCluster = "../../testdata/kubernetes"

// serveVersion is an API server of a version, which answers in JSON or in protobuf.
func serveVersion(t *testing.T, dir string, protobuf bool) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		const binary = "application/vnd.kubernetes.protobuf"
		accept := r.Header.Get("Accept")
		kind, suffix := "application/json", ".json"
		if protobuf {
			kind, suffix = binary, ".pb"
		}
		if !strings.Contains(accept, kind) {
			t.Errorf("%s: Accept %q has no %s", r.URL.Path, accept, kind)
		}
		content, err := os.ReadFile(filepath.Join(dir, path.Base(r.URL.Path)+suffix))
		if err != nil { // as an API server answers that does not have this resource in this version
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(content)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// TestKubernetesVersions: the objects of one cluster give the same rules in all modes, whichever supported version of Kubernetes
// serialises them, in JSON and in protobuf, but for what a version lacks: hints for nodes before 1.33.
func TestKubernetesVersions(t *testing.T) {
	t.Parallel()
	dirs, err := filepath.Glob(filepath.Join(versionedCluster, "1.*"))
	require.NoError(t, err)
	var versions []string
	for _, dir := range dirs {
		versions = append(versions, filepath.Base(dir))
	}
	if want := []string{"1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"}; !slices.Equal(versions, want) {
		t.Fatalf("versions %q, want %q", versions, want)
	}
	for i, version := range versions {
		library := readFile(t, filepath.Join(dirs[i], "version"))
		t.Logf("Kubernetes %s, objects of k8s.io/api %s: in JSON and protobuf, the rules of modes iptables, ipvs and nftables", version, strings.TrimSpace(library))
	}
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			rules := map[bool]string{} // with hints for nodes, and without
			for i, version := range versions {
				nodeHints := version >= "1.33"
				for _, protobuf := range []bool{false, true} {
					kubeconfig := apiservertest.Kubeconfig(t, serveVersion(t, dirs[i], protobuf))
					got, problems, err := rendered("--mode="+m.name, "--node-name=node1", "--kubeconfig="+kubeconfig)
					if err != nil || !alias.MatchString(problems) {
						t.Fatalf("%s, protobuf %v: %v: %s", version, protobuf, err, problems)
					}
					if rules[nodeHints] == "" {
						rules[nodeHints] = got
						checkRules(t, version, got, nodeHints)
					}
					if got != rules[nodeHints] {
						t.Errorf("%s, protobuf %v: other rules than before:\n%s\nbefore:\n%s", version, protobuf, got, rules[nodeHints])
					}
				}
			}
		})
	}
}

// checkRules: rules of node1 in that cluster have what they should, and endpoints on other nodes where they should.
func checkRules(t *testing.T, version, rules string, nodeHints bool) {
	t.Helper()
	for text, want := range map[string]bool{
		"10.96.0.10": true, "fd00:10:96::10": true, "30443": true, "192.0.2.10": true, "192.0.2.11": false, "198.51.100.": true,
		"203.0.113.5": true, "10.244.1.10": true, "fd00:10:244:2::10": true, "10.244.1.11": true, "10.244.1.12": true,
		// In the zone of this node; a hint for the other node comes first.
		"10.244.2.10": !nodeHints,
		// In another zone.
		"10.244.3.10": false,
	} {
		if strings.Contains(rules, text) != want {
			t.Errorf("%s: that the rules have %s should be %v:\n%s", version, text, want, rules)
		}
	}
}

// TestKubernetesVersionsAsManifests: what "kubectl get -o json" prints at a version is taken as a manifest.
func TestKubernetesVersionsAsManifests(t *testing.T) {
	t.Parallel()
	dirs, err := filepath.Glob(filepath.Join(versionedCluster, "1.*"))
	if err != nil || len(dirs) == 0 {
		t.Fatalf("%q, %v", dirs, err)
	}
	for _, dir := range dirs {
		want, problems, err := rendered("--node-name=node1", "--kubeconfig="+apiservertest.Kubeconfig(t, serveVersion(t, dir, false)))
		if err != nil {
			t.Fatalf("%s: %v: %s", dir, err, problems)
		}
		got, problems, err := rendered("--node-name=node1", "--manifests="+dir, "--service-cidr=10.96.0.0/16,fd00:10:96::/112")
		if err != nil {
			t.Fatalf("%s: %v: %s", dir, err, problems)
		}
		if got != want {
			t.Errorf("%s: rules of the manifests:\n%s\nof the cluster:\n%s", dir, got, want)
		}
	}
}
