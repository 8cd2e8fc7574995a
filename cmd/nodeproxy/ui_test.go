package main

import (
	"errors"
	"html"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/internal/nstest"
)

// hostileName is what nobody may name an object where the API server validates names; what manifests and slices hold is less certain.
const hostileName = `<img src=x onerror="document.body.dataset.owned=1"><script>document.body.dataset.owned=2</script>`

const pageServices = `
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/zone: zone-a}}
status: {addresses: [{type: InternalIP, address: 192.168.0.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {type: LoadBalancer, clusterIP: 10.96.0.10, externalTrafficPolicy: Local, ports: [{name: http, port: 80, targetPort: 8080, nodePort: 30080}]}
status: {loadBalancer: {ingress: [{ip: 192.0.2.10}]}}
---
apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec: {clusterIP: 10.96.0.11, ports: [{port: 81}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.244.1.5], nodeName: n1, zone: zone-a, targetRef: {kind: Pod, name: web-5d9}}
- {addresses: [10.244.2.6], nodeName: n2, zone: zone-b, targetRef: {kind: Pod, name: web-7fk}}
- {addresses: [10.244.2.7], nodeName: n2, conditions: {ready: false}, targetRef: {kind: Pod, name: '` + hostileName + `'}}
`

// TestPage: a browser shows the page of a running nodeproxy: the table, what a search leaves of it, and a Service with the endpoints that
// are left out; names become text. Nobody gets it where it is switched off.
func TestPage(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "a.yaml"), pageServices)
	flags := []string{"--manifests=" + dir, "--iptables-backend=nft", "--metrics-bind-address=127.0.0.1:10249", "--healthz-bind-address="}
	p := startProcess(t, nil, flags...)
	const url = "http://127.0.0.1:10249"
	status := func(path string) string { // In a process of its own: Go's client connects from other threads, which are elsewhere.
		code, _ := exec.Command("curl", "--silent", "--output", filepath.Join(t.TempDir(), "answer"), "--write-out", "%{http_code}", url+path).Output()
		return string(code)
	}
	eventually(t, "the first sync is told of", func() bool {
		text, _ := curl(url + "/ui/v1/history")
		return strings.Contains(text, `"name":"web"`)
	})
	for _, tt := range []struct {
		fragment       string
		want, unwanted []string
	}{
		{"", []string{"2 of 2 Service ports", "mode iptables", ">web</a>", ">cart</a>", "192.0.2.10", "2/3", "programmed", `class="bar"`, "The last ", " 0 failed, 1 changed Services."}, []string{`class="frontend"`}},
		{"#q=cart 10.96", []string{"1 of 2 Service ports", ">cart</a>"}, []string{">web</a>"}},
		{"#service=shop/web", []string{
			`class="frontend"`, "from another node, outside", ">10.244.1.5:8080  web-5d9 on n1 in zone-a<", `class="endpoint excluded"`, "not used: not ready", "not under Local: ",
			"forward, masqueraded", html.EscapeString("<img src=x"),
		}, nil},
		{"#service=shop/cart", []string{"What is wrong", "It has no selector either", `class="verdict refused"`, "reject: ", "no endpoints<"}, nil},
		{"#service=shop/wbe", []string{"did you mean shop/web?", "2 of 2 Service ports"}, []string{`class="frontend"`}},
	} {
		page := browse(t, url+"/ui/"+tt.fragment)
		has(t, page, tt.want...)
		lacks(t, page, append(tt.unwanted, "data-owned", "<img", "<script>")...)
	}
	require.NoError(t, p.Process.Signal(os.Interrupt))
	<-p.ended
	startProcess(t, nil, append(flags, "--ui=false")...)
	eventually(t, "metrics are served", func() bool { return status("/metrics") == "200" })
	if got := status("/ui/"); got != "404" {
		t.Errorf("with --ui=false: %s", got)
	}
}

// browse returns the page at a URL as a browser has it once it is loaded.
func browse(t *testing.T, url string) string {
	t.Helper()
	var page []byte
	eventually(t, "the browser has loaded "+url, func() bool {
		profile, err := os.MkdirTemp("", "np")
		require.NoError(t, err)
		defer os.RemoveAll(profile)
		// Time is the page's own, which stands still while it waits for an answer.
		cmd := exec.Command("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--user-data-dir="+profile,
			"--virtual-time-budget=5000", "--dump-dom", url)
		nstest.EndWith(t, cmd)
		if page, err = cmd.Output(); errors.Is(err, exec.ErrNotFound) {
			t.Fatal(err)
		} else if err != nil {
			t.Logf("%v", err)
		}
		return strings.Contains(string(page), `data-loaded="yes"`)
	})
	return string(page)
}
