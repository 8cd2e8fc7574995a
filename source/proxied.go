package source

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
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
