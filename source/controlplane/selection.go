package controlplane

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// labelPair is a label of Pods in one namespace.
type labelPair struct{ namespace, key, value string }

// selection finds the Pods of a Service and the Services of a Pod without walking all of them: Pods are indexed by each of their
// labels, Services by one label of their selector.
type selection struct {
	pods     map[labelPair]map[string]*v1.Pod
	onNode   map[string]map[types.NamespacedName]*v1.Pod
	services map[labelPair]map[types.NamespacedName]*v1.Service
}

func newSelection() selection {
	return selection{
		pods:     map[labelPair]map[string]*v1.Pod{},
		onNode:   map[string]map[types.NamespacedName]*v1.Pod{},
		services: map[labelPair]map[types.NamespacedName]*v1.Service{},
	}
}

func enter[K, N comparable, T any](index map[K]map[N]*T, key K, name N, value *T) {
	if index[key] == nil {
		index[key] = map[N]*T{}
	}
	index[key][name] = value
}

func leave[K, N comparable, T any](index map[K]map[N]*T, key K, name N) {
	if delete(index[key], name); len(index[key]) == 0 {
		delete(index, key)
	}
}

func (s selection) setPod(before, after *v1.Pod) {
	if before != nil {
		for k, v := range before.Labels {
			leave(s.pods, labelPair{before.Namespace, k, v}, before.Name)
		}
		leave(s.onNode, before.Spec.NodeName, types.NamespacedName{Namespace: before.Namespace, Name: before.Name})
	}
	if after != nil {
		for k, v := range after.Labels {
			enter(s.pods, labelPair{after.Namespace, k, v}, after.Name, after)
		}
		enter(s.onNode, after.Spec.NodeName, types.NamespacedName{Namespace: after.Namespace, Name: after.Name}, after)
	}
}

// listedUnder returns the label by which a Service is indexed; false if it selects nothing.
func listedUnder(svc *v1.Service) (labelPair, bool) {
	if svc == nil || len(svc.Spec.Selector) == 0 {
		return labelPair{}, false
	}
	key := slices.Min(slices.Collect(maps.Keys(svc.Spec.Selector)))
	return labelPair{svc.Namespace, key, svc.Spec.Selector[key]}, true
}

func (s selection) setService(name types.NamespacedName, before, after *v1.Service) {
	if pair, ok := listedUnder(before); ok {
		leave(s.services, pair, name)
	}
	if pair, ok := listedUnder(after); ok {
		enter(s.services, pair, name, after)
	}
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
func (s selection) servicesOf(pod *v1.Pod) map[types.NamespacedName]bool {
	out := map[types.NamespacedName]bool{}
	if pod == nil {
		return out
	}
	for k, v := range pod.Labels {
		for name, svc := range s.services[labelPair{pod.Namespace, k, v}] {
			if selects(svc, pod) {
				out[name] = true
			}
		}
	}
	return out
}

// podsOf returns the Pods that a Service selects, in order of name.
func (s selection) podsOf(svc *v1.Service) []*v1.Pod {
	var few map[string]*v1.Pod
	first := true
	for k, v := range svc.Spec.Selector {
		if list := s.pods[labelPair{svc.Namespace, k, v}]; first || len(list) < len(few) {
			few, first = list, false
		}
	}
	var out []*v1.Pod
	for _, name := range slices.Sorted(maps.Keys(few)) {
		if selects(svc, few[name]) {
			out = append(out, few[name])
		}
	}
	return out
}

// podsOn returns the Pods on a node.
func (s selection) podsOn(node string) []*v1.Pod { return slices.Collect(maps.Values(s.onNode[node])) }
