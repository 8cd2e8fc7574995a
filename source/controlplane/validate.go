package controlplane

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"nodeproxy/source"
)

// The check functions refuse what the API server would refuse, so that nothing reaches the proxier from a manifest that could
// not reach it from a cluster. They skip fields that neither the proxy nor a controller here uses.

// checkMeta checks an object's name, namespace, labels and annotations. nameRule validates names of its kind.
func checkMeta(meta *metav1.ObjectMeta, namespaced bool, nameRule func(string) []string, c *checker) {
	switch {
	case meta.Name == "" && meta.GenerateName != "":
		c.reject("metadata.name", "required; generateName is not expanded here")
	case meta.Name == "":
		c.reject("metadata.name", "required")
	default:
		c.format("metadata.name", meta.Name, nameRule)
	}
	if namespaced {
		c.format("metadata.namespace", meta.Namespace, validation.IsDNS1123Label)
	}
	for _, kv := range []struct {
		field  string
		values map[string]string
	}{{"metadata.labels", meta.Labels}, {"metadata.annotations", meta.Annotations}} {
		for _, key := range slices.Sorted(maps.Keys(kv.values)) {
			field := kv.field + "[" + key + "]"
			if !printable(key) {
				field = kv.field
			}
			const effect = "an API server would refuse the object; here it is used"
			if msgs := validation.IsQualifiedName(strings.ToLower(key)); len(msgs) > 0 {
				c.note(field, effect, "%.80q is not a valid key, which is a name of at most 63 letters, digits, '-', '_' or '.', after a "+
					"DNS domain and one '/' if any", key)
			}
			if kv.field == "metadata.labels" {
				if msgs := validation.IsValidLabelValue(kv.values[key]); len(msgs) > 0 {
					c.note(field, effect, "%.80q is not a valid label value: %s", kv.values[key], msgs[0])
				}
			}
		}
	}
}

func printable(s string) bool {
	return len(s) < 200 && !strings.ContainsFunc(s, func(r rune) bool { return r < 0x21 || r > 0x7e })
}

// format refuses a value that breaks a rule about its format.
func (c *checker) format(field, value string, rule func(string) []string) {
	msgs := rule(value)
	if len(msgs) == 0 {
		return
	}
	msg, _, _ := strings.Cut(msgs[0], " (e.g.") // An example and a regular expression follow.
	if len(value) > 60 {
		c.reject(field, "%.40q… (%d characters): %s", value, len(value), msg)
	} else {
		c.reject(field, "%q: %s", value, msg)
	}
}

// oneOf refuses a value that is not one of those given.
func oneOf[T ~string](c *checker, field string, value T, allowed ...T) {
	if !slices.Contains(allowed, value) {
		names := make([]string, len(allowed))
		for i, a := range allowed {
			names[i] = string(a)
		}
		c.reject(field, "%.40q is not one of %s", value, strings.Join(names, ", "))
	}
}

// portNumber refuses a number that is not a port.
func (c *checker) portNumber(field string, n int32) {
	if n < 1 || n > 65535 {
		c.reject(field, "%d is not within 1-65535", n)
	}
}

// ip refuses text that is not an address.
func (c *checker) ip(field, text string) (netip.Addr, bool) {
	ip, ok := source.ParseIP(text)
	if !ok {
		c.reject(field, "%.60q is not an IP address", text)
	}
	return ip, ok
}

// endpointIP refuses an address that can't be reached or that would lead back to the node itself.
func (c *checker) endpointIP(field, text string) (netip.Addr, bool) {
	ip, ok := c.ip(field, text)
	if !ok {
		return ip, false
	}
	if what := source.SpecialAddress(ip); what != "" {
		c.reject(field, "%s is %s, which neither an endpoint nor an external IP may be", ip, what)
		return ip, false
	}
	return ip, true
}
