package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// annotation of kube-proxy's DaemonSet has the affinity that it had before, as JSON, so that Restore brings back just that.
const annotation = "nodeproxy/affinity-before"

// operation is one of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"` // nil for a removal
}

const affinityPath = "/spec/template/spec/affinity"

// KeepOff returns the JSON patch by which the DaemonSet of kube-proxy leaves all nodes, or with migrate those with the label of nodeproxy. Which nodes
// it would go to otherwise stays as it is.
func (c *Cluster) KeepOff(migrate bool, say func(string, ...any)) ([]byte, error) {
	d, err := c.patchable()
	if err != nil {
		return nil, err
	}
	for _, other := range c.daemonSets {
		if other != d {
			say("%s runs a kube-proxy too, which the patch does not concern", other)
		}
	}
	before, _, err := d.before()
	if err != nil {
		return nil, err
	}
	after := keptOff(before, requirement(migrate))
	if reflect.DeepEqual(after, d.affinity) {
		say("%s: it is kept off already", d)
		return marshal(nil)
	}
	ops := d.unchanged()
	if d.Annotations == nil {
		ops = append(ops, operation{"add", "/metadata/annotations", map[string]any{}})
	}
	text, err := json.Marshal(before)
	if err != nil {
		return nil, err
	}
	ops = append(ops, operation{"add", annotationPath(), string(text)}, operation{"add", affinityPath, after})
	where := "all nodes"
	if migrate {
		where = "nodes with the label " + Label + "=" + labelOurs
	}
	say("%s: the patch keeps it off %s; -o kube-proxy-on undoes it", d, where)
	return marshal(ops)
}

// Restore returns the JSON patch that undoes KeepOff.
func (c *Cluster) Restore(say func(string, ...any)) ([]byte, error) {
	d, err := c.patchable()
	if err != nil {
		return nil, err
	}
	before, exact, err := d.before()
	if err != nil {
		return nil, err
	}
	_, annotated := d.Annotations[annotation]
	if reflect.DeepEqual(before, d.affinity) && !annotated {
		say("%s: nothing keeps it off", d)
		return marshal(nil)
	}
	if !exact {
		say("%s: its affinity has been changed since; only what kept it off is taken out", d)
	}
	ops := d.unchanged()
	if annotated {
		ops = append(ops, operation{Op: "remove", Path: annotationPath()})
	}
	switch {
	case before != nil:
		ops = append(ops, operation{"add", affinityPath, before})
	case d.affinity != nil:
		ops = append(ops, operation{Op: "remove", Path: affinityPath})
	}
	say("%s: the patch lets it run where it ran before", d)
	return marshal(ops)
}

// patchable returns the DaemonSet of kube-proxy, if a patch of it lasts.
func (c *Cluster) patchable() (*daemonSet, error) {
	d, err := c.kubeProxy()
	kind, _ := c.Kind()
	switch {
	case err != nil:
		return nil, err
	case d != nil && d.Labels["addonmanager.kubernetes.io/mode"] == "Reconcile":
		return nil, fmt.Errorf("%s: the provider keeps it as it is, so a patch would be undone within minutes; on AKS, switch kube-proxy off with az aks", d)
	case d != nil:
		return d, nil
	case kind == "k3s" || kind == "RKE2":
		return nil, fmt.Errorf("there is no DaemonSet to patch: kube-proxy is part of %s; start all servers with --disable-kube-proxy", kind)
	case slices.ContainsFunc(c.pods, isStatic):
		return nil, errors.New("there is no DaemonSet to patch: kube-proxy runs as a static pod, whose file has to be taken away on each node")
	}
	return nil, errors.New("there is no DaemonSet of kube-proxy to patch")
}

func annotationPath() string {
	return "/metadata/annotations/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(annotation)
}

// unchanged has the patch fail if the DaemonSet is not the one that was read any more.
func (d *daemonSet) unchanged() []operation {
	if d.Generation == 0 {
		return nil // from a file
	}
	return []operation{{"test", "/metadata/generation", d.Generation}}
}

