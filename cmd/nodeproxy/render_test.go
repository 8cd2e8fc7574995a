package main

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
	"nodeproxy/source/controlplane"
	"nodeproxy/source/manifest"
	"nodeproxy/source/sourcetest"
)

// examples are manifests, and exampleCIDRs the ranges of their cluster IPs.
const (
	examples     = "../../examples"
	exampleCIDRs = "10.96.0.0/16,fd00:10:96::/112"
)

// TestRenderCluster: render prints the same bytes for a cluster as for manifests of the same objects, in all modes, having listed
// everything once and written nothing.
func TestRenderCluster(t *testing.T) {
	t.Parallel()
	batch := loadExamples(t)
	for _, m := range modes {
		for _, family := range []string{"ipv4", "ipv6", "all"} {
			t.Run(m.name+"/"+family, func(t *testing.T) {
				t.Parallel()
				f := apiservertest.New(t)
				serve(f, batch)
				flags := []string{"--mode=" + m.name, "--family=" + family, "--node-name=node1"}
				want, _, err := rendered(append(flags, "--manifests="+examples, "--service-cidr="+exampleCIDRs)...)
				if err != nil || !strings.Contains(want, "10.96.") && !strings.Contains(want, "fd00:10:96:") {
					t.Fatalf("%v; rules of the manifests:\n%s", err, want)
				}
				got, problems, err := rendered(append(flags, "--kubeconfig="+apiservertest.Kubeconfig(t, f.URL))...)
				if err != nil {
					t.Fatalf("%v: %s", err, problems)
				}
				if got != want {
					t.Errorf("rules of the cluster:\n%s\nof the manifests:\n%s", got, want)
				}
				for _, resource := range []string{"services", "endpointslices", "nodes", "servicecidrs"} {
					if f.Lists(resource) != 1 || f.Watches(resource) != 0 {
						t.Errorf("%s: %d lists and %d watches", resource, f.Lists(resource), f.Watches(resource))
					}
				}
				if n := f.Created(); n != 0 {
					t.Errorf("%d events were written", n)
				}
			})
		}
	}
}

// TestRenderClusterProblems: what the cluster lacks, and a Service that asks for the API server's own address, are reported as run
// does. The API server is behind a proxy, for no Service gets an address of the loopback.
func TestRenderClusterProblems(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	f.Serve("services", &v1.ServiceList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceList"},
		Items: []v1.Service{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "thief"},
			Spec: v1.ServiceSpec{ClusterIP: "10.96.0.9", ClusterIPs: []string{"10.96.0.9"}, ExternalIPs: []string{"192.0.2.1"},
				Ports: []v1.ServicePort{{Port: 6443, Protocol: v1.ProtocolTCP}}},
		}},
	})
	f.Fail("servicecidrs", http.StatusForbidden)
	cmd := exec.Command("nodeproxy", "render", "--node-name=worker-7", "--family=ipv4", "--master=http://192.0.2.1:6443")
	cmd.Env = append(os.Environ(), "HTTP_PROXY="+f.URL, "NO_PROXY=")
	rules, problems, err := output(cmd)
	if err != nil || !strings.Contains(rules, "10.96.0.9/32") {
		t.Fatalf("%v: %s\n%s", err, problems, rules)
	}
	lacks(t, rules, "192.0.2.1/32") // A Service would get the address and port of the API server.
	has(t, problems,
		"problem: Node worker-7: no Node of this name is known; zone hints are ignored; ",
		"problem: Service default/thief: spec.ports: external IP 192.0.2.1:6443/TCP is the address and port of the API server itself; ",
		"problem: servicecidrs: they may not be listed: ",
	)
}

// loadExamples returns the objects of the examples, with those that the control plane would make of them.
func loadExamples(t *testing.T) source.Batch {
	t.Helper()
	cidrs := strings.Split(exampleCIDRs, ",")
	batch, err := manifest.Load(manifest.Config{
		Path: examples, Report: func(source.Finding) {}, Log: slog.New(slog.DiscardHandler),
		Ranges: controlplane.Ranges{ServiceCIDRs: sourcetest.Prefixes(cidrs...)},
	})
	if err != nil || len(batch.Services) < 5 || len(batch.EndpointSlices) < 5 || len(batch.Nodes) < 2 {
		t.Fatalf("%v: %d Services, %d EndpointSlices, %d Nodes", err, len(batch.Services), len(batch.EndpointSlices), len(batch.Nodes))
	}
	batch.ServiceCIDRs = map[string]*networking.ServiceCIDR{"kubernetes": {
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networking.ServiceCIDRSpec{CIDRs: cidrs},
	}}
	return batch
}

// serve makes an API server answer with the objects of a batch.
func serve(f *apiservertest.Server, b source.Batch) {
	services := &v1.ServiceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceList"}}
	for _, o := range b.Services {
		services.Items = append(services.Items, *o)
	}
	endpoints := &discovery.EndpointSliceList{TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSliceList"}}
	for _, o := range b.EndpointSlices {
		endpoints.Items = append(endpoints.Items, *o)
	}
	nodes := &v1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}}
	for _, o := range b.Nodes {
		nodes.Items = append(nodes.Items, *o)
	}
	cidrs := &networking.ServiceCIDRList{TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDRList"}}
	for _, o := range b.ServiceCIDRs {
		cidrs.Items = append(cidrs.Items, *o)
	}
	f.Serve("services", services)
	f.Serve("endpointslices", endpoints)
	f.Serve("nodes", nodes)
	f.Serve("servicecidrs", cidrs)
}

// rendered returns what render prints with these flags.
func rendered(flags ...string) (rules, problems string, err error) {
	return output(exec.Command("nodeproxy", append([]string{"render"}, flags...)...))
}

func output(cmd *exec.Cmd) (stdout, stderr string, err error) {
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// TestOpenPipe: a named pipe is read once somebody writes to it, and is given up where nobody does.
func TestOpenPipe(t *testing.T) {
	t.Parallel()
	path, other := filepath.Join(t.TempDir(), "pipe"), filepath.Join(t.TempDir(), "other")
	require.NoError(t, errors.Join(unix.Mkfifo(path, 0o600), unix.Mkfifo(other, 0o600)))
	if f, err := openPipe(other, time.Millisecond); err == nil || !strings.Contains(err.Error(), "no program has opened for writing within 1ms") {
		t.Errorf("%v, %v", f, err)
	}
	written := make(chan error, 1)
	go func() { written <- os.WriteFile(path, []byte("text"), 0) }()
	f, err := openPipe(path, time.Minute)
	require.NoError(t, err)
	defer f.Close()
	assert.NoError(t, <-written)
	if text, err := io.ReadAll(f); err != nil || string(text) != "text" {
		t.Errorf("%q, %v", text, err)
	}
}
