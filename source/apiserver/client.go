package apiserver

import (
	"cmp"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	events "k8s.io/api/events/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/flowcontrol"
)

// ClientConfig says how to reach an API server. The fields are those of KubeProxyConfiguration's clientConnection; the
// zero value takes the credentials of the pod that the program runs in.
type ClientConfig struct {
	// Kubeconfig is the path of a kubeconfig file. Its current context is used.
	Kubeconfig string
	// Master is the API server's URL; it takes precedence over the one in Kubeconfig.
	Master string
	// AcceptContentTypes lists the MIME types of answers (comma-separated, best first), ContentType is that of requests; empty
	// means protobuf, with JSON as the alternative for answers.
	AcceptContentTypes, ContentType string
	// QPS and Burst limit requests to the API server: QPS per second in the long run, Burst at once. Zero means 5 and 10. A
	// negative QPS lifts the limit. Watches are not limited.
	QPS   float32
	Burst int
	// UserAgent names the program to the API server; empty means client-go's own text.
	UserAgent string
	// Transport, if not nil, answers in place of the network.
	Transport http.RoundTripper
}

// Client makes requests to an API server, for the API groups that this program uses. It is not client-go's clientset, which links
// the types of every group and would more than double the size of the program.
type Client struct {
	core, discovery, networking, events rest.Interface
	server                              *url.URL
}

// NewClient returns a client for the API server that c describes. It makes no request; an API server that can't be reached, or that
// rejects the credentials, shows when the client is used.
func NewClient(c ClientConfig) (*Client, error) {
	cfg, err := c.rest()
	if err != nil {
		return nil, err
	}
	out, err := newClient(cfg)
	if err != nil {
		return nil, fmt.Errorf("client for the API server %s: %w", cfg.Host, err)
	}
	return out, nil
}

const (
	// connectTimeout is how long a connection may take to be made. The kernel sends its first packet again after one second and after
	// three, so a server that is back is reached soon, and not only with the packet of its thirty-first second.
	connectTimeout = 5 * time.Second
	// A connection on which nothing has arrived for askAfter is asked for a sign of life, and given up without one for answerWithin: so long is
	// a change late at most where packets are lost and nobody says so. By client-go's default it would be 45 seconds. Of one question every ten
	// seconds, an API server with 5,000 nodes has 500 a second; while changes come, there are none.
	askAfter, answerWithin = 10 * time.Second, 5 * time.Second
	// unreadAnswer is how much of an answer may have come, in bytes, and wait for being read; what follows stays with the API server. By Go's
	// default it would be 4 MiB for each of the lists at the start, and this program takes 64 MiB in all. Where packets take 10 ms to and fro,
	// an answer comes with 50 MB/s at most, and with 5 where they take 100 ms.
	unreadAnswer = 512 << 10
)

// adjusted sets how client-go's transport uses its connections.
func adjusted(rt http.RoundTripper) http.RoundTripper {
	inner := rt
	for {
		switch t := inner.(type) {
		case utilnet.RoundTripperWrapper:
			inner = t.WrappedRoundTripper()
			continue
		case *http.Transport:
			t.HTTP2 = &http.HTTP2Config{SendPingTimeout: askAfter, PingTimeout: answerWithin, MaxReceiveBufferPerStream: unreadAnswer}
		}
		return rt
	}
}

func newClient(cfg *rest.Config) (*Client, error) {
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{Timeout: connectTimeout}).DialContext
	}
	cfg.Wrap(adjusted)
	cfg.UserAgent = cmp.Or(cfg.UserAgent, rest.DefaultKubernetesUserAgent())
	if cfg.QPS > 0 {
		cfg.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(cfg.QPS, cfg.Burst) // one for all groups
	}
	connections, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, err
	}
	out := &Client{}
	if out.server, _, err = rest.DefaultServerUrlFor(cfg); err != nil {
		return nil, err
	}
	for _, group := range []struct {
		version schema.GroupVersion
		client  *rest.Interface
	}{
		{v1.SchemeGroupVersion, &out.core}, {discovery.SchemeGroupVersion, &out.discovery},
		{networking.SchemeGroupVersion, &out.networking}, {events.SchemeGroupVersion, &out.events},
	} {
		cfg := rest.CopyConfig(cfg)
		cfg.GroupVersion, cfg.APIPath = &group.version, "/apis"
		if group.version.Group == "" {
			cfg.APIPath = "/api"
		}
		cfg.NegotiatedSerializer = codecs.WithoutConversion()
		if *group.client, err = rest.RESTClientForConfigAndClient(cfg, connections); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// What objects look like in requests and answers.
var (
	scheme     = newScheme()
	codecs     = serializer.NewCodecFactory(scheme)
	parameters = runtime.NewParameterCodec(scheme)
)

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"}) // Status, which every group answers with
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, discovery.AddToScheme, networking.AddToScheme, events.AddToScheme} {
		utilruntime.Must(add(s))
	}
	return s
}

func (c ClientConfig) rest() (*rest.Config, error) {
	cfg, err := c.base()
	if err != nil {
		return nil, err
	}
	cfg.ContentType = cmp.Or(c.ContentType, runtime.ContentTypeProtobuf)
	cfg.AcceptContentTypes = cmp.Or(c.AcceptContentTypes, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON)
	cfg.QPS, cfg.Burst = cmp.Or(c.QPS, rest.DefaultQPS), cmp.Or(c.Burst, rest.DefaultBurst)
	cfg.UserAgent = c.UserAgent
	cfg.Transport = c.Transport
	return cfg, nil
}

// base returns client-go's configuration for the API server and the credentials.
func (c ClientConfig) base() (*rest.Config, error) {
	if c.Kubeconfig == "" && c.Master == "" {
		cfg, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("neither a kubeconfig nor an API server's URL is given, and this is not a pod with credentials: %w", err)
		}
		return cfg, nil
	}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig},
		&clientcmd.ConfigOverrides{ClusterInfo: api.Cluster{Server: c.Master}}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %q: %w", c.Kubeconfig, err)
	}
	return cfg, nil
}
