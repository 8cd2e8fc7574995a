package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/install"
)

// installOutputs are the values of install's --output.
var installOutputs = []string{"manifests", "values", "kube-proxy-off", "kube-proxy-on", "cleanup", "cleanup-nftables-only"}

func installCommand() *cobra.Command {
	i := &installer{}
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Print what installs nodeproxy in a cluster, made of how its kube-proxy is set up",
		Long: "install reads how kube-proxy is set up in a cluster, and prints what puts nodeproxy in its place. It changes nothing: kubectl or helm\n" +
			"does, with what it prints. Standard error says what was found, and where. What is not to be found is an error that names the flag\n" +
			"for it. docs/install has a page for each kind of cluster.\n\n" +
			"It finds kube-proxy's configuration (a ConfigMap, or the flags of its DaemonSet, of its static pods or of the nodes of k3s and RKE2), of which\n" +
			"every field is kept that means anything to nodeproxy; the range of the pods' addresses; and an address of the API server that needs no\n" +
			"Service: from kube-proxy's kubeconfig, kube-public/cluster-info, kubeadm-config, or what k3s, RKE2 and Talos have on each node. The cluster\n" +
			"IP of the Service kubernetes is refused: on a node that has just started, it works only once nodeproxy has programmed it.\n\n" +
			"--output is one of\n" +
			"  manifests              all objects, for kubectl apply -f\n" +
			"  values                 values of the chart, for helm install -f\n" +
			"  kube-proxy-off         a JSON patch of kube-proxy's DaemonSet that keeps it off the nodes, beside its present node affinity\n" +
			"  kube-proxy-on          the JSON patch that undoes it\n" +
			"  cleanup                a DaemonSet that removes all rules from nodes that no proxy serves any more\n" +
			"  cleanup-nftables-only  the same for the tables of mode nftables alone, on nodes that kube-proxy serves again\n\n" +
			"With --migrate, nodeproxy serves only nodes with the label service-proxy=nodeproxy, and kube-proxy the others.\n\n" +
			"The cluster is that of kubectl: of --kubeconfig, KUBECONFIG or ~/.kube/config. With --filename it is described by a file, such as the output\n" +
			"of: kubectl get configmaps,daemonsets,pods,nodes,services -A -o json",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := i.run(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&i.output, "output", "o", "manifests", "what to print: "+strings.Join(installOutputs, ", "))
	flags.StringVarP(&i.file, "filename", "f", "", "file that describes the cluster, or - for standard input")
	flags.StringVar(&i.kubeconfig, "kubeconfig", "", "kubeconfig file of the cluster; by default the one that kubectl uses")
	flags.StringVar(&i.context, "context", "", "context of the kubeconfig; by default its current one")
	flags.StringVar(&i.options.APIServer, "api-server", "", "ADDRESS:PORT at which every node reaches the API server without any Service")
	flags.StringVar(&i.options.ClusterCIDR, "cluster-cidr", "", "range of the pods' addresses, a comma-separated pair for dual stack, or "+install.NoCIDR)
	flags.StringVar(&i.options.Mode, "mode", "", "nodeproxy's mode: "+strings.Join(config.Modes(), ", ")+"; by default kube-proxy's")
	flags.StringVar(&i.options.Image, "image", image, "nodeproxy's image; by default that of this program's release, or the one of the manifests")
	flags.BoolVar(&i.loadModules, "load-kernel-modules", true, "in mode ipvs, an init container with the capability SYS_MODULE loads kernel modules; never on Talos")
	flags.BoolVar(&i.options.Migrate, "migrate", false, "nodeproxy only on nodes with the label service-proxy=nodeproxy, kube-proxy on the others")
	return cmd
}

// installer carries out the command install.
type installer struct {
	options                           install.Options
	output, file, kubeconfig, context string
	loadModules                       bool
}

