package apiserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

func TestClientConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, []byte(kubeconfig), 0o600))
	cfg, err := ClientConfig{Kubeconfig: file}.rest()
	require.NoError(t, err)
	if cfg.Host != "https://192.0.2.1:6443" || cfg.BearerToken != "t" || cfg.QPS != 5 || cfg.Burst != 10 ||
		cfg.ContentType != "application/vnd.kubernetes.protobuf" || !strings.HasPrefix(cfg.AcceptContentTypes, cfg.ContentType+",") {
		t.Errorf("defaults: %+v", cfg)
	}
	cfg, err = ClientConfig{Kubeconfig: file, Master: "https://192.0.2.2", ContentType: "application/json", QPS: 50, Burst: 100}.rest()
	require.NoError(t, err)
	if cfg.Host != "https://192.0.2.2" || cfg.BearerToken != "t" || cfg.QPS != 50 || cfg.Burst != 100 || cfg.ContentType != "application/json" {
		t.Errorf("all given: %+v", cfg)
	}
}

func TestClientConfigErrors(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	broken := filepath.Join(t.TempDir(), "broken")
	require.NoError(t, os.WriteFile(broken, []byte("clusters: 7"), 0o600))
	for want, c := range map[string]ClientConfig{
		"/no/such/file":        {Kubeconfig: "/no/such/file"},
		broken:                 {Kubeconfig: broken},
		"neither a kubeconfig": {},
		"http://[":             {Master: "http://["},
	} {
		if client, err := NewClient(c); err == nil || !strings.Contains(err.Error(), want) || client != nil {
			t.Errorf("%+v: %v, want an error with %q", c, err, want)
		}
	}
}
