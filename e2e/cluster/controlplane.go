// Package cluster runs a real control plane (etcd, kube-apiserver, kube-controller-manager) on a node of a
// harness.World, and tests nodeproxy against it: Services and Pods are API objects, EndpointSlices are written by the
// real controllers, and the Pods' containers are the harness's servers, whose kubelet the test plays.
package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	authentication "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/utils/ptr"

	"nodeproxy/deploy"
	"nodeproxy/e2e/harness"
)

// ServiceAccounts is the controller with which pods get the files of their ServiceAccount, as far as another one, RootCA, runs too.
const (
	ServiceAccounts = "serviceaccount-controller"
	RootCA          = "root-ca-certificate-publisher-controller"
)

// startTimeout is how long a program of the control plane may take until it is ready. In a test kernel on a busy machine, the API server has a small
// part of one processor, and needs a minute or so of it.
const startTimeout = 3 * harness.Limit

// ControlPlane is a control plane on one host.
type ControlPlane struct {
	Etcd, APIServer, ControllerManager *Process
	scheduler                          *Process
	// Admin may do everything.
	Admin kubernetes.Interface

	host *harness.Host
	dir  string
	ca   []byte // which has signed the certificate of the API server
}

// Users of the control plane. What they are called is the token by which the API server knows them, too.
const (
	admin     = "admin"
	manager   = "system:kube-controller-manager"
	scheduler = "system:kube-scheduler"
)

// Start starts a control plane on a host of a World, and waits until it is ready. It ends with the World, in whose directory its files are,
// unless it is closed before. Controllers are run besides those of endpoints.
func Start(w *harness.World, host *harness.Host, controllers ...string) (*ControlPlane, error) {
	binaries, err := Binaries()
	if err != nil {
		return nil, err
	}
	c := &ControlPlane{host: host, dir: filepath.Join(w.Dir, "controlplane")}
	if err := os.Mkdir(c.dir, 0o700); err != nil {
		return nil, err
	}
	if err := c.credentials(); err != nil {
		return nil, err
	}
	process := func(name string, args ...string) *Process {
		return &Process{Name: name, Path: filepath.Join(binaries, name), Args: args, Netns: host.Netns, LogFile: c.file(name + ".log")}
	}
	c.scheduler = process("kube-scheduler", "--kubeconfig="+c.file("scheduler.kubeconfig"), "--leader-elect=false", "--secure-port=0")
	c.Etcd = process("etcd", "--data-dir="+c.file("etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380")
	c.APIServer = process("kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
		"--bind-address="+host.IP4.String(), "--advertise-address="+host.IP4.String(), "--secure-port="+securePort,
		"--kubelet-preferred-address-types=InternalIP", // Names of nodes are known to nobody here.
		"--tls-cert-file="+c.file("apiserver.crt"), "--tls-private-key-file="+c.file("apiserver.key"),
		"--token-auth-file="+c.file("tokens"), "--authorization-mode=RBAC", "--allow-privileged", // as kube-proxy of kubeadm is
		"--service-cluster-ip-range="+harness.ServiceCIDR4.String()+","+harness.ServiceCIDR6.String(),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.file("sa.key"),
		"--service-account-signing-key-file="+c.file("sa.key"))
	if !slices.Contains(controllers, ServiceAccounts) { // Nothing makes one in each namespace, which pods would want.
		c.APIServer.Args = append(c.APIServer.Args, "--disable-admission-plugins=ServiceAccount")
	}
	c.ControllerManager = process("kube-controller-manager", "--kubeconfig="+c.file("controller-manager.kubeconfig"),
		"--controllers="+strings.Join(append([]string{
			"endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller",
		}, controllers...), ","),
		"--use-service-account-credentials", "--root-ca-file="+c.file("apiserver.crt"), "--leader-elect=false", "--secure-port=0",
		"--kube-api-qps=200", "--kube-api-burst=400")
	w.AtEnd(c.Close)
	return c, c.start()
}

const securePort = "6443"

// Close ends the control plane.
func (c *ControlPlane) Close() {
	for _, p := range []*Process{c.scheduler, c.ControllerManager, c.APIServer, c.Etcd} {
		p.Kill()
	}
}

// Logs are the ends of the logs of all programs.
func (c *ControlPlane) Logs() string {
	return c.Etcd.Tail() + c.APIServer.Tail() + c.ControllerManager.Tail() + c.scheduler.Tail()
}

// StartScheduler starts a kube-scheduler, which puts pods on nodes that are ready and have room.
func (c *ControlPlane) StartScheduler() error { return c.scheduler.Start() }

func (c *ControlPlane) file(name string) string { return filepath.Join(c.dir, name) }

// URL is where the API server is.
func (c *ControlPlane) URL() string { return "https://" + c.Address().String() }

// Address is the API server's address and port.
func (c *ControlPlane) Address() netip.AddrPort {
	return netip.MustParseAddrPort(net.JoinHostPort(c.host.IP4.String(), securePort))
}

func (c *ControlPlane) start() error {
	if err := c.Etcd.Start(); err != nil {
		return err
	}
	if err := c.StartAPIServer(); err != nil {
		return err
	}
	return c.ControllerManager.Start()
}

// mostStarts is how often an API server is started that ends by itself before it is ready. On a very busy machine, it does so as some
// of its preparations are not done within half a minute; on a real node, the kubelet starts it again.
const mostStarts = 5

// StartAPIServer starts the API server, after the first time also after APIServer.Kill, and waits until it is ready.
func (c *ControlPlane) StartAPIServer() (err error) {
	for range mostStarts {
		if err := c.APIServer.Start(); err != nil {
			return err
		}
		err = c.APIServer.await(startTimeout, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			return c.Admin.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		})
		if !errors.Is(err, errEnded) {
			break
		}
	}
	return err
}

