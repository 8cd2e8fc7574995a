package apiserver

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// ClientConfig says how to reach an API server. The fields are those of KubeProxyConfiguration's clientConnection; the
// zero value takes the credentials of the pod that the program runs in.
type ClientConfig struct {
	// Kubeconfig is the path of a kubeconfig file. Its current context is used.
	Kubeconfig string
	// Master is the API server's URL; it goes before the one in Kubeconfig.
	Master string
	// AcceptContentTypes and ContentType are MIME types, of answers (a comma-separated list, best first) and of requests;
	// empty means protobuf, with JSON as what else is accepted.
	AcceptContentTypes, ContentType string
	// QPS and Burst limit requests to the API server: so many a second in the long run, so many at once. Zero means 5 and
	// 10. A negative QPS lifts the limit. An open watch counts as one request.
	QPS   float32
	Burst int
	// UserAgent names the program to the API server; empty means client-go's own text.
	UserAgent string
}

// NewClient returns a client for the API server that c describes. It makes no request; an API server that can't be
// reached, or that takes no such credentials, shows when the client is used.
func NewClient(c ClientConfig) (kubernetes.Interface, error) {
	cfg, err := c.rest()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("client for the API server %s: %w", cfg.Host, err)
	}
	return client, nil
}

func (c ClientConfig) rest() (*rest.Config, error) {
	cfg, err := c.base()
	if err != nil {
		return nil, err
	}
	cfg.ContentType, cfg.AcceptContentTypes = c.ContentType, c.AcceptContentTypes
	if cfg.ContentType == "" {
		cfg.ContentType = runtime.ContentTypeProtobuf
	}
	if cfg.AcceptContentTypes == "" {
		cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	}
	cfg.QPS, cfg.Burst = c.QPS, c.Burst
	if cfg.QPS == 0 {
		cfg.QPS = rest.DefaultQPS
	}
	if cfg.Burst == 0 {
		cfg.Burst = rest.DefaultBurst
	}
	cfg.UserAgent = c.UserAgent
	return cfg, nil
}

// base reads where the API server is and what to tell it.
func (c ClientConfig) base() (*rest.Config, error) {
	if c.Kubeconfig == "" && c.Master == "" {
		cfg, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("neither a kubeconfig nor an API server's URL is given, and there is none for pods: %w", err)
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
