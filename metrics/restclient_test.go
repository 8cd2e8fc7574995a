package metrics

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// listening is the one that client-go tells in this process, however often the test runs.
var listening = sync.OnceValue(func() *RESTClient {
	r := NewRESTClient()
	r.Listen()
	return r
})

// TestRESTClient asks a server that answers one request and refuses another.
func TestRESTClient(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/nodes") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
	}))
	defer server.Close()
	s := New(Config{Mode: iptables})
	s.CollectRESTClient(listening())
	client, err := rest.RESTClientFor(&rest.Config{Host: server.URL, APIPath: "/api", ContentConfig: rest.ContentConfig{
		GroupVersion:         &schema.GroupVersion{Version: "v1"},
		NegotiatedSerializer: serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion(),
	}})
	require.NoError(t, err)
	if _, err := client.Get().Resource("services").DoRaw(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Get().Resource("nodes").DoRaw(context.Background()); err == nil {
		t.Fatal("nodes can be listed")
	}
	host := strings.TrimPrefix(server.URL, "http://")
	holds(t, s, map[string]float64{
		"rest_client_requests_total code=200 host=" + host + " method=GET": 1,
		"rest_client_requests_total code=403 host=" + host + " method=GET": 1,
		"rest_client_request_duration_seconds host=" + host + " verb=GET":  2,
	})
}
