package controlplane

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The kinds that a Cluster uses.
const (
	kindService       = "Service"
	kindEndpointSlice = "EndpointSlice"
	kindEndpoints     = "Endpoints"
	kindPod           = "Pod"
	kindNode          = "Node"
	kindServiceCIDR   = "ServiceCIDR"
)

// used maps these kinds to their API version and to a function that returns an empty object.
var used = map[string]struct {
	version string
	empty   func() any
}{
	kindService:       {"v1", func() any { return new(v1.Service) }},
	kindEndpointSlice: {"discovery.k8s.io/v1", func() any { return new(discovery.EndpointSlice) }},
	kindEndpoints:     {"v1", func() any { return new(legacyEndpoints) }},
	kindPod:           {"v1", func() any { return new(v1.Pod) }},
	kindNode:          {"v1", func() any { return new(v1.Node) }},
	kindServiceCIDR:   {"networking.k8s.io/v1", func() any { return new(networking.ServiceCIDR) }},
}

// knownKinds lists the kinds of the API groups that come with Kubernetes, so that a misspelt kind can be told from a custom
// resource.
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

// Type is the kind and apiVersion of an object.
type Type struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
}

func (t Type) String() string { return t.APIVersion + " " + t.Kind }

// foreign reports whether a kind has the name of one that is used but belongs to another API, such as Knative's Service. A group
// that comes with Kubernetes and has no such kind is a mistake instead.
func (t Type) foreign() bool {
	group, _, grouped := strings.Cut(t.APIVersion, "/")
	return used[t.Kind].version != "" && grouped && group != "discovery.k8s.io" && group != "networking.k8s.io" &&
		knownKinds[t.APIVersion] == nil
}

// Used reports whether a Cluster uses objects of this kind and group.
func (t Type) Used() bool { return used[t.Kind].version != "" && !t.foreign() }

// New returns an empty object of a type that is used.
func (t Type) New() any { return used[t.Kind].empty() }

// Problem returns what is wrong with a type, and in which field; nothing if an API server may have such a type.
func (t Type) Problem() (field, detail string) {
	want := used[t.Kind].version
	_, _, grouped := strings.Cut(t.APIVersion, "/")
	switch {
	case t.foreign():
		return "", ""
	case t.Kind == "" && t.APIVersion == "":
		return "kind", "neither apiVersion nor kind is given: this is not a Kubernetes object"
	case t.Kind == "":
		return "kind", "no kind is given"
	case t.APIVersion == "":
		return "apiVersion", "no apiVersion is given"
	case t.APIVersion == want:
		return "", ""
	case want != "":
		return "apiVersion", fmt.Sprintf("%.60q has no kind %s; it is read in %s", t.APIVersion, t.Kind, want)
	case !grouped && t.APIVersion != "v1":
		return "apiVersion", fmt.Sprintf("there is no API version %.60q", t.APIVersion)
	}
	if known := knownKinds[t.APIVersion]; known != nil && !slices.Contains(known, t.Kind) {
		return "kind", fmt.Sprintf("%s has no kind %.60q", t.APIVersion, t.Kind)
	}
	return "", ""
}

// WhyNotProxied returns why objects of a type that is not used make no difference to a proxy.
func (t Type) WhyNotProxied() string {
	if t.foreign() {
		return fmt.Sprintf("a %s of %.80s is not the one of %s", t.Kind, t.APIVersion, used[t.Kind].version)
	}
	switch t.Kind {
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

// IsList reports whether a type is a list of objects, such as List or ServiceList.
func (t Type) IsList() bool {
	if t.Kind == "List" {
		return t.APIVersion == "v1" || t.APIVersion == ""
	}
	item, found := strings.CutSuffix(t.Kind, "List")
	return found && slices.Contains(knownKinds[t.APIVersion], item)
}

// Item returns the type of a list's items that leave theirs out; it is empty for a List.
func (t Type) Item() Type {
	if t.Kind == "List" {
		return Type{}
	}
	return Type{strings.TrimSuffix(t.Kind, "List"), t.APIVersion}
}

// ID names an object. Nodes and ServiceCIDRs have no namespace.
type ID struct{ Kind, Namespace, Name string }

func idOf(kind string, name types.NamespacedName) ID { return ID{kind, name.Namespace, name.Name} }

// ID returns the ID of an object of this type. The kind of another API has its group, which distinguishes it from Kubernetes' own.
func (t Type) ID(namespace, name string) ID {
	id := ID{t.Kind, namespace, name}
	switch {
	case t.foreign():
		group, _, _ := strings.Cut(t.APIVersion, "/")
		id.Kind += "." + group
	case id.Kind == kindNode || id.Kind == kindServiceCIDR:
		id.Namespace = ""
	case id.Namespace == "" && used[t.Kind].version != "":
		id.Namespace = v1.NamespaceDefault
	}
	return id
}

func (id ID) String() string {
	kind, name := id.Kind, id.Name
	if id.Namespace != "" && name != "" {
		name = id.Namespace + "/" + name
	}
	if name != "" && !printable(name) || strings.ContainsAny(name, `"'`) {
		name = fmt.Sprintf("%.80q", name)
	}
	if kind != "" && !printable(kind) {
		kind = fmt.Sprintf("%.40q", kind)
	}
	return strings.TrimSpace(kind + " " + name)
}

// legacyEndpoints is the API that EndpointSlice has replaced. It is deprecated but still served and widely used. Only this package
// knows it, and mirrors it to slices.
//
//lint:ignore SA1019 reading it is what it is for
type legacyEndpoints = v1.Endpoints
