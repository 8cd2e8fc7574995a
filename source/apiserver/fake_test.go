package apiserver

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"nodeproxy/source"
	"nodeproxy/source/apiserver/apiservertest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil { // They wait most of the time, also on one processor.
		panic(err)
	}
	os.Exit(m.Run())
}

// recorder is a Sink that remembers.
type recorder struct {
	t  *testing.T
	mu sync.Mutex
	// batches in order, and what follows from them
	batches  []source.Batch
	synced   int
	services map[types.NamespacedName]*v1.Service
}

func (r *recorder) Apply(b source.Batch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, b)
	if b.Synced {
		r.synced++
	}
	for name, svc := range b.Services {
		if svc == nil {
			delete(r.services, name)
		} else {
			r.services[name] = svc
		}
	}
}

// sees waits until a condition holds of what was recorded.
func (r *recorder) sees(what string, condition func() bool) {
	r.t.Helper()
	for begun := time.Now(); time.Since(begun) < time.Minute; time.Sleep(2 * time.Millisecond) {
		r.mu.Lock()
		ok := condition()
		r.mu.Unlock()
		if ok {
			return
		}
	}
	r.t.Fatalf("%s: not within a minute; %d batches, %d Services, synced %d times", what, len(r.batches), len(r.services), r.synced)
}

// clientOf returns a client that speaks JSON with a server.
func clientOf(t *testing.T, url string) *Client {
	client, err := NewClient(ClientConfig{Master: url, ContentType: "application/json", AcceptContentTypes: "application/json", QPS: -1})
	require.NoError(t, err)
	return client
}

// start runs a Source against the fake until the test ends.
func start(t *testing.T, f *apiservertest.Server, change func(*Config)) (*Source, *recorder) {
	cfg := Config{Client: clientOf(t, f.URL), NodeName: "n1", Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	s, sink := New(cfg), &recorder{t: t, services: map[types.NamespacedName]*v1.Service{}}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context(), sink) }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			assert.NoError(t, err, "Run")
		case <-time.After(time.Minute):
			t.Error("Run goes on after its context has ended")
		}
	})
	return s, sink
}

func serviceAt(version int, name string) *v1.Service {
	return &v1.Service{
		TypeMeta:   metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: fmt.Sprint(version)},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.7"},
	}
}

func serviceList(version int, items ...*v1.Service) *v1.ServiceList {
	out := &v1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(version)}}
	for _, s := range items {
		out.Items = append(out.Items, *s)
	}
	return out
}

func serviceCIDRList(cidrs ...string) *networking.ServiceCIDRList {
	out := &networking.ServiceCIDRList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
	out.Items = append(out.Items, networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes", ResourceVersion: "3"},
		Spec: networking.ServiceCIDRSpec{CIDRs: cidrs}})
	return out
}

func nodeList(names ...string) *v1.NodeList {
	out := &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
	for _, name := range names {
		out.Items = append(out.Items, v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "3"}})
	}
	return out
}
