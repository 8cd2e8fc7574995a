package source

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// LabelProxyName is the label of a Service that gives it to another proxy, whatever its value.
const LabelProxyName = "service.kubernetes.io/service-proxy-name"

// NotProxied returns why a service proxy must leave a Service alone, and the field that says so; "" for one that is proxied.
func NotProxied(svc *v1.Service) (field, why string) {
	proxy, other := svc.Labels[LabelProxyName]
	switch {
	case svc.Spec.Type == v1.ServiceTypeExternalName:
		return "spec.type", "an ExternalName Service is a DNS alias and has no address"
	case svc.Spec.ClusterIP == v1.ClusterIPNone:
		return "spec.clusterIP", "a headless Service has no cluster IP; clients reach its endpoints directly"
	case other:
		return "metadata.labels[" + LabelProxyName + "]", fmt.Sprintf("the label gives the Service to the proxy %.63q", proxy)
	}
	return "", ""
}

// ServiceOf returns the Service that an EndpointSlice belongs to; false if it belongs to none, or to a headless one, which the
// presence of a label says, whatever its value.
func ServiceOf(es *discovery.EndpointSlice) (types.NamespacedName, bool) {
	name := es.Labels[discovery.LabelServiceName]
	_, headless := es.Labels[v1.IsHeadlessService]
	return types.NamespacedName{Namespace: es.Namespace, Name: name}, name != "" && !headless
}

// ProxyProtocol returns the annotation by which a Service has its load balancer put a PROXY header (HAProxy's PROXY protocol) before what it passes on; ""
// for none. Each provider has its own.
func ProxyProtocol(annotations map[string]string) string {
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		name := strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(key))
		value := strings.ToLower(annotations[key])
		if strings.Contains(name, "proxyprotocol") && !slices.Contains([]string{"", "false", "no", "none", "off", "0", "disabled"}, value) {
			return key
		}
	}
	return ""
}
