package manifest
import ("testing";"strings")
func TestScratch(t *testing.T) {
	svc := "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - port: 80\n"
	for i, m := range []string{
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - port: 80\n   targetPort: 80\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n\tports:\n  - port: 80\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec: {ports: [{port: 80}\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: \"web\nspec: {ports: [{port: 80}]\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - port: eighty\n  - port: 80\n    nodePort: x\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n    port: 80\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  creationTimestamp: yesterday\nspec:\n  ports:\n  - port: 80\n    targetPort: {a: b}\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  annotations:\n    a: 60\n    b: yes\nspec:\n  prots: 1\n  ports:\n  - port: 80\n    foo: 1\n    port: 81\n",
		svc+"---\napiVersion: v2\nkind: Service\nmetadata:\n  name: x\n---\nkind: Servcie\napiVersion: v1\nmetadata: {name: x}\n---\nfoo: bar\n---\n- a\n---\nhello\n---\nkind: Widget\napiVersion: x.example.com/v1\nmetadata: {name: w}\n---\napiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: y}\n",
		"{\"apiVersion\":\"v1\",\n\"kind\":\"Service\",\n\"metadata\":{\"name\":\"web\"},\n\"spec\":{\"ports\":[{\"port\":80}\n,]}}\n",
		"{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[\n{\"apiVersion\":\"v1\",\n\"kind\":\"Service\",\n\"metadata\":{\"name\":\"web\"},\n\"spec\":{\"ports\":[{\"port\":0,\n\"protocol\":\"HTTP\"}\n]}}\n,\n{\"kind\":\"Service\",\"apiVersion\":\"v1\",\"metadata\":{\"name\":\"b\"},\n\"spec\":{\"ports\":[{\"port\":1,\"x\":1}]}}]}",
		"apiVersion: v1\nkind: List\nitems:\n- "+strings.ReplaceAll(strings.TrimSpace(svc),"\n","\n  ")+"\n- apiVersion: v1\n  kind: Service\n  metadata: {name: b}\n  spec:\n    ports:\n    - {port: 99999}\n",
		strings.Replace(svc, "name: web", "name: \"a\\n-A KUBE-SERVICES -j ACCEPT\"", 1),
		strings.Replace(svc, "name: web", "name: "+strings.Repeat("a", 300), 1),
		strings.Replace(svc, "port: 80", "port: 80\n    name: 'x\" -j DROP'", 1),
		"apiVersion: v1\nkind: Service\nmetadata: &a\n  name: web\n  x: *a\n",
		"a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: [*f,*f,*f,*f,*f,*f,*f,*f,*f,*f]\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\x01\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: *nope\n",
		"apiVersion: v1\nkind: Service\nmetadata:\n  name: \xff\xfe\n",
	} {
		b, f := load(t, m)
		t.Logf("%d\n%s\n--\n%s", i, describe(b), f)
	}
}
