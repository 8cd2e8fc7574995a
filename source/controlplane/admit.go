package controlplane

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
)

// Admit does what the API server does before it stores a new object, which must be of a type that Type.New returns: it sets
// defaults and validates. A rejected object must not be added to a Cluster. The caller completes the findings: they lack the place
// and the object, and those that reject the object lack the effect.
func Admit(obj any) (findings []source.Finding, refused bool) {
	c := &checker{}
	switch obj := obj.(type) {
	case *v1.Service:
		setServiceDefaults(obj)
		checkService(obj, c)
	case *discovery.EndpointSlice:
		setSliceDefaults(obj)
		checkSlice(obj, c)
	case *legacyEndpoints:
		setEndpointsDefaults(obj)
		checkEndpoints(obj, c)
	case *v1.Pod:
		setPodDefaults(obj)
		checkPod(obj, c)
	case *v1.Node:
		obj.Namespace = ""
		checkNode(obj, c)
	case *networking.ServiceCIDR:
		obj.Namespace = ""
		checkServiceCIDR(obj, c)
	default:
		panic(fmt.Sprintf("%T is not used by a Cluster", obj))
	}
	return c.findings, c.refused
}

// checker collects the findings of one object.
type checker struct {
	findings []source.Finding
	refused  bool
}

// reject reports a fault for which the API server would reject the object.
func (c *checker) reject(field, format string, args ...any) {
	c.refused = true
	c.problem(field, "", format, args...)
}

// problem reports a fault that leaves the object in use.
func (c *checker) problem(field, effect, format string, args ...any) {
	c.findings = append(c.findings,
		source.Finding{Severity: source.Problem, Field: field, Detail: fmt.Sprintf(format, args...), Effect: effect})
}

// note reports a limit that is there by design.
func (c *checker) note(field, effect, format string, args ...any) {
	c.findings = append(c.findings,
		source.Finding{Severity: source.Note, Field: field, Detail: fmt.Sprintf(format, args...), Effect: effect})
}

// remarks returns the findings as remarks about an object.
func (c *checker) remarks(kind string, name types.NamespacedName) []Remark {
	var out []Remark
	for _, f := range c.findings {
		out = append(out, Remark{ID{kind, name.Namespace, name.Name}, f})
	}
	return out
}
