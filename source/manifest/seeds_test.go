package manifest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/source"
)

const seedsDir = "../../testdata/seeds"

// Notes of which several seeds get the same.
const (
	noPods      = ": spec.selector: no Pod in the manifests matches, and neither Endpoints nor EndpointSlices belong to the Service; "
	noEndpoints = ": the Service has no selector, and neither Endpoints nor EndpointSlices belong to it; "
	noneYet     = "connections to it are refused until there are"
)

// seeds says for each file of testdata/seeds what it delivers, and which notes it gets.
var seeds = map[string]struct {
	objects, notes string
}{
	"affinity.yaml": {`svc default/optimized-service LoadBalancer 10.96.171.113 http:80/TCP->8080@31082 health@31256`,
		":11: Service default/optimized-service" + noPods + noneYet},
	"app-protocol.yaml": {`svc default/app-protocol ClusterIP 10.96.242.246 :8080/TCP->8080`,
		":2: Service default/app-protocol" + noEndpoints + noneYet},
	"bad-annotation-key.yaml": {``,
		":7: Service default/high-performance: metadata.annotations[service.kubernetes.io/service.beta.kubernetes.io/ipvs-scheduler]: " +
			`"service.kubernetes.io/service.beta.kubernetes.io/ipvs-scheduler" is not a valid key, which is a name of at most 63 ` +
			"letters, digits, '-', '_' or '.', after a DNS domain and one '/' if any; an API server would refuse the object; here it is used\n" +
			":10: Service default/high-performance: spec.clusterIP: a headless Service has no cluster IP; clients reach its endpoints directly; not proxied"},
	"clusterip.yaml": {`svc default/service-python ClusterIP 10.96.85.105 :3000/TCP->443`,
		":11: Service default/service-python" + noPods + noneYet},
	"deployment.yaml": {`svc default/svc-8091 ClusterIP 10.96.254.195 svc-p8091:8091/TCP->8080`,
		":2: Deployment kubernetes-bootcamp-v1-8080: nothing here starts its Pods; a Service finds its endpoints in Pods with an " +
			"address, Endpoints or EndpointSlices; not proxied\n:35: Service default/svc-8091" + noPods + noneYet},
	"endpoints-and-slice.yaml": {`slice sampleapp/frontend IPv4 :80/TCP 172.17.0.25,r,s on minikube 172.17.0.21,r,s on minikube`,
		":7: Endpoints sampleapp/frontend: metadata.name: there is no Service of this name in the namespace; not proxied"},
	"endpoints-legacy.yaml": {`
slice default/legacy-system IPv4 :3306/TCP 192.168.1.100,r
svc default/legacy-system ClusterIP 10.96.212.232 :3306/TCP->3306`, ""},
	"endpoints-named-port.yaml": {`
slice default/svc-8092 IPv4 svc-p8092:8080/TCP 10.244.2.5,r
svc default/svc-8092 ClusterIP 10.96.182.17 svc-p8092:8092/TCP->8092`, ""},
	"endpoints-outside.yaml": {`
slice default/plat-dev IPv4 :3306/TCP 10.5.10.109,r
svc default/plat-dev ClusterIP 10.96.84.65 :3306/TCP->3306`, ""},
	"endpoints-several-ports.yaml": {`
slice default/custom-endpoints IPv4 health:8081/TCP http:8080/TCP metrics:9090/TCP 10.244.1.10,r on worker-1 10.244.1.11,r on worker-2
svc default/custom-endpoints ClusterIP 10.96.41.155 http:80/TCP->80 metrics:9090/TCP->9090 health:8081/TCP->8081`, ""},
	"external-ips.yaml": {`svc default/my-service ClusterIP 10.96.236.28 http:80/TCP->49152`,
		":7: Service default/my-service" + noPods + noneYet},
	"externalname.yaml": {``,
		":11: Service default/service-python: spec.type: an ExternalName Service is a DNS alias and has no address; not proxied"},
	"headless.yaml": {``,
		":12: Service mysql-space/mysql-balance-svc: spec.clusterIP: a headless Service has no cluster IP; clients reach its endpoints directly; not proxied"},
	"ingress.yaml": {``,
		":2: Ingress ingress-resource-backend: requests are routed by host and path by an ingress or gateway controller; a service " +
			"proxy forwards connections; not proxied"},
	"loadbalancer-annotations.yaml": {`svc default/my-service LoadBalancer 10.96.236.28 :80/TCP->80@32048`,
		":13: Service default/my-service" + noPods + noneYet},
	"loadbalancer-local.yaml": {`svc default/service-python LoadBalancer 10.96.85.105 :3000/TCP->443@30080 health@31905`,
		":12: Service default/service-python" + noPods + noneYet},
	"named-port.yaml": {`svc default/named-port ClusterIP 10.96.115.138 http:8080/TCP->8080`,
		":2: Service default/named-port" + noEndpoints + noneYet},
	"named-target-port.yaml": {`svc default/nginx-service ClusterIP 10.96.51.128 name-of-service-port:80/TCP->http-web-svc`,
		":7: Service default/nginx-service" + noPods + noneYet},
	"nodeport.yaml": {`svc default/service-python NodePort 10.96.85.105 :3000/TCP->443@30080`,
		":12: Service default/service-python" + noPods + noneYet},
	"selector-and-endpoints.yaml": {`
slice default/web-service IPv4 :8080/TCP 10.244.1.5,r 10.244.1.6,r
svc default/web-service ClusterIP 10.96.251.116 :80/TCP->8080`,
		":15: Endpoints default/web-service: the Service has a selector, but the manifests hold neither a Pod that matches nor an " +
			"EndpointSlice for it; the Endpoints are used"},
	"selector.yaml": {`svc default/my-service ClusterIP 10.96.236.28 :80/TCP->9376`,
		":7: Service default/my-service" + noPods + noneYet},
	"several-ports.yaml": {`svc default/complex-app ClusterIP 10.96.26.7 http:80/TCP->80 https:443/TCP->443 metrics:9090/TCP->9090`,
		":2: Service default/complex-app" + noEndpoints + noneYet},
	"slice-hints.yaml": {`
slice default/hinted IPv4 :80/TCP 10.1.2.3,r in zone-a for [{zone-a}][]
svc default/hinted ClusterIP 10.96.212.201 :80/TCP->80`,
		":6: Service default/hinted: metadata.annotations: the annotation asks for shares by the CPUs of each zone, which manifests " +
			"do not hold; as with trafficDistribution PreferSameZone, each endpoint is for its own zone"},
	"slice-named-port.yaml": {`
slice default/svc-8093 IPv4 svc-p8093:8080/TCP 10.244.1.25
svc default/svc-8093 ClusterIP 10.96.237.109 svc-p8093:8093/TCP->8093`, ""},
	"slice-zone.yaml": {`
slice default/web-service IPv4 http:8080/TCP 10.244.1.5,r in us-west-2a for [{us-west-2a}][]
svc default/web-service ClusterIP 10.96.251.116 :80/TCP->8080`,
		`:11: Service default/web-service: spec.ports[0].name: no EndpointSlice or Endpoints of this Service has a port named "" ` +
			"with protocol TCP; connections to it are refused until there is"},
	"slice.yaml": {`
slice default/example IPv4 http:80/TCP 10.1.2.3,r on node-1 in us-west2-a
svc default/example ClusterIP 10.96.190.1 http:80/TCP->80`, ""},
	"use-cases.yaml": {`
svc default/external-web LoadBalancer 10.96.138.55 :80/TCP->80@30080
svc default/internal-api ClusterIP 10.96.121.2 :8080/TCP->8080`,
		":8: Service default/internal-api" + noPods + noneYet + "\n:19: Service default/external-web" + noPods + noneYet +
			"\n:30: Service default/external-database: spec.type: an ExternalName Service is a DNS alias and has no address; not proxied"},
}