// credentials makes the files with which the programs of the control plane know each other.
func (c *ControlPlane) credentials() error {
	first := harness.ServiceCIDR4.Addr().Next() // the cluster IP of the API server's own Service
	certificate, key, err := cert.GenerateSelfSignedCertKey(c.host.IP4.String(), []net.IP{first.AsSlice(), net.IPv4(127, 0, 0, 1)},
		[]string{"kubernetes.default.svc"})
	if err != nil {
		return err
	}
	signingKey, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return err
	}
	c.ca = certificate // It comes with that of its authority.
	tokens := fmt.Sprintf("%s,%[1]s,1,system:masters\n%s,%[2]s,2\n%s,%[3]s,3\n", admin, manager, scheduler)
	err = errors.Join(
		os.WriteFile(c.file("sa.key"), signingKey, 0o600),
		os.WriteFile(c.file("apiserver.crt"), certificate, 0o600),
		os.WriteFile(c.file("apiserver.key"), key, 0o600),
		os.WriteFile(c.file("tokens"), []byte(tokens), 0o600),
		c.kubeconfig("controller-manager.kubeconfig", manager),
		c.kubeconfig("scheduler.kubeconfig", scheduler))
	if err != nil {
		return err
	}
	c.Admin, err = kubernetes.NewForConfig(c.Via(c.host.Netns, &rest.Config{BearerToken: admin}))
	return err
}

// kubeconfig writes a kubeconfig file for whom a token stands for.
func (c *ControlPlane) kubeconfig(name, token string) error {
	cfg := api.NewConfig()
	cfg.Clusters["test"] = &api.Cluster{Server: c.URL(), CertificateAuthorityData: c.ca}
	cfg.AuthInfos["user"] = &api.AuthInfo{Token: token}
	cfg.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "user"}
	cfg.CurrentContext = "test"
	return clientcmd.WriteToFile(*cfg, c.file(name))
}

// Kubeconfig writes a kubeconfig with which a client may do everything, as Admin may, and returns its path.
func (c *ControlPlane) Kubeconfig() (string, error) {
	const name = "admin.kubeconfig"
	return c.file(name), c.kubeconfig(name, admin)
}

// Via completes a configuration with which this process reaches the API server from inside a namespace. It sets Host only
// if there is none.
func (c *ControlPlane) Via(n *harness.Netns, cfg *rest.Config) *rest.Config {
	if cfg.Host == "" {
		cfg.Host = c.URL()
	}
	cfg.CAData, cfg.QPS, cfg.ContentType = c.ca, -1, runtime.ContentTypeProtobuf
	cfg.WarningHandler = rest.NoWarnings{}
	cfg.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil } // This machine's can't be reached from the namespace.
	cfg.Dial = n.DialContext(5 * time.Second)
	return cfg
}

