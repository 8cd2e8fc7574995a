package controlplane

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// selection finds the Pods of a Service and the Services of a Pod.
type selection struct {
	pods     map[string]map[string]*v1.Pod     // by namespace and name
	services map[string]map[string]*v1.Service // the same, of those with a selector
}

func newSelection() selection {
	return selection{map[string]map[string]*v1.Pod{}, map[string]map[string]*v1.Service{}}
}

// put enters an object; nil removes it.
func put[T any](index map[string]map[string]*T, name types.NamespacedName, value *T) {
	if index[name.Namespace] == nil {
		index[name.Namespace] = map[string]*T{}
	}
	setOrDelete(index[name.Namespace], name.Name, value)
}

func (s selection) setService(name types.NamespacedName, svc *v1.Service) {
	if svc != nil && len(svc.Spec.Selector) == 0 {
		svc = nil
	}
	put(s.services, name, svc)
}

func selects(svc *v1.Service, pod *v1.Pod) bool {
	for k, v := range svc.Spec.Selector {
		if have, ok := pod.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// servicesOf returns the Services that select a Pod, which may be nil.
func (s selection) servicesOf(pod *v1.Pod) (out []types.NamespacedName) {
	if pod == nil {
		return nil
	}
	for name, svc := range s.services[pod.Namespace] {
		if selects(svc, pod) {
			out = append(out, types.NamespacedName{Namespace: pod.Namespace, Name: name})
		}
	}
	return out
}

// podsOf returns the Pods that a Service selects, in order of name.
func (s selection) podsOf(svc *v1.Service) (out []*v1.Pod) {
	for _, pod := range s.pods[svc.Namespace] {
		if selects(svc, pod) {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out, func(a, b *v1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return out
}
