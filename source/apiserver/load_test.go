package apiserver

import (
	"net/http"
	"net/http/httptest"
	"path"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"nodeproxy/source/apiserver/apiservertest"
)

// TestLoad holds that everything is asked for once, without a watch; that ServiceCIDRs may be missing, and nothing else.
func TestLoad(t *testing.T) {
	f := apiservertest.New(t)
	f.Serve(services, &v1.ServiceList{Items: []v1.Service{{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}}}})
	f.Fail(serviceCIDRs, http.StatusNotFound)
	cfg := Config{Client: clientOf(t, f.URL), NodeName: "node1"}
	b, err := Load(t.Context(), cfg)
	if err != nil || !b.Synced || len(b.Services) != 1 || b.Services[types.NamespacedName{Namespace: "default", Name: "web"}] == nil {
		t.Errorf("loaded %+v, %v", b, err)
	}
	for _, resource := range []string{services, endpointSlices, nodes, serviceCIDRs} {
		if f.Lists(resource) != 1 || f.Watches(resource) != 0 {
			t.Errorf("%s: %d lists, %d watches", resource, f.Lists(resource), f.Watches(resource))
		}
	}
	f.Fail(endpointSlices, http.StatusForbidden)
	if _, err := Load(t.Context(), cfg); err == nil {
		t.Error("no error though EndpointSlices can't be had")
	}
}

// TestLoadTimeLimit: an API server that does not deliver everything in time is an error that says what was waited for.
func TestLoadTimeLimit(t *testing.T) {
	t.Parallel()
	f := apiservertest.New(t)
	synctest.Test(t, func(t *testing.T) {
		answer := roundTrip(func(r *http.Request) (*http.Response, error) {
			if path.Base(r.URL.Path) == endpointSlices {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			w := httptest.NewRecorder()
			f.ServeHTTP(w, r)
			return w.Result(), nil
		})
		client, err := newClient(&rest.Config{Host: f.URL, QPS: -1, Transport: answer,
			ContentConfig: rest.ContentConfig{ContentType: "application/json", AcceptContentTypes: "application/json"}})
		require.NoError(t, err)
		_, err = Load(t.Context(), Config{Client: client, NodeName: "node1", loadTimeout: 50 * time.Millisecond})
		want := "listing endpointslices: the API server " + f.URL + " has not delivered everything within 50ms"
		if err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	})
}