// before returns the affinity that the DaemonSet had before it was kept off: as the annotation says, if that is what became the present
// one, and else the present one without what keeps it off.
func (d *daemonSet) before() (affinity any, exact bool, err error) {
	if text, ok := d.Annotations[annotation]; ok {
		if err := json.Unmarshal([]byte(text), &affinity); err != nil {
			return nil, false, fmt.Errorf("%s: annotation %s: %w", d, annotation, err)
		}
		for _, migrate := range []bool{true, false} {
			if reflect.DeepEqual(keptOff(affinity, requirement(migrate)), d.affinity) {
				return affinity, true, nil
			}
		}
	}
	affinity = letIn(d.affinity)
	return affinity, reflect.DeepEqual(affinity, d.affinity), nil
}

// nodeAffinity is the one by which kube-proxy's DaemonSet leaves nodes out, without what keeps it off those of nodeproxy; nil if there is none.
func (c *Cluster) nodeAffinity() (any, error) {
	d, _ := c.kubeProxy()
	if d == nil { // If there are several, Detect says so, and the cleanup goes to all nodes.
		return nil, nil
	}
	before, _, err := d.before()
	if node := object(object(before)["nodeAffinity"]); len(node) > 0 {
		return node, err
	}
	return nil, err
}

// requirement is what a node has to meet for kube-proxy.
func requirement(migrate bool) map[string]any {
	if migrate {
		return map[string]any{"key": Label, "operator": "NotIn", "values": []any{labelOurs}}
	}
	return map[string]any{"key": Label, "operator": "In", "values": []any{labelOther}}
}

const required = "requiredDuringSchedulingIgnoredDuringExecution"

// keptOff adds a requirement to each term of an affinity: a node has to meet one of them. A term without any requirement meets no node, and stays
// as it is.
func keptOff(affinity any, requirement map[string]any) any {
	terms := []any{}
	for _, term := range termsOf(affinity) {
		expressions, _ := term["matchExpressions"].([]any)
		if fields, _ := term["matchFields"].([]any); len(expressions)+len(fields) > 0 {
			term["matchExpressions"] = append(slices.Clone(expressions), any(requirement))
		}
		terms = append(terms, term)
	}
	if len(terms) == 0 {
		terms = append(terms, map[string]any{"matchExpressions": []any{requirement}})
	}
	return withTerms(affinity, terms)
}

// letIn takes our requirements out of an affinity, and what is empty then.
func letIn(affinity any) any {
	old, terms := termsOf(affinity), []any{}
	for _, term := range old {
		expressions, _ := term["matchExpressions"].([]any)
		kept := slices.DeleteFunc(slices.Clone(expressions), func(e any) bool {
			return reflect.DeepEqual(e, any(requirement(true))) || reflect.DeepEqual(e, any(requirement(false)))
		})
		if len(kept) < len(expressions) {
			if delete(term, "matchExpressions"); len(kept) > 0 {
				term["matchExpressions"] = kept
			}
			if len(term) == 0 {
				continue
			}
		}
		terms = append(terms, term)
	}
	if len(old) == 0 {
		return affinity
	}
	return withTerms(affinity, terms)
}

// termsOf returns copies of the terms of an affinity of which a node has to meet one.
func termsOf(affinity any) (out []map[string]any) {
	terms, _ := object(object(object(affinity)["nodeAffinity"])[required])["nodeSelectorTerms"].([]any)
	for _, t := range terms {
		out = append(out, object(t))
	}
	return out
}

// withTerms returns an affinity with other terms; without any, it leaves out what is empty then.
func withTerms(affinity any, terms []any) any {
	out := object(affinity)
	node := object(out["nodeAffinity"])
	selector := object(node[required])
	if len(terms) > 0 {
		selector["nodeSelectorTerms"] = terms
		node[required], out["nodeAffinity"] = selector, node
		return out
	}
	delete(node, required)
	if out["nodeAffinity"] = node; len(node) == 0 {
		delete(out, "nodeAffinity")
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// object returns a copy of a JSON object, without copying what is in it; an empty one for anything else.
func object(v any) map[string]any {
	out := map[string]any{}
	m, _ := v.(map[string]any)
	maps.Copy(out, m)
	return out
}

func marshal(ops []operation) ([]byte, error) {
	if ops == nil {
		return []byte("[]\n"), nil
	}
	text, err := json.MarshalIndent(ops, "", "  ")
	return append(text, '\n'), err
}