// TestSeeds loads each file by itself. The addresses are part of the contract: they must never change.
func TestSeeds(t *testing.T) {
	t.Parallel()
	files, err := os.ReadDir(seedsDir)
	require.NoError(t, err)
	if len(files) != len(seeds) {
		t.Errorf("%d files, but %d expectations", len(files), len(seeds))
	}
	for name, want := range seeds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(seedsDir, name)
			var f findings
			b, err := Load(Config{Path: path, Report: f.Report})
			require.NoError(t, err)
			same(t, "objects", describe(b), want.objects)
			var notes []string
			for _, x := range f {
				if x.Severity != source.Note {
					t.Errorf("a problem: %s", x)
				}
				notes = append(notes, strings.TrimPrefix(x.String(), path))
			}
			same(t, "notes", strings.Join(notes, "\n"), want.notes)
		})
	}
}

// TestSeedsTogether loads the whole directory, in which some names and node ports meet: the first of each counts.
func TestSeedsTogether(t *testing.T) {
	t.Parallel()
	var f findings
	b, err := Load(Config{Path: seedsDir, Report: f.Report})
	require.NoError(t, err)
	same(t, "a Service of several files", describeService(b.Services[nameOf("default", "service-python")]),
		"svc default/service-python ClusterIP 10.96.85.105 :3000/TCP->443")
	if len(b.Services) != 21 || len(b.EndpointSlices) != 9 {
		t.Errorf("%d Services and %d slices:\n%s", len(b.Services), len(b.EndpointSlices), describe(b))
	}
	duplicates := 0
	for _, x := range f {
		if x.Severity == source.Problem {
			duplicates++
			if !strings.Contains(x.Detail, "the same object is defined at") {
				t.Error(x)
			}
		}
	}
	if duplicates != 6 {
		t.Errorf("%d problems:\n%s", duplicates, f)
	}
}