func (i *installer) run(ctx context.Context, stdin io.Reader, stderr io.Writer) ([]byte, error) {
	if err := oneOf("output", i.output, installOutputs); err != nil {
		return nil, err
	}
	if i.options.Mode != "" {
		if err := oneOf("mode", i.options.Mode, config.Modes()); err != nil {
			return nil, err
		}
	}
	// What is said quotes names, versions and flags, which the nodes themselves and others who may write objects choose.
	say := func(format string, args ...any) {
		fmt.Fprintln(stderr, inspect.Printable(fmt.Sprintf(format, args...)))
	}
	i.options.NoKernelModules = !i.loadModules
	if i.options.Image == "" && !strings.HasPrefix(i.output, "kube-proxy-") {
		say("--image: not given: what is printed names localhost/nodeproxy:latest, which nodes can't pull")
	}
	var cluster install.Cluster
	if err := i.read(ctx, &cluster, stdin, say); err != nil {
		return nil, err
	}
	switch i.output {
	case "cleanup", "cleanup-nftables-only":
		return cluster.Cleanup(i.options.Image, i.output != "cleanup")
	case "kube-proxy-off":
		return cluster.KeepOff(i.options.Migrate, say)
	case "kube-proxy-on":
		return cluster.Restore(say)
	}
	setup, err := cluster.Detect(i.options, say)
	if err != nil {
		return nil, err
	}
	findings, err := setup.Check()
	if err != nil {
		return nil, err
	}
	for _, f := range findings {
		say("%s: %s", f.Severity, f)
	}
	if i.output == "values" {
		return setup.Values()
	}
	return setup.Manifests()
}

// read reads the cluster from a file or from its API server.
func (i *installer) read(ctx context.Context, cluster *install.Cluster, stdin io.Reader, say func(string, ...any)) error {
	if i.file == "" {
		return i.ask(ctx, cluster, say)
	}
	in, name := stdin, "standard input"
	if i.file != "-" {
		f, err := os.Open(i.file)
		if err != nil {
			return &usageError{fmt.Errorf("--filename: %w", err)}
		}
		defer f.Close()
		in, name = f, i.file
	}
	if err := cluster.Read(in); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// installReads are what install asks the API server for. Without the first two it can't say anything.
var installReads = []struct {
	path     string
	required bool
}{
	{"/api/v1/namespaces/kube-system/configmaps", true},
	{"/apis/apps/v1/daemonsets", true},
	{"/api/v1/namespaces/kube-public/configmaps/cluster-info", false},
	{"/api/v1/namespaces/kube-system/pods", false},
	{"/api/v1/nodes", false},
	{"/api/v1/namespaces/default/services/kubernetes", false},
}

// ask reads the cluster from its API server.
func (i *installer) ask(ctx context.Context, cluster *install.Cluster, say func(string, ...any)) error {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = i.kubeconfig
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules,
		&clientcmd.ConfigOverrides{CurrentContext: i.context, ClusterInfo: api.Cluster{}}).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return &usageError{fmt.Errorf("--kubeconfig: not given, and there is none that kubectl would use (KUBECONFIG, %s); --filename reads what describes the cluster from a file",
			clientcmd.RecommendedHomeFile)}
	}
	if err != nil {
		return &usageError{fmt.Errorf("--kubeconfig: %w", err)}
	}
	cfg.Timeout = time.Minute
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return &usageError{fmt.Errorf("--kubeconfig: %w", err)}
	}
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return &usageError{fmt.Errorf("--kubeconfig: %w", err)}
	}
	cluster.Server = server.String()
	for _, r := range installReads {
		text, err := get(ctx, client, server.JoinPath(r.path))
		switch {
		case errors.Is(err, errAbsent):
		case err != nil && !r.required:
			say("not read: %s: %v", r.path, err)
		case err != nil:
			return fmt.Errorf("%s: %w", r.path, err)
		default:
			if err := cluster.Add(text); err != nil {
				return fmt.Errorf("%s: %w", r.path, err)
			}
		}
	}
	return nil
}

var errAbsent = errors.New("there is none")

// get returns what an API server answers, as JSON.
func get(ctx context.Context, client *http.Client, at *url.URL) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	answer, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	switch {
	case err != nil:
		return nil, err
	case answer.StatusCode == http.StatusNotFound:
		return nil, errAbsent
	case answer.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("the API server answers %s: %.300s", answer.Status, text)
	}
	return text, nil
}

// pauseCommand is for the container that keeps a pod of deploy/cleanup when it is done.
func pauseCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "pause",
		Short:  "Do nothing until SIGTERM or SIGINT",
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			<-ctx.Done()
			return nil
		},
	}
}