// Install creates the objects of deploy/base/rbac.yaml, and returns the path of a kubeconfig and a token with which a client is
// the ServiceAccount in there: allowed what a nodeproxy that is deployed with it is allowed.
func (c *ControlPlane) Install(ctx context.Context) (kubeconfig, token string, err error) {
	text, err := deploy.Files.ReadFile("base/rbac.yaml")
	if err != nil {
		return "", "", err
	}
	return c.Account(ctx, "nodeproxy", string(text))
}

// Account creates the objects of a manifest, and returns the path of a kubeconfig and a token with which a client is the ServiceAccount
// of that name in there, in namespace kube-system.
func (c *ControlPlane) Account(ctx context.Context, name, manifest string) (kubeconfig, token string, err error) {
	for _, doc := range strings.Split(manifest, "\n---\n") {
		if err := c.create(ctx, []byte(doc)); err != nil {
			return "", "", fmt.Errorf("account %s: %w", name, err)
		}
	}
	answer, err := c.Admin.CoreV1().ServiceAccounts("kube-system").CreateToken(ctx, name,
		&authentication.TokenRequest{Spec: authentication.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(6 * 3600))}},
		metav1.CreateOptions{})
	if err != nil {
		return "", "", fmt.Errorf("token of %s: %w", name, err)
	}
	file := name + ".kubeconfig"
	return c.file(file), answer.Status.Token, c.kubeconfig(file, answer.Status.Token)
}

// create creates one object from a manifest. Neither this nor the API server takes fields that it does not know.
func (c *ControlPlane) create(ctx context.Context, doc []byte) error {
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	o, kind, err := decoder.Decode(doc, nil, nil)
	if err != nil {
		return err
	}
	client := c.Admin.RbacV1().RESTClient()
	if kind.Group == v1.GroupName {
		client = c.Admin.CoreV1().RESTClient()
	}
	resource, _ := meta.UnsafeGuessKindToResource(*kind)
	namespace := o.(metav1.Object).GetNamespace()
	return client.Post().NamespaceIfScoped(namespace, namespace != "").Resource(resource.Resource).Body(o).
		Param("fieldValidation", metav1.FieldValidationStrict).Do(ctx).Error()
}

// Compact makes etcd forget all versions but the newest, and what was deleted.
func (c *ControlPlane) Compact(ctx context.Context) error {
	var status struct{ Header struct{ Revision string } }
	if err := c.etcd(ctx, "/v3/maintenance/status", struct{}{}, &status); err != nil {
		return err
	}
	return c.etcd(ctx, "/v3/kv/compaction", map[string]any{"revision": status.Header.Revision, "physical": true}, &struct{}{})
}

// mostPuts is how many operations etcd takes in one transaction.
const mostPuts = 128

// Put writes objects straight into etcd, by their keys there. The API server delivers them as if it had written them itself. They need
// what it would have set: a UID, a time of creation, addresses.
func (c *ControlPlane) Put(ctx context.Context, objects map[string]runtime.Object) error {
	type put struct {
		Key   []byte `json:"key"`
		Value []byte `json:"value"`
	}
	encoder := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	for keys := range slices.Chunk(slices.Collect(maps.Keys(objects)), mostPuts) {
		var puts []any
		for _, key := range keys {
			var value bytes.Buffer
			if err := encoder.Encode(objects[key], &value); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			puts = append(puts, map[string]put{"request_put": {[]byte("/registry/" + key), value.Bytes()}})
		}
		if err := c.etcd(ctx, "/v3/kv/txn", map[string]any{"success": puts}, &struct{}{}); err != nil {
			return err
		}
	}
	return nil
}

// etcd sends a request to etcd.
func (c *ControlPlane) etcd(ctx context.Context, path string, body, answer any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:2379"+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	resp, err := c.host.HTTP().Do(req)
	if err != nil {
		return fmt.Errorf("etcd %s: %w", path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd %s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}

// Binaries returns the directory with the programs of the control plane. It builds them if they are not there, which
// takes some minutes the first time.
var Binaries = sync.OnceValues(func() (string, error) { return harness.Made("e2e/controlplane/build") })

// Kubelet returns the path of a kubelet, as Binaries does for the control plane.
var Kubelet = sync.OnceValues(func() (string, error) {
	dir, err := harness.Made("e2e/controlplane/build", "kubelet")
	return filepath.Join(dir, "kubelet"), err
})
