package manifest

import (
	v1 "k8s.io/api/core/v1"
	"slices"
	"strings"
)

// The kinds that are made use of.
const (
	kindService       = "Service"
	kindEndpointSlice = "EndpointSlice"
	kindEndpoints     = "Endpoints"
	kindPod           = "Pod"
	kindNode          = "Node"
	kindServiceCIDR   = "ServiceCIDR"
)

// versions says in which API version each used kind is read.
var versions = map[string]string{
	kindService:       "v1",
	kindEndpointSlice: "discovery.k8s.io/v1",
	kindEndpoints:     "v1",
	kindPod:           "v1",
	kindNode:          "v1",
	kindServiceCIDR:   "networking.k8s.io/v1",
}

// knownKinds lists the kinds of the API groups that come with Kubernetes, so that a slip of the pen in one of them can be
// told from a custom resource.
var knownKinds = map[string][]string{
	"v1": {
		"Binding", "ComponentStatus", "ConfigMap", "Endpoints", "Event", "LimitRange", "Namespace", "Node",
		"PersistentVolume", "PersistentVolumeClaim", "Pod", "PodTemplate", "ReplicationController", "ResourceQuota", "Secret",
		"Service", "ServiceAccount",
	},
	"apps/v1":                      {"ControllerRevision", "DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"},
	"batch/v1":                     {"CronJob", "Job"},
	"autoscaling/v1":               {"HorizontalPodAutoscaler"},
	"autoscaling/v2":               {"HorizontalPodAutoscaler"},
	"discovery.k8s.io/v1":          {"EndpointSlice"},
	"networking.k8s.io/v1":         {"Ingress", "IngressClass", "IPAddress", "NetworkPolicy", "ServiceCIDR"},
	"policy/v1":                    {"PodDisruptionBudget"},
	"rbac.authorization.k8s.io/v1": {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"},
	"storage.k8s.io/v1":            {"CSIDriver", "CSINode", "CSIStorageCapacity", "StorageClass", "VolumeAttachment"},
	"scheduling.k8s.io/v1":         {"PriorityClass"},
	"apiextensions.k8s.io/v1":      {"CustomResourceDefinition"},
}

// foreign reports whether a kind has a name that is made use of, but is another API's, such as Knative's Service. A group that
// comes with Kubernetes and has no such kind is a mistake instead.
func foreign(kind, apiVersion string) bool {
	group, _, grouped := strings.Cut(apiVersion, "/")
	return versions[kind] != "" && grouped && group != "discovery.k8s.io" && group != "networking.k8s.io" && knownKinds[apiVersion] == nil
}

// kindProblem says what is wrong with a kind and apiVersion; empty where nothing is.
func kindProblem(kind, apiVersion string) (field, detail string) {
	want, used := versions[kind]
	_, _, grouped := strings.Cut(apiVersion, "/")
	switch {
	case foreign(kind, apiVersion):
		return "", ""
	case kind == "" && apiVersion == "":
		return "kind", "neither apiVersion nor kind is given: this is no Kubernetes object"
	case kind == "":
		return "kind", "no kind is given"
	case apiVersion == "":
		return "apiVersion", "no apiVersion is given"
	case used && apiVersion == want:
		return "", ""
	case used:
		return "apiVersion", sayf("%.60q has no kind %s; it is read in %s", apiVersion, kind, want)
	case !grouped && apiVersion != "v1":
		return "apiVersion", sayf("there is no API version %.60q", apiVersion)
	}
	if known := knownKinds[apiVersion]; known != nil && !slices.Contains(known, kind) {
		return "kind", sayf("%s has no kind %.60q", apiVersion, kind)
	}
	return "", ""
}

// whyNotProxied says why an object of another kind makes no difference here.
func whyNotProxied(kind, apiVersion string) string {
	if foreign(kind, apiVersion) {
		return sayf("a %s of %.80s is not the one of %s", kind, apiVersion, versions[kind])
	}
	switch kind {
	case "Ingress", "IngressClass", "Gateway", "HTTPRoute", "GRPCRoute", "TLSRoute", "GatewayClass":
		return "requests are routed by host and path by an ingress or gateway controller; a service proxy forwards connections"
	case "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Job", "CronJob", "ReplicationController", "PodTemplate":
		return "nothing here starts its Pods; a Service finds its endpoints in Pods with an address, Endpoints or EndpointSlices"
	case "NetworkPolicy":
		return "traffic is filtered by the network plugin"
	case "IPAddress":
		return "which Service has which cluster IP is read from the Services"
	}
	return "it has no part in forwarding"
}

// legacyEndpoints is the API that EndpointSlice has replaced, deprecated but still served, and written by many. Nothing
// behind this package knows it: it is mirrored to slices.
//
//lint:ignore SA1019 reading it is what it is for
type legacyEndpoints = v1.Endpoints
