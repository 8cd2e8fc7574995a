package manifest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"pgregory.net/rapid"

	_ "nodeproxy/internal/seed"
	"nodeproxy/plan"
	"nodeproxy/source"
	"nodeproxy/source/controlplane"
)

// tightConfig has so little to hand out that collisions and refusals are frequent.
func tightConfig() *Config {
	return &Config{Path: "x", Ranges: controlplane.Ranges{
		ServiceCIDRs: prefixes("10.96.0.0/27", "fd00:10:96::/120"), NodePorts: plan.PortRange{First: 30000, Last: 30039},
	}}
}

// drawObject draws the manifest of one object. The number makes its name unique within its kind.
func drawObject(t *rapid.T, n int) string {
	name := fmt.Sprintf("o%d", n)
	app := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "app")
	switch rapid.SampledFrom([]string{"service", "service", "service", "pod", "slice", "endpoints", "node", "cidr"}).Draw(t, "kind") {
	case "pod":
		return strings.TrimPrefix(strings.Replace(pod(name, fmt.Sprintf("10.0.0.%d", n+1)), "app: web", "app: "+app, 1), "---\n")
	case "slice":
		return slice(name, fmt.Sprintf("o%d", rapid.IntRange(0, 20).Draw(t, "owner")), "IPv4", "ports: [{port: 80}]",
			fmt.Sprintf("endpoints: [{addresses: [10.1.0.%d]}]", n+1))
	case "endpoints":
		return fmt.Sprintf("apiVersion: v1\nkind: Endpoints\nmetadata: {name: o%d}\nsubsets: [{addresses: [{ip: 10.2.0.1}], ports: [{port: 80}]}]\n", n)
	case "node":
		return "apiVersion: v1\nkind: Node\nmetadata: {name: node-a-" + name + ", labels: {topology.kubernetes.io/zone: z}}\n"
	case "cidr":
		return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: %s}\nspec: {cidrs: [10.%d.0.0/16]}\n",
			name, rapid.IntRange(100, 103).Draw(t, "range"))
	}
	spec := []string{"type: " + rapid.SampledFrom([]string{"ClusterIP", "NodePort", "LoadBalancer"}).Draw(t, "type")}
	if rapid.Bool().Draw(t, "selects") {
		spec = append(spec, "selector: {app: "+app+"}")
	}
	if rapid.Bool().Draw(t, "dual") {
		spec = append(spec, "ipFamilyPolicy: PreferDualStack")
	}
	if rapid.IntRange(0, 3).Draw(t, "explicit") == 0 {
		spec = append(spec, fmt.Sprintf("clusterIP: 10.96.0.%d", rapid.IntRange(1, 30).Draw(t, "ip")))
	}
	port := "{port: 80}"
	if spec[0] != "type: ClusterIP" && rapid.IntRange(0, 3).Draw(t, "nodePort") == 0 {
		port = fmt.Sprintf("{port: 80, nodePort: %d}", rapid.IntRange(30000, 30039).Draw(t, "port"))
	}
	return service(name, append(spec, "ports: ["+port+"]")...)
}

// drawFiles spreads objects over files in any order.
func drawFiles(t *rapid.T, objects []string) map[string]string {
	files := map[string]string{}
	n := rapid.IntRange(1, 4).Draw(t, "files")
	for _, o := range rapid.Permutation(objects).Draw(t, "order") {
		name := fmt.Sprintf("%s%d.yaml", rapid.SampledFrom([]string{"x", "y"}).Draw(t, "prefix"), rapid.IntRange(1, n).Draw(t, "file"))
		files[name] += "---\n" + o
	}
	return files
}

// player plays versions of files to a store and keeps what it delivers.
type player struct {
	s   *store
	all source.Batch
}

func newPlayer() *player {
	s, err := newStore(tightConfig())
	if err != nil {
		panic(err)
	}
	return &player{s: s}
}

func (p *player) put(files map[string]string, gone ...string) {
	var readings []*reading
	for _, name := range slices.Sorted(maps.Keys(files)) {
		readings = append(readings, &reading{path: name, data: []byte(files[name])})
	}
	p.all.Merge(p.s.update(readings, gone))
	withoutGone(p.all.Services)
	withoutGone(p.all.EndpointSlices)
	withoutGone(p.all.ServiceCIDRs)
	maps.DeleteFunc(p.all.Nodes, func(_ string, node *v1.Node) bool { // Merge makes one that is being deleted of one that is gone.
		return node == nil || node.DeletionTimestamp != nil
	})
}

func withoutGone[K comparable, V any](objects map[K]*V) {
	maps.DeleteFunc(objects, func(_ K, v *V) bool { return v == nil })
}

func (p *player) equals(t *rapid.T, o *player, how string) {
	if !equality.Semantic.DeepEqual(p.all, o.all) {
		t.Fatalf("%s:\n%s\nwant:\n%s", how, describe(p.all), describe(o.all))
	}
}

// TestResultFollowsFromObjectsAlone holds that names, order and splitting of files, and the order of events on the way,
// make no difference to what is delivered in the end.
func TestResultFollowsFromObjectsAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var objects []string
		for i := range rapid.IntRange(0, 20).Draw(t, "objects") {
			objects = append(objects, drawObject(t, i))
		}
		want := newPlayer()
		want.put(map[string]string{"all.yaml": strings.Join(objects, "---\n")})

		split := newPlayer()
		split.put(drawFiles(t, objects))
		split.equals(t, want, "split into files")

		// On the way: other objects, other versions of the same, broken files.
		step := newPlayer()
		for range rapid.IntRange(1, 3).Draw(t, "steps") {
			var others []string
			for i := range rapid.IntRange(0, 20).Draw(t, "others") {
				others = append(others, drawObject(t, i))
			}
			files := drawFiles(t, append(others, rapid.SampledFrom([]string{"a: [\n", "kind: Service\n", "# nothing\n"}).Draw(t, "fault")))
			step.put(files)
		}
		last := drawFiles(t, objects)
		order := rapid.Permutation(slices.Sorted(maps.Keys(last))).Draw(t, "arrival")
		for _, name := range order {
			step.put(map[string]string{name: last[name]})
		}
		for _, name := range slices.Sorted(maps.Keys(step.s.files)) {
			if !slices.Contains(order, name) {
				step.put(nil, name)
			}
		}
		step.equals(t, want, "step by step")
	})
}

// TestAllocationsDiffer holds that nothing is handed out twice.
func TestAllocationsDiffer(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var objects []string
		for i := range rapid.IntRange(0, 40).Draw(t, "objects") {
			objects = append(objects, drawObject(t, i))
		}
		p := newPlayer()
		p.put(map[string]string{"all.yaml": strings.Join(objects, "---\n")})
		owners := map[string]string{}
		claim := func(what, owner string) {
			if owners[what] != "" {
				t.Fatalf("%s is given to %s and %s", what, owners[what], owner)
			}
			owners[what] = owner
		}
		for name, svc := range p.all.Services {
			for _, ip := range svc.Spec.ClusterIPs {
				claim(ip, name.String())
			}
			for _, port := range svc.Spec.Ports {
				if port.NodePort != 0 {
					claim(fmt.Sprintf("%d/%s", port.NodePort, port.Protocol), name.String())
				}
			}
		}
	})
}
