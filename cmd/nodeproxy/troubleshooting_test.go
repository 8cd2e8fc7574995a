package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/inspect"
	"nodeproxy/plan"
	"nodeproxy/proxier"
	"nodeproxy/source"
	"nodeproxy/source/manifest"
)

// symptoms are the transcripts of docs/troubleshooting.md: causes by symptom, each with the scenario of testdata/script or the entry of
// onNode that has what explain says.
var symptoms = []struct {
	symptom string
	causes  [][2]string
}{
	{"Connections are refused", [][2]string{
		{"no Pod has an address", "no-endpoints"},
		{"a typing error in the selector (where Pods can be read: from manifests, or with `--kubeconfig`)", "selector"},
		{"the Pods are in another namespace", "selector-namespace"},
		{"no Pod is ready", "not-ready"},
		{"the containers do not run (where Pods can be read)", "crash-loop"},
		{"no port of the Pods has the name of the Service's port", "port-name"},
		{"no Pod has a port of the targetPort's name (where Pods can be read)", "port-name-pods"},
		{"the Pods wait for a readiness gate (where Pods can be read)", "readiness-gate"},
		{"the Pods have no address of the Service's family", "family"},
		{"an EndpointSlice made by hand has a typing error in its label", "slice-astray"},
		{"nothing listens at the endpoint", "refuses"},
		{"what listens at the endpoint does so at a loopback address alone", "loopback"},
	}},
	{"Connections hang, from everywhere or from some clients", [][2]string{
		{"policy Local, and no endpoint on this node", "local"},
		{"the client is not within the source ranges", "source-ranges"},
		{"policy Local, and the endpoints name this node in another way", "node-name"},
		{"another program's rule drops the packets", "drop"},
		{"another program's rule keeps the packets from being tracked", "untracked"},
		{"there is no way to the endpoints: no route, or no forwarding", "unrouted"},
		{"an endpoint is the cluster IP of another Service", "service-endpoint"},
		{"the EndpointSlices lag behind the Pods (where Pods can be read)", "pod-gone"},
	}},
	{"Another program or Service answers, or none", [][2]string{
		{"a program of the node listens at the node port", "port"},
		{"another Service has the address and port", "address-taken"},
		{"the address can't be a Service's", "address-refused"},
		{"a load balancer has not given the Service an address", "load-balancer"},
		{"node ports answer at the Node's primary addresses alone (mode nftables), and there is no Node of this name", "no-node"},
		{"node ports answer at the Node's primary addresses alone, and the machine does not have them", "not-mine"},
		{"the load balancer's address is not for nodes, and there are no node ports", "nothing-outside"},
		{"the client has the other address family", "one-family"},
		{"the targetPort is one that no container declares", "target-port"},
		{"the containers declare the targetPort for another protocol", "port-protocol"},
		{"the selector also matches Pods of another app", "selector-others"},
		{"Pods get traffic before they are ready", "published"},
	}},
	{"Endpoints get more or less traffic than they should", [][2]string{
		{"zone hints that name no zone of here", "zone-hints-elsewhere"},
		{"only terminating endpoints are left", "terminating"},
		{"somebody has made an EndpointSlice beside those of the selector", "not-a-pod"},
		{"endpoints are listed twice, and not ready in one of the places", "listed-twice"},
	}},
	{"The rules are not those of the Service", [][2]string{
		{"the file of the Service can't be read since it was last saved", "broken"},
		{"a program has flushed a table", "flushed"},
		{"the kernel refuses the Service", "refused"},
		{"the API server has been away for ten minutes", "away"},
	}},
}

// TestTroubleshooting: docs/troubleshooting.md has what explain says in the tests. UPDATE=1 writes it anew.
func TestTroubleshooting(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, s := range symptoms {
		fmt.Fprintf(&text, "\n### %s\n", s.symptom)
		for _, c := range s.causes {
			fmt.Fprintf(&text, "\n%s%s:\n\n```text\n$ nodeproxy explain web\n%s\n```\n", strings.ToUpper(c[0][:1]), c[0][1:], saysOf(t, c[1]))
		}
	}
	const file, begin, end = "../../docs/troubleshooting.md", "<!-- transcripts: TestTroubleshooting writes them -->\n", "\n<!-- end of transcripts -->\n"
	documents(t, file, between(t, file, begin, end, text.String()))
}

// saysOf returns what explain says in a test.
func saysOf(t *testing.T, name string) string {
	t.Helper()
	if text, is := onNode[name]; is {
		return strings.TrimSpace(text)
	}
	raw := readFile(t, filepath.Join("testdata", "script", "explain-"+name+".txtar"))
	_, want, found := strings.Cut(raw, "-- want --\n")
	if !found || !strings.Contains(want, "\nWhat ") {
		t.Fatalf("scenario %s says nothing", name)
	}
	return told(want)
}

// TestAwayAPIServer: what explain says when the API server has been away for ten minutes.
func TestAwayAPIServer(t *testing.T) {
	t.Parallel()
	batch, err := manifest.Read(manifest.Config{Path: "web"}, strings.NewReader(checkedService))
	require.NoError(t, err)
	state := proxier.NewState("n1", plan.Settings{}, plan.Families[:], nil)
	state.Apply(batch)
	state.Update()
	n := &inspect.Node{Mode: "iptables", View: func(read func(*proxier.State)) { read(state) }, Reality: &inspect.Reality{
		Watches: func() []source.Watch {
			return []source.Watch{{Resource: "services", Synced: true, Age: 10 * time.Minute, Failure: "dial tcp 192.0.2.9:6443: connect: connection refused"}}
		},
	}}
	e, err := n.Explain(plan.Service{Namespace: "default", Name: "web"})
	require.NoError(t, err)
	n.Check(t.Context(), e)
	var text strings.Builder
	require.NoError(t, inspect.WriteExplanation(&text, e, time.Now()))
	if got, want := told(text.String()), strings.TrimSpace(onNode["away"]); got != want || !e.Problem() {
		t.Errorf("explain says %s\nwant %s", got, want)
	}
}
