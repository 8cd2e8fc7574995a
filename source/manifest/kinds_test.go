package manifest

import (
	"strings"
	"testing"
)

// TestOtherGroups holds that kinds are distinguished by their group: a Service of another API is not proxied, and takes nothing away from
// the one of Kubernetes that has its name; of each kind that is said once.
func TestOtherGroups(t *testing.T) {
	t.Parallel()
	web, line := at("web", 1)
	theirs := "apiVersion: example.com/v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.2, ports: [{port: 81}]}\n"
	knative := "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: NAME}\nspec: {template: {}}\n"
	nodes := "apiVersion: metal.example.com/v1\nkind: Node\nmetadata: {name: node-1}\n"
	batch, f := load(t, strings.Join([]string{theirs, web, strings.Replace(knative, "NAME", "web", 1),
		strings.Replace(knative, "NAME", "other", 1), nodes, nodes}, "---\n"))
	same(t, "objects", describe(batch), line)
	for want, times := range map[string]int{
		"m.yaml:1: Service.example.com web: a Service of example.com/v1 is not the one of v1; not proxied":                  1,
		"m.yaml:14: Service.serving.knative.dev web: a Service of serving.knative.dev/v1 is not the one of v1; not proxied": 1,
		"m.yaml:24: Node.metal.example.com node-1: a Node of metal.example.com/v1 is not the one of v1; not proxied":        1,
		"problem": 0,
	} {
		if got := strings.Count(f.String(), want); got != times {
			t.Errorf("%q is said %d times, want %d:\n%s", want, got, times, f)
		}
	}
	if _, f := load(t, strings.Replace(web, "v1", "apps/v1", 1)); !strings.Contains(f.String(), `"apps/v1" has no kind Service; it is read in v1`) {
		t.Errorf("a group of Kubernetes without the kind: %s", f)
	}
}
